"""One line of a training file -> the form of its example, or what is wrong with it. Must not know files or HTTP."""

import json
import re
import threading
from enum import StrEnum
from typing import Any

import msgspec

from server import strict_json

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message, as in a chat completion
ROLES = ("system", "developer", "user", "assistant")
MESSAGE_KEYS = frozenset({"role", "content", "name", "weight"})
PART_KEYS = frozenset({"type", "text"})
TOOL_KEYS = frozenset({"tools", "functions", "tool_calls", "function_call", "tool_call_id", "parallel_tool_calls"})
NO_TOOLS = frozenset({"tools", "parallel_tool_calls"})  # of an example: no tools, and how none are called
PREFERENCE_KEYS = frozenset({"input", "preferred_output", "non_preferred_output"})
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
FORMS = (
    'a chat example, {"messages": [...]}, a pair, {"prompt": "...", "completion": "..."}, or a preference, '
    '{"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}'
)

LONG_LINE = 64 * 2**10  # bytes; from here on a line is checked by its shape before Python's objects are made of it
_one_at_a_time = threading.Lock()  # the objects of a long line take many times its size


class Form(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"
    PREFERENCE = "preference"


class NotAnExample(Exception):  # noqa: N818 - a verdict
    """Why a line is no example: a sentence that goes on from "Line 3: "."""


class PartShape(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class MessageShape(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[PartShape]
    name: str | None = None
    weight: float | bool | None = None


class InputShape(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[MessageShape] | msgspec.UnsetType = msgspec.UNSET
    tools: list[None] | msgspec.UnsetType = msgspec.UNSET
    parallel_tool_calls: bool | msgspec.UnsetType | None = msgspec.UNSET


class ExampleShape(msgspec.Struct, forbid_unknown_fields=True):
    input: InputShape | msgspec.UnsetType = msgspec.UNSET
    preferred_output: list[MessageShape] | msgspec.UnsetType = msgspec.UNSET
    non_preferred_output: list[MessageShape] | msgspec.UnsetType = msgspec.UNSET
    messages: list[MessageShape] | msgspec.UnsetType = msgspec.UNSET
    tools: list[None] | msgspec.UnsetType = msgspec.UNSET
    parallel_tool_calls: bool | msgspec.UnsetType | None = msgspec.UNSET
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    completion: str | msgspec.UnsetType = msgspec.UNSET


SHAPE = msgspec.json.Decoder(ExampleShape)
TOOLS_PLACE = re.compile(r" - at `\$\.((?:input\.)?tools)\b")  # in msgspec's errors


def read_example(line: bytes) -> Form:
    """The form of one line's example. Raises NotAnExample."""
    if not line.strip(b" \t\r"):
        raise NotAnExample("it is blank")
    if b"\0" in line:
        raise NotAnExample(f"byte {line.index(0) + 1} is NUL")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotAnExample(f"byte {error.start + 1} is not UTF-8") from None
    if len(line) > LONG_LINE:
        _check_shape(line)
    example = _parse(text)
    if ESCAPED_SURROGATE.search(line) and _has_lone_surrogate(example):
        raise NotAnExample("it has half of a surrogate pair, which is no character")
    if not isinstance(example, dict):
        raise NotAnExample(f"it is {_kind(example)}; every line is a JSON object of its own")
    if "messages" in example:
        _check_chat(example)
        return Form.CHAT
    if "prompt" in example or "completion" in example:
        _check_completion(example)
        return Form.COMPLETION
    if example.keys() & PREFERENCE_KEYS:
        _check_preference(example)
        return Form.PREFERENCE
    raise NotAnExample(f"it is no example; a line is {FORMS}")


def _check_shape(line: bytes) -> None:
    """A line made of a million brackets would hold Python's lock, and memory, long before it turned out to be none."""
    try:
        SHAPE.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        if tools := TOOLS_PLACE.search(str(error)):
            raise NotAnExample(f"{tools[1]}: tools are not served") from None
        raise NotAnExample(f"it is no example: {str(error)[:200]}") from None


def _parse(text: str) -> Any:
    try:
        with _one_at_a_time:
            return strict_json.loads(text)
    except json.JSONDecodeError as error:
        raise NotAnExample(f"it is no JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise NotAnExample("it is nested too deeply") from None
    except ValueError as error:
        raise NotAnExample(f"it is no JSON: {str(error).partition(';')[0]}") from None


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _check_chat(example: dict[str, Any]) -> None:
    _check_no_tools(example, "")
    _only_keys(example, frozenset({"messages"}) | NO_TOOLS, "a chat example")
    messages = _messages(example["messages"], "messages")
    weights = [_weight(message, f"messages[{at}]") for at, message in enumerate(messages)]
    if messages[-1]["role"] != "assistant":
        raise NotAnExample(f"the last message is the {messages[-1]['role']}'s; an example ends with the assistant's")
    if not any(weights):
        raise NotAnExample("every assistant message has weight 0: there is nothing to learn")


def _check_preference(example: dict[str, Any]) -> None:
    """https://platform.openai.com/docs/guides/direct-preference-optimization: one message preferred to another."""
    _only_keys(example, PREFERENCE_KEYS, "a preference example")
    missing = PREFERENCE_KEYS - example.keys()
    if missing:
        raise NotAnExample(f"{min(missing)} is missing")
    asked = example["input"]
    if not isinstance(asked, dict):
        raise NotAnExample(f"input is {_kind(asked)}, not an object")
    _check_no_tools(asked, "input.")
    _only_keys(asked, frozenset({"messages"}) | NO_TOOLS, "input")
    if "messages" not in asked:
        raise NotAnExample("input.messages is missing")
    messages = _messages(asked["messages"], "input.messages")
    for at, message in enumerate(messages):
        _weight(message, f"input.messages[{at}]")
    if messages[-1]["role"] == "assistant":
        raise NotAnExample("the last message of the input is the assistant's; the outputs follow a user's")
    for name in ("preferred_output", "non_preferred_output"):
        output = _messages(example[name], name)
        if len(output) != 1:
            raise NotAnExample(f"{name} has {len(output)} messages; it has one, the assistant's")
        if not _weight(output[0], f"{name}[0]"):
            role = output[0]["role"]
            raise NotAnExample(f"{name}[0] is the {role}'s or has weight 0; it is an assistant's, to be learnt from")


def _check_no_tools(holder: dict[str, Any], place: str) -> None:
    """The two keys of tools that may be there all the same, as OpenAI's own examples have them."""
    keys = holder.keys() & TOOL_KEYS
    if holder.get("tools") == []:
        keys -= {"tools"}
    parallel = holder.get("parallel_tool_calls")
    if "parallel_tool_calls" in keys and not (parallel is None or isinstance(parallel, bool)):
        raise NotAnExample(f"{place}parallel_tool_calls is {_kind(parallel)}, not a boolean")
    keys -= {"parallel_tool_calls"}
    if keys:
        raise NotAnExample(f"{place}{min(keys)}: tools are not served")


def _messages(messages: Any, place: str) -> list[Any]:
    if not isinstance(messages, list):
        raise NotAnExample(f"'{place}' is {_kind(messages)}, not an array")
    if not messages:
        raise NotAnExample(f"'{place}' is empty")
    if len(messages) > MAX_MESSAGES:
        raise NotAnExample(f"it has {len(messages)} messages; at most {MAX_MESSAGES} are taken")
    return messages


def _weight(message: Any, place: str) -> int:
    """What the message counts in the loss: 0 or 1. Raises NotAnExample for what is no message."""
    if not isinstance(message, dict):
        raise NotAnExample(f"{place} is {_kind(message)}, not an object")
    role = message.get("role")
    if role in ("tool", "function") or message.keys() & TOOL_KEYS:
        raise NotAnExample(f"{place} belongs to a tool call: tools are not served")
    if role not in ROLES:
        said = f"{place}.role is {_shown(role)}" if "role" in message else f"{place} has no 'role'"
        raise NotAnExample(f"{said}; roles are {', '.join(ROLES)}")
    _only_keys(message, MESSAGE_KEYS, place)
    _content(message, place)
    name = message.get("name")
    if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
        raise NotAnExample(f"{place}.name is not 1 to 64 letters, digits, '_' and '-'")
    if role != "assistant":
        if "weight" in message:
            raise NotAnExample(f"{place}.weight: only assistant messages have a weight")
        return 0
    weight = message.get("weight", 1)
    if type(weight) is not int or weight not in (0, 1):
        raise NotAnExample(f"{place}.weight is {_shown(weight)}; a weight is 0 or 1")
    return weight


def _content(message: dict[str, Any], place: str) -> None:
    """A string, or parts of text."""
    content = message.get("content")
    if not isinstance(content, list):
        return _text(message, "content", f"{place}.", wanted="a string or an array of text parts")
    if len(content) > MAX_PARTS:
        raise NotAnExample(f"{place}.content has {len(content)} parts; at most {MAX_PARTS} are taken")
    for at, part in enumerate(content):
        _check_part(part, f"{place}.content[{at}]")
    if not any(part["text"] for part in content):
        raise NotAnExample(f"{place}.content is empty")
    return None


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, dict):
        raise NotAnExample(f"{place} is {_kind(part)}, not an object")
    if part.get("type") != "text":
        said = f"{place}.type is {_shown(part['type'])}" if "type" in part else f"{place} has no 'type'"
        raise NotAnExample(f"{said}; parts are of type 'text', and no others are served")
    _only_keys(part, PART_KEYS, place)
    _text(part, "text", f"{place}.", may_be_empty=True)


def _check_completion(example: dict[str, Any]) -> None:
    _only_keys(example, frozenset({"prompt", "completion"}), "a prompt/completion example")
    _text(example, "prompt", "", may_be_empty=True)
    _text(example, "completion", "")


def _text(
    holder: dict[str, Any], key: str, place: str, *, may_be_empty: bool = False, wanted: str = "a string"
) -> None:
    if key not in holder:
        raise NotAnExample(f"{place}{key} is missing")
    if not isinstance(holder[key], str):
        raise NotAnExample(f"{place}{key} is {_kind(holder[key])}, not {wanted}")
    if not holder[key] and not may_be_empty:
        raise NotAnExample(f"{place}{key} is empty")


def _only_keys(holder: dict[str, Any], known: frozenset[str], what: str) -> None:
    unknown = holder.keys() - known
    if unknown:
        raise NotAnExample(f"{what} has no key {_shown(min(unknown))}")


def _shown(value: Any) -> str:
    """A value as it may stand in a message: never long."""
    text = repr(value) if isinstance(value, str | int | float) else _kind(value)
    return text if len(text) <= 48 else f"{text[:48]}..."


def _kind(value: Any) -> str:
    kinds = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
