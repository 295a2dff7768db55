"""A chat template that has no end, or texts without one, ends with a clear error, and nobody else waits for it."""

import asyncio
import time

import pytest
from scripted_engine import tiny_tokenizer

from server.errors import InvalidRequest
from server.text import chat_template
from server.text.chat_template import ChatPrompt, Message, encode_chat, render_chat
from server.text.limited_templates import LEAST_CHARACTERS, RenderingTooLongError, compiled, render
from server.text.tokenizer import TextTokenizer

LOOP = "{% for i in range(100000) %}HERE{% endfor %}"
NESTED = LOOP.replace("HERE", LOOP.replace("HERE", LOOP))
ENDLESS = {
    "loops in loops": NESTED,
    "loops that leave out every round": NESTED.replace("%}HERE", " if i < 0 %}"),
    "loops without a round": LOOP.replace("HERE", LOOP.replace(" %}HERE", " if false %}")),
    "calls of macros by macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(100) }}",
    "recursive loops": "{% for a in [1] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
}
GREEDY = {
    "joined": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "added": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "multiplied": "{{ 'x' * 10 ** 12 }}",
    "multiplied from the right": "{{ 10 ** 12 * 'x' }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
}


def tokenizer_of(template: str) -> TextTokenizer:
    source = tiny_tokenizer()
    source.chat_template = template
    return TextTokenizer(source)


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_is_ended(kind: str) -> None:
    begin = time.thread_time()
    with pytest.raises(RenderingTooLongError):
        render(ENDLESS[kind], 0.05, LEAST_CHARACTERS, {})
    assert time.thread_time() - begin < 2, "a hundred times what was given, and less than for ever"


@pytest.mark.parametrize("kind", GREEDY)
def test_what_grows_without_bounds_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"refuses these messages: it (puts together|computes)") as failure:
        asyncio.run(encode_chat(tokenizer_of(GREEDY[kind]), ChatPrompt((Message("user", "x"),))))
    assert (failure.value.status, failure.value.param) == (400, "messages")


def test_a_text_as_long_as_all_messages_and_more_is_put_together() -> None:
    tokenizer = tokenizer_of("{{ 'a' ~ messages[0]['content'] + messages[0]['content'] * 2 }}")
    long = Message("user", "x" * LEAST_CHARACTERS)
    assert len(render_chat(tokenizer, [long], add_generation_prompt=True)) == 1 + 3 * LEAST_CHARACTERS


def test_others_go_on_while_a_template_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own request fails, and it says why."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    tokenizer = tokenizer_of("{% if messages[0]['content'] == 'loop' %}" + NESTED + "{% endif %}hello")

    async def ask() -> tuple[InvalidRequest, int]:
        endless = asyncio.create_task(encode_chat(tokenizer, ChatPrompt((Message("user", "loop"),))))
        await asyncio.sleep(0)  # it has begun, and been put off
        answered = 0
        while not endless.done():
            assert await encode_chat(tokenizer, ChatPrompt((Message("user", "x"),))) == tokenizer.encode("hello")
            answered += 1
            await asyncio.sleep(0.01)
        error = endless.exception()
        assert isinstance(error, InvalidRequest)
        return error, answered

    error, answered = asyncio.run(ask())
    tokenizer.close()
    assert (error.status, error.param) == (400, "messages")
    assert error.message == "The model's chat template does not end with these messages within 0.3 s."
    assert answered > 1


def test_a_template_that_takes_longer_than_most_is_rendered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "QUICK_SECONDS", 0.0)
    tokenizer = tokenizer_of("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    tokens = asyncio.run(encode_chat(tokenizer, ChatPrompt((Message("user", "hello"),))))
    tokenizer.close()
    assert tokens == tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ 1 ~ 'a' ~ none ~ [2] }}", "1aNone[2]"),
        ("{% set x = 'a' ~ ('b' ~ x) %}{{ x | upper }}", "AB"),
        ("{{ 2 ** 10 + 3 * 4 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "1036abab[1, 2]"),
        ("{% for i in range(5) if i % 2 %}{{ loop.index }}:{{ i }},{% else %}none{% endfor %}", "1:1,2:3,"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for i in 'abc' %}{% if i == 'b' %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "a"),
        ("{% for i in [[1, 2], [3]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "123"),
        ("{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(1) %}c{% endcall %}", "<1c>"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% generation %}x{% endgeneration %}", "x"),
    ],
)
def test_templates_render_as_transformers_renders_them(template: str, rendered: str) -> None:
    theirs = tiny_tokenizer().apply_chat_template([{"role": "user"}], chat_template=template, tokenize=False)
    assert render(template, 2.0, LEAST_CHARACTERS, {"messages": [{"role": "user"}]}) == theirs == rendered


def test_a_template_is_compiled_once() -> None:
    assert compiled("{{ messages }}") is compiled("{{ messages }}")
