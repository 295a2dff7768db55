"""What the values of settings are, beyond their bounds: names, keys, folders, and several of them in one text ("a,b");
variables of chat templates, in requests too. Reads no environment."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_core import PydanticKnownError
from pydantic_settings import NoDecode

from server import strict_json
from server.engine.adapter_registry import NAME
from server.engine.config import BLOCK_SIZES
from server.engine.token_ids import TokenIds

PLACEHOLDER_KEYS = frozenset({"changeme", "change-me", "secret", "password", "your-api-key", "example"})
MAX_NAME = 256  # characters of a model's name, as requests may give it (server/schemas/wire.py)
ANY_ORIGIN = "*"
ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")  # RFC 6454, 6.2, of web pages
MAX_VARIABLES, MAX_VARIABLE_NAME = 64, 64  # that a chat template is given; characters
MAX_VARIABLE_VALUES = 16_384  # of all of them together: characters of texts, digits, and other values
MAX_VARIABLE_DEPTH = 8
#: What a template has from the server, or what is said in another place.
SERVERS_VARIABLES = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
})  # fmt: skip
SERVED_KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3")


def _comma_separated(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _json_or_commas(value: Any) -> Any:
    """A list as vLLM's command line has it, '["a", "b"]', or what is between commas."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return _comma_separated(value or ())
    return _json_read(value)


def _origins_are_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin != ANY_ORIGIN and not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r:.300} is no origin of a web page: https://chat.example:8443, without a path, or *"
            )
    return tuple(origin.lower() for origin in origins)


def _names_are_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name or len(name) > MAX_NAME for name in names):
        raise ValueError(f"a served model name has 1 to {MAX_NAME} characters")
    if len(set(names)) != len(names):
        raise ValueError("a name is given twice")
    return names


def _modules_have_names_and_folders(modules: tuple[str, ...]) -> tuple[str, ...]:
    names = [module.partition("=")[0] for module in modules]
    for module, name in zip(modules, names, strict=True):
        if not NAME.fullmatch(name) or not module.removeprefix(name)[1:]:
            raise ValueError(f"{module!r:.300} is not name=folder (a name has letters, digits and . : @ / + - _)")
    if len(set(names)) != len(names):
        raise ValueError("a name is given twice")
    return modules


def _keys_are_secrets(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    for key in keys:
        text = key.get_secret_value()
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("an API key is one or more printable ASCII characters without spaces")
        if len(text) > 512:
            raise ValueError("an API key has at most 512 characters")
        if text.lower() in PLACEHOLDER_KEYS:
            raise ValueError("an API key must not be a placeholder such as 'changeme'")
    return keys


def _empty_is_unset(value: Any) -> Any:
    return None if value == "" else value


def _is_absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _block_size_is_served(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"{value} is not served; a block has {', '.join(map(str, BLOCK_SIZES))} tokens")
    return value


def _kv_dtype_is_served(value: str) -> str:
    if value not in SERVED_KV_DTYPES:
        raise ValueError(f"{value!r} is not served; the KV cache is one of {', '.join(SERVED_KV_DTYPES)}")
    return value


def _json_read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return strict_json.loads(value or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None


def few_keys(most: int) -> BeforeValidator:
    """Of an object, looked at first: a dict's max_length counts after all its keys, and each could be an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            context = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", context)
        return value

    return BeforeValidator(check)


def _variables_may_be_set(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(SERVERS_VARIABLES & variables.keys())
    if taken:
        raise ValueError(f"'{taken[0]}' is set by the server itself")
    if sum(map(_number_of_values, variables.values())) > MAX_VARIABLE_VALUES:
        raise ValueError(f"they have more than {MAX_VARIABLE_VALUES} characters and values")
    return variables


def _number_of_values(value: Any, depth: int = 1) -> int:
    if depth > MAX_VARIABLE_DEPTH:
        raise ValueError(f"they are nested more than {MAX_VARIABLE_DEPTH} deep")
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, dict):
        return 1 + sum(len(key) + _number_of_values(one, depth + 1) for key, one in value.items())
    if isinstance(value, list):
        return 1 + sum(_number_of_values(one, depth + 1) for one in value)
    if isinstance(value, TokenIds):  # as server.large_json reads long lists
        raise ValueError("they have a list of thousands of numbers")
    return 1 + (value.bit_length() // 3 if isinstance(value, int) else 0)


Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_separated)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_comma_separated)]

ModelNames = Annotated[Texts, AfterValidator(_names_are_names)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_json_or_commas), AfterValidator(_origins_are_origins)]
LoraModules = Annotated[Texts, AfterValidator(_modules_have_names_and_folders)]
ApiKeys = Annotated[Secrets, AfterValidator(_keys_are_secrets)]
Folder = Annotated[Path | None, BeforeValidator(_empty_is_unset), AfterValidator(_is_absolute)]
VariableName = Annotated[str, Field(pattern=rf"^[A-Za-z_][A-Za-z0-9_]{{0,{MAX_VARIABLE_NAME - 1}}}$")]
TemplateVariables = Annotated[
    dict[VariableName, Any],
    Field(max_length=MAX_VARIABLES),
    few_keys(MAX_VARIABLES),
    AfterValidator(_variables_may_be_set),
]
JsonVariables = Annotated[TemplateVariables, NoDecode, BeforeValidator(_json_read)]
BlockSize = Annotated[int, AfterValidator(_block_size_is_served)]
KvDtype = Annotated[str, AfterValidator(_kv_dtype_is_served)]
