"""Routes that read their JSON strictly: no NaN, no key twice, no endless nesting or digits, no millions of values.
Knows no schema."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from server import large_json
from server.errors import PayloadTooLarge

MOST_VALUES = 100_000  # of one body, lists of token ids not counted: reading them takes a tenth of a second
VALUES_OF_A_TOKEN = 4  # that is trained: three numbers and a target


class _Refused(HTTPException):
    """FastAPI lets it pass: any other exception of `json` is to it a body that is none."""

    def __init__(self, error: PayloadTooLarge) -> None:
        super().__init__(error.status)
        self.error = error


class StrictJSONRequest(Request):
    most_values = MOST_VALUES

    async def json(self) -> Any:
        try:
            return await large_json.loads(await self.body(), self.most_values)
        except PayloadTooLarge as error:
            raise _Refused(error) from None
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, "", 0) from None  # the body does not travel with the error
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise json.JSONDecodeError(reason, "", 0) from None


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            try:
                return await handle(self.strict(request))
            except _Refused as refused:
                raise refused.error from None

        return read_strictly

    def strict(self, request: Request) -> StrictJSONRequest:
        return StrictJSONRequest(request.scope, request.receive)


class TrainingRoute(StrictJSONRoute):
    """Its bodies may have as many numbers as one call may have tokens."""

    def strict(self, request: Request) -> StrictJSONRequest:
        strict = super().strict(request)
        strict.most_values += VALUES_OF_A_TOKEN * request.app.state.lifecycle.settings.max_training_call_tokens
        return strict
