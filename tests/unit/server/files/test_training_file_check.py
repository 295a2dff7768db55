"""What is a training file and what is not, and that the verdict names the line."""

import gzip
import io
import json
import tarfile
import zipfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_files import CHAT, PAIR, chat

from server.errors import InvalidFile
from server.files.examples import Form
from server.files.jsonl import TrainingFileCheck


def check(content: bytes, piece: int = 7, **limits: int) -> TrainingFileCheck:
    checking = TrainingFileCheck(**limits)
    for start in range(0, len(content), piece):
        checking.feed(content[start : start + piece])
    checking.finish()
    return checking


def refusal(content: bytes, piece: int = 4096, **limits: int) -> str:
    with pytest.raises(InvalidFile) as error:
        check(content, piece, **limits)
    assert (error.value.param, error.value.code) == ("file", "invalid_file")
    return error.value.message


def messages(*given: Any) -> bytes:
    return json.dumps({"messages": given}).encode()


USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
TEXT = {"type": "text", "text": "t"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def parts(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    """The message with these texts for its content."""
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def chat_with(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER, ASSISTANT]} | fields).encode()


def preference(**changes: Any) -> bytes:
    whole = {"input": {"messages": [USER]}, "preferred_output": [ASSISTANT], "non_preferred_output": [ASSISTANT]}
    return json.dumps(whole | changes).encode()


@pytest.mark.parametrize(
    ("content", "form", "examples"),
    [
        (CHAT * 3, Form.CHAT, 3),
        (PAIR * 100, Form.COMPLETION, 100),
        (CHAT.rstrip(b"\n"), Form.CHAT, 1),
        (CHAT.replace(b"\n", b"\r\n") * 2, Form.CHAT, 2),
        (chat("user", "assistant", "user", "assistant", weight=0), Form.CHAT, 1),
        (chat("user", "assistant", weight=1), Form.CHAT, 1),
        (messages(USER, {**ASSISTANT, "name": "Ada-1"}), Form.CHAT, 1),
        (preference() + b"\n" + preference(input={"messages": [USER], "tools": []}), Form.PREFERENCE, 2),
        (preference(input={"messages": [USER, ASSISTANT, USER], "parallel_tool_calls": True}), Form.PREFERENCE, 1),
        (preference(input={"messages": [USER], "parallel_tool_calls": None}), Form.PREFERENCE, 1),
        (chat_with(tools=[], parallel_tool_calls=False), Form.CHAT, 1),
        (chat_with(parallel_tool_calls=None), Form.CHAT, 1),
        (messages({**USER, "role": "developer"}, USER, ASSISTANT), Form.CHAT, 1),
        (messages(parts(USER, "", "u"), parts(ASSISTANT, "a")), Form.CHAT, 1),
        (messages(parts(USER, *["u"] * 1024), ASSISTANT), Form.CHAT, 1),
        (preference(input={"messages": [parts({"role": "developer"}, "d"), USER]}), Form.PREFERENCE, 1),
        (preference(preferred_output=[parts(ASSISTANT, "a", "b")]), Form.PREFERENCE, 1),
        (preference(non_preferred_output=[parts(ASSISTANT, "a")]), Form.PREFERENCE, 1),
        (b'{"prompt": "", "completion": "\\ud83d\\ude00 \xf0\x9f\x98\x80"}', Form.COMPLETION, 1),
    ],
)
def test_all_forms_are_accepted_and_counted(content: bytes, form: Form, examples: int) -> None:
    checked = check(content)
    assert (checked.form, checked.examples) == (form, examples)


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (b"", "it is blank"),
        (b" \t\r", "it is blank"),
        (b"{", "it is no JSON"),
        (b"{'a': 1}", "it is no JSON"),
        (b'{"prompt": NaN, "completion": "x"}', "NaN is no JSON value"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "it is no JSON"),
        (b"[" * 50_000, "it is nested too deeply"),
        (b'{"prompt": "a", "prompt": "b", "completion": "c"}', "an object has a key twice"),
        (b'{"prompt": "\xff", "completion": "c"}', "byte 13 is not UTF-8"),
        (b'{"prompt": "a\x00", "completion": "c"}', "byte 14 is NUL"),
        (b'{"prompt": "\\ud800", "completion": "c"}', "half of a surrogate pair"),
        (b"[1]", "it is an array"),
        (b'"text"', "it is a string"),
        (b"null", "it is null"),
        (b"{}", "it is no example"),
        (b'{"text": "a"}', "it is no example"),
        (b'{"input": {}, "preferred_output": []}', "non_preferred_output is missing"),
        (preference(input={}), "input.messages is missing"),
        (preference(input={"messages": None}), "'input.messages' is null, not an array"),
        (preference(input={"messages": []}), "'input.messages' is empty"),
        (preference(input={"messages": [USER], "tools": [{}]}), "input.tools: tools are not served"),
        (preference(input={"messages": [USER, ASSISTANT]}), "the last message of the input is the assistant's"),
        (preference(input={"messages": [USER], "x": 1}), "input has no key 'x'"),
        (preference(preferred_output=[USER]), "preferred_output[0] is the user's or has weight 0"),
        (preference(non_preferred_output=[]), "'non_preferred_output' is empty"),
        (preference(non_preferred_output=[ASSISTANT, ASSISTANT]), "non_preferred_output has 2 messages"),
        (preference(preferred_output=[{**ASSISTANT, "weight": 0}]), "has weight 0"),
        (preference(messages=[USER]), "a chat example has no key 'input'"),
        (preference(preferred_output={}), "'preferred_output' is an object, not an array"),
        (b'{"messages": []}', "'messages' is empty"),
        (b'{"messages": {}}', "'messages' is an object, not an array"),
        (messages(*[USER] * 5000), "it has 5000 messages; at most 4096"),
        (messages(USER), "the last message is the user's"),
        (messages(USER, "x"), "messages[1] is a string, not an object"),
        (messages({"content": "x"}), "messages[0] has no 'role'"),
        (messages({"role": "bot", "content": "x"}), "messages[0].role is 'bot'; roles are system, developer, user, a"),
        (messages({"role": 7, "content": "x"}), "messages[0].role is 7"),
        (messages({"role": ["user"], "content": "x"}), "messages[0].role is an array"),
        (messages(USER, {"role": "tool", "content": "x"}), "messages[1] belongs to a tool call: tools are not served"),
        (messages({**ASSISTANT, "tool_calls": []}), "messages[0] belongs to a tool call"),
        (chat_with(tools=[{}], parallel_tool_calls=True), ": tools: tools are not served"),
        (chat_with(tools=None), ": tools: tools are not served"),
        (chat_with(functions=[]), ": functions: tools are not served"),
        (chat_with(tools=[], parallel_tool_calls=1), ": parallel_tool_calls is a number, not a boolean"),
        (preference(input={"messages": [USER], "parallel_tool_calls": "no"}), "input.parallel_tool_calls is a string"),
        (b'{"messages": [], "other": 1}', "a chat example has no key 'other'"),
        (messages({**USER, "mood": 1}), "messages[0] has no key 'mood'"),
        (messages({"role": "user"}), "messages[0].content is missing"),
        (messages({"role": "user", "content": ""}), "messages[0].content is empty"),
        (messages({**USER, "content": 7}), "messages[0].content is a number, not a string or an array of text parts"),
        (messages({**USER, "content": []}), "messages[0].content is empty"),
        (messages(parts(USER, "", "")), "messages[0].content is empty"),
        (messages(parts(USER, *["u"] * 1025)), "messages[0].content has 1025 parts; at most 1024 are taken"),
        (messages({**USER, "content": ["u"]}), "messages[0].content[0] is a string, not an object"),
        (messages({**USER, "content": [{"text": "u"}]}), "messages[0].content[0] has no 'type'; parts are of type 'te"),
        (messages({**USER, "content": [{"type": "text"}]}), "messages[0].content[0].text is missing"),
        (messages({**USER, "content": [{"type": "text", "text": 1}]}), "content[0].text is a number, not a string"),
        (messages({**USER, "content": [{"type": "text", "text": "u", "x": 1}]}), "content[0] has no key 'x'"),
        (messages(USER, {**ASSISTANT, "content": [TEXT, IMAGE]}), "messages[1].content[1].type is 'image_url'; parts"),
        (preference(input={"messages": [{**USER, "content": [IMAGE]}]}), "input.messages[0].content[0].type is 'imag"),
        (preference(preferred_output=[{**ASSISTANT, "content": [{"type": "refusal", "refusal": "no"}]}]),
         "preferred_output[0].content[0].type is 'refusal'; parts are of type 'text', and no others are served"),
        (messages({**USER, "role": "developer", "weight": 1}), "only assistant messages have a weight"),
        (messages({**USER, "weight": 1}), "only assistant messages have a weight"),
        (messages(USER, {**ASSISTANT, "weight": 2}), "messages[1].weight is 2; a weight is 0 or 1"),
        (messages(USER, {**ASSISTANT, "weight": True}), "messages[1].weight is True"),
        (messages(USER, {**ASSISTANT, "weight": 0.5}), "messages[1].weight is 0.5"),
        (messages(USER, {**ASSISTANT, "weight": 0}), "there is nothing to learn"),
        (messages({**USER, "name": "a b"}), "messages[0].name is not"),
        (b'{"prompt": "a"}', "completion is missing"),
        (b'{"completion": "a"}', "prompt is missing"),
        (b'{"prompt": "a", "completion": ""}', "completion is empty"),
        (b'{"prompt": null, "completion": "a"}', "prompt is null, not a string"),
        (b'{"prompt": "a", "completion": "b", "x": 1}', "a prompt/completion example has no key 'x'"),
        (b'{"messages": [], "prompt": "a"}', "a chat example has no key 'prompt'"),
    ],
    ids=range(74),
)  # fmt: skip
def test_what_is_no_example_is_refused_with_its_line(line: bytes, verdict: str) -> None:
    for before in (0, 1, 12):
        said = refusal(PAIR * before + line + b"\n" + PAIR)
        assert said.startswith(f"Line {before + 1}: ")
        assert verdict in said


def test_one_form_a_file() -> None:
    said = "Line 3: it is a completion example, and line 1 is a chat example. A file has one form."
    assert refusal(CHAT * 2 + PAIR) == said


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n"])
def test_nothing_is_no_training_file(content: bytes) -> None:
    assert refusal(content) == ("Line 1: it is blank." if content else "The file is empty.")


def archive_of(content: bytes) -> dict[str, bytes]:
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("train.jsonl", content)
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("train.jsonl"))
    return {
        "a zip archive": zipped.getvalue(),
        "gzip data": gzip.compress(content, mtime=0),
        "zstd data": b"\x28\xb5\x2f\xfd" + content,
        "a tar archive": tarred.getvalue(),
        "a Python pickle": b"\x80\x04\x95",
        "text with a byte order mark": b"\xef\xbb\xbf" + content,
        "UTF-16 text": content.decode().encode("utf-16"),
    }


@pytest.mark.parametrize(("name", "content"), archive_of(PAIR * 50).items())
def test_binary_formats_are_refused_by_name(name: str, content: bytes) -> None:
    assert refusal(content) == f"The file is {name}. Upload plain JSONL in UTF-8, without compression."


def test_a_line_over_the_limit_is_refused_before_it_ends() -> None:
    checking = TrainingFileCheck(max_line_bytes=1000)
    checking.feed(PAIR * 20)
    checking.feed(b"x" * 1000)
    with pytest.raises(InvalidFile, match=r"^Line 21: it is longer than 1000 bytes\.$"):
        checking.feed(b"x")


def test_a_last_line_over_the_limit_is_refused_without_newline() -> None:
    assert refusal(b'{"prompt": "' + b"x" * 300, max_line_bytes=200) == "Line 1: it is longer than 200 bytes."


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (b"[" * 100_000, "Expected `object`, got `array`"),
        (b'{"messages":[' + b"[]," * 1_000_000 + b"[]]}", "Expected `object`, got `array` - at `$.messages[0]`"),
        (b'{"prompt":"","completion":"c","x":[' + b"{}," * 100_000 + b"{}]}", "unknown field `x`"),
        (messages(USER, {"role": "assistant", "content": [LONG]}), "got `str` - at `$.messages[1].content[0]`"),
        (
            messages({**USER, "content": [{**TEXT, "text": LONG}, IMAGE]}),
            "Invalid value 'image_url' - at `$.messages[0].co",
        ),
        (messages({**USER, "content": [{"text": LONG}]}), "messages[0].content[0] has no 'type'"),
        (messages(USER, {"role": "assistant", "weight": 1, "x": LONG}), "unknown field `x` - at `$.messages[1]`"),
        (messages(USER, {**ASSISTANT, "content": LONG, "weight": 3}), "messages[1].weight is 3; a weight is 0 or 1"),
        (messages({**USER, "content": LONG}), "the last message is the user's"),
        (b'{"prompt": "' + LONG.encode() + b'\\ud800", "completion": "c"}', "it is no example"),
        (b'{"prompt": "' + LONG.encode() + b'", "prompt": "", "completion": "c"}', "an object has a key twice"),
        (b'{"' + LONG.encode() + b'": 1}', "unknown field"),
        (chat_with(messages=[USER, {**ASSISTANT, "content": LONG}], tools=[{}]), "Line 1: tools: tools are not served"),
        (preference(input={"messages": [{**USER, "content": LONG}], "tools": [{}]}), ": input.tools: tools are not s"),
        (chat_with(messages=[USER, {**ASSISTANT, "content": LONG}], tools=[None]), ": tools: tools are not served"),
    ],
    ids=range(15),
)
def test_long_lines_are_refused_by_their_shape_before_anything_is_made_of_them(line: bytes, verdict: str) -> None:
    said = refusal(line, piece=2**20)
    assert said.startswith("Line 1: ")
    assert verdict in said
    assert len(said) < 400


def test_long_lines_are_accepted_as_short_ones_are() -> None:
    for weight in (None, 0, 1):
        extra = {} if weight is None else {"weight": weight}
        line = messages({**USER, "content": LONG, "name": "n"}, {**ASSISTANT, **extra}, parts(ASSISTANT, "a", LONG))
        assert check(line, 4096).form is Form.CHAT
    assert check(json.dumps({"prompt": LONG, "completion": LONG}).encode(), 4096).form is Form.COMPLETION
    long = [{**USER, "content": LONG}]
    for parallel in (None, False):
        no_tools = {"tools": [], "parallel_tool_calls": parallel}
        assert check(chat_with(messages=[*long, ASSISTANT], **no_tools), 4096).form is Form.CHAT
        assert check(preference(input={"messages": long, **no_tools}), 4096).form is Form.PREFERENCE


def test_the_number_of_examples_is_limited() -> None:
    assert check(PAIR * 30, max_examples=30).examples == 30
    assert refusal(PAIR * 31, max_examples=30) == "The file has more than 30 examples."


def test_values_in_a_message_are_cut_short() -> None:
    assert len(refusal(messages({"role": "x" * 100_000, "content": "x"}))) < 200


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
EXAMPLES = st.lists(
    st.fixed_dictionaries({"prompt": TEXTS | st.just(""), "completion": TEXTS}), min_size=1, max_size=20
)


@settings(deadline=None, max_examples=150)
@given(EXAMPLES, st.integers(1, 600), st.booleans(), st.booleans())
def test_any_texts_are_accepted_however_they_are_cut(
    examples: list[dict[str, str]], piece: int, ascii_only: bool, ends: bool
) -> None:
    lines = [json.dumps(example, ensure_ascii=ascii_only).encode() for example in examples]
    checked = check(b"\n".join(lines) + (b"\n" if ends else b""), piece)
    assert (checked.form, checked.examples) == (Form.COMPLETION, len(examples))


def verdict(content: bytes, piece: int = 7) -> str:
    """The number of examples, or what is wrong."""
    try:
        return str(check(content, piece).examples)
    except InvalidFile as error:
        return error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["messages", "prompt", "completion", "role", "content", "weight", "name", "tools", "user", "assistant"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
LINES = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())


@settings(deadline=None, max_examples=400)
@given(st.lists(LINES, max_size=6), st.integers(0, 3))
def test_any_bytes_are_accepted_or_refused_with_a_line(lines: list[bytes], good: int) -> None:
    content = PAIR * good + b"\n".join(lines)
    said = verdict(content)
    assert said.isdigit() or said.startswith(("Line ", "The file is "))
    assert len(said) < 400


@settings(deadline=None, max_examples=200)
@given(st.lists(LINES, max_size=4), st.integers(1, 50))
def test_the_verdict_does_not_depend_on_how_the_file_is_cut(lines: list[bytes], piece: int) -> None:
    content = b"\n".join(lines)
    assert verdict(content, piece) == verdict(content, 10_000)
