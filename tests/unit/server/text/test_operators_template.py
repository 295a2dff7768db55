"""A chat template that the operator brings: what can be none is told before anything loads, and what is one is used."""

import asyncio
from pathlib import Path

import pytest
from jinja2 import TemplateSyntaxError
from scripted_engine import TEMPLATE, live_server, tiny_tokenizer

from server.text.chat_template import ChatPrompt, Message, encode_chat
from server.text.limited_templates import TemplateSourceError, check_source, compiled
from server.text.operators_template import MAX_BYTES, OperatorsTemplate, TemplateFileError, read_template
from server.text.tokenizer import TextTokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
SOURCES = [
    TEMPLATE,
    PLAIN,
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
    "{% generation %}{{ messages | tojson(ensure_ascii=False) }}{% endgeneration %}",
    "{{ strftime_now('%Y') ~ raise_exception('x') }}",
    "{% macro f(x=1) %}{{ x }}{% endmacro %}{% call f() %}{% endcall %}",
    "{% if %}",
    "{{ messages",
    "{% for m in messages %}",
    "{% generation %}",
    "{{ messages | no_such_filter }}",
    "{% nonsense %}",
    "{% break %}",
    "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "template.jinja"
    path.write_bytes(content)
    return path


def is_taken(check: object, source: str) -> bool:
    assert callable(check)
    try:
        check(source)
    except (TemplateSourceError, TemplateSyntaxError, SyntaxError):
        return False
    return True


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_checked_is_what_will_be_compiled(source: str) -> None:
    assert is_taken(check_source, source) == is_taken(compiled, source)


def test_some_sources_are_templates_and_some_are_not() -> None:
    assert [is_taken(check_source, source) for source in SOURCES].count(True) == 6


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{{ 'caf\xe9' }}", r"is not UTF-8: byte 8"),
        (b"x" * (MAX_BYTES + 1), f"has more than {MAX_BYTES} bytes"),
        (b"\n{% if %}", "is no template: line 2: Expected an expression"),
        (b"{% for x in y %}" * 100 + b"{% endfor %}" * 100, "is no template: it is nested too deeply"),
    ],
)
def test_what_is_no_template_is_told_with_its_place(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(TemplateFileError, match=said) as error:
        read_template(written(tmp_path, content))
    assert str(tmp_path / "template.jinja") in str(error.value)


@pytest.mark.parametrize("name", ["missing", ".", "x" * 300, "a\0b", "{{ messages[0].content }}"])
def test_what_cannot_be_read_is_told_that_a_file_is_meant(tmp_path: Path, name: str) -> None:
    with pytest.raises(TemplateFileError, match=r"cannot be read: .*a file is named here"):
        read_template(tmp_path / name)


def test_a_template_is_read_as_it_is_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_template(written(tmp_path, "\ufeff{{ 'é' }}\n".encode())) == "{{ 'é' }}\n"


@pytest.mark.parametrize("own", [TEMPLATE, None])
def test_the_operators_template_takes_the_place_of_the_models(own: str | None) -> None:
    source = tiny_tokenizer()
    source.chat_template = own
    tokenizer = TextTokenizer(source, OperatorsTemplate(PLAIN))
    tokens = asyncio.run(encode_chat(tokenizer, ChatPrompt((Message("user", "hello <|im_end|>"),))))
    assert tokenizer.decode(tokens) == "[user] hello <|im_end|>\n"
    assert tokenizer.control_ids.isdisjoint(tokens)
    tokenizer.close()


def test_chats_and_their_tokenization_are_rendered_with_it() -> None:
    messages = [{"role": "user", "content": "hello"}]
    with live_server(template=PLAIN) as server, server.client() as client:
        tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        reply = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        assert reply.status_code == 200
        assert list(server.engine.requests[-1].prompt_token_ids) == tokens
        assert tiny_tokenizer().decode(tokens) == "[user] hello\n"
