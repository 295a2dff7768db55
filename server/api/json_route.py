"""Routes that read their JSON strictly: no NaN, no key twice, no endless nesting or digits. Knows no schema."""

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute


class StrictJSONRequest(Request):
    async def json(self) -> Any:
        try:
            text = (await self.body()).decode("utf-8")
            return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        raise ValueError("an object has a key twice")
    return read


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
