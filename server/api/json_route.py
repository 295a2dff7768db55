"""Routes that read their JSON strictly: no NaN, no key twice, no endless nesting or digits. Knows no schema."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from server import strict_json


class StrictJSONRequest(Request):
    async def json(self) -> Any:
        try:
            return strict_json.loads((await self.body()).decode("utf-8"))
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, "", 0) from None  # the body does not travel with the error
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise json.JSONDecodeError(reason, "", 0) from None


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(StrictJSONRequest(request.scope, request.receive))

        return read_strictly
