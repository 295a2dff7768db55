"""What every body on the wire has in common: strict types, no unknown fields, bounded text. Knows no endpoint."""

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError

from server.engine.token_ids import TokenIds
from server.errors import InvalidRequest

MAX_TEXT = 16 * 2**20  # characters of one text; the body limit is usually nearer
MAX_KEYS = 128  # keys of one object: more is an attack, and each would cost an error message
MAX_TOKEN_IDS = 16_777_216
MAX_TOKEN_ID = 2**31 - 1
# Types of errors; pydantic knows in which object, and their context has the field's name and the values of it that are
# accepted, or the kind of a part.
UNSUPPORTED, UNSUPPORTED_PART = "unsupported_parameter", "unsupported_part"
NEUTRAL = "Not served: accepted only where it asks for what happens anyway."
UNUSED = "Accepted, and without effect."
_JSON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}

Text = Annotated[str, Field(max_length=MAX_TEXT)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def check_length(given: TokenIds, most: int) -> None:
    """Raises ValueError."""
    if len(given) > most:
        raise ValueError(f"List should have at most {most} items, not {len(given)}")


def _as_it_was_read(given: Any, validate: ValidatorFunctionWrapHandler, most: int) -> Any:
    if not isinstance(given, TokenIds):
        return validate(given)
    check_length(given, most)
    return given


def may_be_long(most: int) -> WrapValidator:
    """Where a list may have so many ids: server.large_json has read it as TokenIds then, and checked each."""
    return WrapValidator(partial(_as_it_was_read, most=most))


MayBeLong = may_be_long(MAX_TOKEN_IDS)


class WireModel(BaseModel):
    """JSON types are what they are: no "1" for 1, no true for 1, no NaN. In a reply every field is there."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_serialization_defaults_required=True,
    )


class RequestModel(WireModel):
    """A request body. Fields of OpenAI's or vLLM's API that we know and do not serve are refused by name unless they
    ask for what happens anyway; harmless ones are accepted and not used."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}  # name -> the values that ask for nothing

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, body: Any) -> Any:
        if isinstance(body, TokenIds):  # else an object with attributes, of which some are missing
            raise PydanticKnownError("model_attributes_type")
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_KEYS:
            raise InvalidRequest(f"An object of the request has {len(body)} keys; at most {MAX_KEYS} are read.")
        for name in body.keys() & cls.unsupported.keys():
            if not any(_same(body[name], neutral) for neutral in (None, *cls.unsupported[name])):
                context = {"name": name, "neutral": cls.unsupported[name]}
                raise PydanticCustomError(UNSUPPORTED, "'{name}' is not served here", context)
        dropped = cls.harmless | cls.unsupported.keys()
        return {name: value for name, value in body.items() if name not in dropped}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the fields that are taken and not used: what is sent by a client that was made from it is accepted."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, neutrals in sorted(cls.unsupported.items()):
            properties[name] = {"anyOf": [*map(_exactly, neutrals), {"type": "null"}], "description": NEUTRAL}
        for name in sorted(cls.harmless):
            properties[name] = {"description": UNUSED}
        return schema


def _exactly(value: Any) -> dict[str, Any]:
    """The JSON schema of this value alone."""
    if isinstance(value, dict):
        fields = {name: _exactly(one) for name, one in value.items()}
        return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    if isinstance(value, list):
        items = {"items": {"enum": value}} if value else {"items": {}}
        return {"type": "array", **items, "minItems": len(value), "maxItems": len(value)}
    return {"type": _JSON_TYPES[type(value)], "const": value}


def _same(value: Any, neutral: Any) -> bool:
    """Equal and of one JSON type (True is not 1)."""
    return type(value) is type(neutral) and bool(value == neutral)
