"""What /openapi.json promises: every route's errors in one shape, a bound on every field a caller may send."""

import dataclasses
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import jsonschema_rs
import pytest

from server.app import create_app
from server.engine.adapter_registry import AdapterInfo
from server.engine.messages import AddRequest, EngineReady, EngineStats, TokenDelta
from server.lifecycle import Lifecycle
from server.schemas.chat import ChatCompletionRequest, ChatMessage
from server.schemas.completions import CompletionRequest
from server.schemas.training import CreateModelRequest
from server.schemas.wire import RequestModel
from server.settings import Settings

REQUESTS = (
    "ChatCompletionRequest",
    "CompletionRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
    "FineTuningJobRequest",
    "LoadLoraAdapterRequest",
    "UnloadLoraAdapterRequest",
    "CreateModelRequest",
    "ComputeRequest",
    "OptimStepRequest",
    "SaveWeightsRequest",
    "SaveWeightsForSamplerRequest",
    "LoadWeightsRequest",
    "DeleteWeightsRequest",
    "SampleRequest",
    "OrderedRequest",
    "ModelRequest",
    "RetrieveFutureRequest",
)


@dataclasses.dataclass
class AbsentEngine:
    """The application's description needs no engine."""

    stats: EngineStats | None = None
    times: Any = None
    is_ready: bool = False
    seconds_to_ready: float = 0.0
    alive: bool = False
    heartbeat_age: float = 0.0
    num_deaths: int = 0

    async def start(self) -> None: ...
    async def gone(self) -> None: ...
    async def shutdown(self, timeout: float = 0.0) -> None: ...

    async def ready(self) -> EngineReady:
        raise NotImplementedError

    async def load_adapter(
        self, name: str, folder: str, *, owner: str = "", within: str | None = None, replace: bool = False
    ) -> AdapterInfo:
        raise NotImplementedError

    async def unload_adapter(self, name: str, *, owner: str | None = None) -> None: ...

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return ()

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        raise NotImplementedError
        yield


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return create_app(Lifecycle(Settings(), AbsentEngine(), object)).openapi()


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_every_issue_route_is_described(schema: dict[str, Any]) -> None:
    assert set(schema["paths"]) >= {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/health/live", "/health/ready", "/health/startup", "/metrics",
    }  # fmt: skip


def test_errors_are_documented_in_one_shape_and_never_422(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema):
        replies = operation["responses"]
        assert "422" not in replies, name
        wanted = {"503"} if "/health" in name else {"401", "500"}
        if operation.get("requestBody"):
            wanted |= {"400", "401", "404", "408", "413", "415", "500", "503"}
        assert wanted <= set(replies), name
        for status in wanted if "/health" not in name else ():
            reference = replies[status]["content"]["application/json"]["schema"]["$ref"]
            assert reference.endswith("/ErrorReply"), (name, status)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health/startup"])
def test_probes_take_head_which_promises_no_body(schema: dict[str, Any], path: str) -> None:
    get, head = (schema["paths"][path][method]["responses"] for method in ("get", "head"))
    assert set(head) == set(get) == {"200", "503"}
    assert all("content" in reply for reply in get.values())
    assert not any("content" in reply for reply in head.values())


def test_the_error_shape_has_all_four_keys(schema: dict[str, Any]) -> None:
    detail = schema["components"]["schemas"]["ErrorDetail"]
    assert set(detail["required"]) == {"message", "type", "param", "code"}


LIMITS = {
    "integer": ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}),
    "number": ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}),
    "string": ({"maxLength", "pattern"},),
    "array": ({"maxItems"},),
}


def unbounded(schema: dict[str, Any], node: dict[str, Any], place: str, seen: frozenset[str]) -> Iterator[str]:
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from unbounded(schema, schema["components"]["schemas"][name], place, seen | {name})
        return
    for branch in node.get("anyOf", ()):
        yield from unbounded(schema, branch, place, seen)
    closed = {"enum", "const"} & node.keys()
    if not closed and any(not limits & node.keys() for limits in LIMITS.get(node.get("type", ""), ())):
        yield place
    if "items" in node:
        yield from unbounded(schema, node["items"], f"{place}[]", seen)
    if node.get("type") == "object":
        yield from unbounded_object(schema, node, place, seen)


def unbounded_object(schema: dict[str, Any], node: dict[str, Any], place: str, seen: frozenset[str]) -> Iterator[str]:
    values = list(node.get("patternProperties", {}).values())
    if node.get("additionalProperties") is not False and not ("maxProperties" in node and values):
        yield f"{place} (open object)"
    for value in values:
        yield from unbounded(schema, value, f"{place}.*", seen)
    for name, field in node.get("properties", {}).items():
        yield from unbounded(schema, field, f"{place}.{name}", seen)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_a_caller_may_send_is_bounded(schema: dict[str, Any], name: str) -> None:
    assert list(unbounded(schema, {"$ref": f"#/components/schemas/{name}"}, name, frozenset())) == []


def test_request_objects_take_no_unknown_fields(schema: dict[str, Any]) -> None:
    closed = {name: model.get("additionalProperties") for name, model in schema["components"]["schemas"].items()}
    for name in (*REQUESTS, "ChatMessage", "TextPart", "StreamOptions"):
        assert closed[name] is False, name


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, ChatMessage, CreateModelRequest])
def test_fields_that_ask_for_nothing_are_described_with_the_values_that_are_accepted(
    schema: dict[str, Any], model: type[RequestModel]
) -> None:
    fields = schema["components"]["schemas"][model.__name__]["properties"]
    for name, neutrals in model.unsupported.items():
        assert fields[name]["description"].startswith("Not served"), name
        assert all(jsonschema_rs.is_valid(fields[name], value) for value in (None, *neutrals)), name
        assert not jsonschema_rs.is_valid(fields[name], "what nobody ever said"), name
    for name in model.harmless:
        assert fields[name] == {"description": "Accepted, and without effect."}
