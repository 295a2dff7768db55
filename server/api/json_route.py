"""Routes that read their JSON strictly: no NaN, no key twice, no endless nesting or digits, no millions of values; and
that hold a large one against its schema in a thread. Knows no schema."""

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from server import large_json
from server.api.failures import invalid_request
from server.errors import LongwaveError, PayloadTooLarge

MOST_VALUES = 100_000  # of one body, lists of token ids not counted
VALUES_OF_A_TOKEN = 4  # that is trained: three numbers and a target


class _Refused(HTTPException):
    """FastAPI lets it pass: any other exception of `json` is to it a body that is none."""

    def __init__(self, error: Exception) -> None:
        super().__init__(400)
        self.error = error


def _reason(error: ValueError | RecursionError, num_bytes: int) -> str:
    """Why a body is no JSON of ours, in words that are not Python's."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no UTF-8 at byte {error.start}"
    if not isinstance(error, json.JSONDecodeError):
        return "a number has too many digits" if "digits" in str(error) else str(error)
    what = "it begins with a byte order mark" if "BOM" in error.msg else error.msg.removesuffix(" at")
    # In a long body places are those of a text without its lists of token ids.
    return f"{what} (line {error.lineno}, column {error.colno})" if num_bytes <= large_json.SMALL_BYTES else what


def _checked(schema: Any, body: Any) -> Any:
    """The model that `body` is, which FastAPI takes for what it says, or why it is none: LongwaveError."""
    try:
        model, errors = schema.validate(body, loc=("body",))
    except LongwaveError as error:
        return _alone(error)
    return invalid_request(errors, body) if errors else model


def _alone(error: LongwaveError) -> LongwaveError:
    """Without the frames that it came through, and what they hold."""
    error.__context__ = None
    return error.with_traceback(None)


async def _read(body: bytes, most_values: int, schema: Any) -> Any:
    """What the body says, held against its schema where it is large; or why it is refused, an exception that is not
    raised: those of routes are garbage in cycles, of FastAPI's making, and keep what the frames hold that they came
    through until somebody collects it."""
    try:
        read = await large_json.loads(body, most_values)
    except PayloadTooLarge as error:
        return _alone(error)
    except (ValueError, RecursionError) as error:
        return json.JSONDecodeError(_reason(error, len(body)), "", 0)
    if schema is None or len(body) <= large_json.SMALL_BYTES:
        return read
    return await large_json.in_thread(partial(_checked, schema, read))


class StrictJSONRequest(Request):
    most_values = MOST_VALUES
    schema: Any = None  # of the body: a ModelField, which FastAPI gives no public name

    async def body(self) -> bytes:
        """The first byte, if there is any: FastAPI holds what it gets from here until the answer is complete."""
        self._came = b"".join([chunk async for chunk in self.stream()])
        return self._came[:1]

    async def json(self) -> Any:
        try:
            read = await _read(self._taken(), self.most_values, self.schema)
        except Exception as error:
            raise _Refused(error) from None
        if isinstance(read, LongwaveError):
            raise _Refused(read)
        if isinstance(read, json.JSONDecodeError):
            raise read
        return read

    def _taken(self) -> bytes:
        came, self._came = self._came, b""
        return came


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            try:
                return await handle(self.strict(request))
            except _Refused as refused:
                error = refused.error
            raise error

        return read_strictly

    def strict(self, request: Request) -> StrictJSONRequest:
        strict = StrictJSONRequest(request.scope, request.receive)
        strict.schema = self.body_field
        return strict


class TrainingRoute(StrictJSONRoute):
    """Its bodies may have as many numbers as one call may have tokens."""

    def strict(self, request: Request) -> StrictJSONRequest:
        strict = super().strict(request)
        strict.most_values += VALUES_OF_A_TOKEN * request.app.state.lifecycle.settings.max_training_call_tokens
        return strict
