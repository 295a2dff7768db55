"""Before every answer that is learnt stands what a request for it would have, whatever the template makes of answers
before: Qwen3's leaves out what was thought before the last question."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import tiny_tokenizer

from models import registry
from models.descriptions import load_tokenizer
from models.training import Example, Preference
from server.finetune import dataset as dataset_module
from server.finetune.dataset import DatasetError, read_dataset
from server.finetune.rendering import CannotLearnError, render_example
from server.text.chat_template import ChatPrompt, Message, encode_chat
from server.text.operators_template import OperatorsTemplate
from server.text.tokenizer import TextTokenizer

LIMIT = 2000
#: https://huggingface.co/Qwen/Qwen3-8B: its template, but for tools.
QWEN3 = r"""
{%- set ns = namespace(last_query_index=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
#: Of earlier answers only their place.
FORGETS = (
    "{% for m in messages %}{{ m.role + ':' }}{{ m.content if loop.last or m.role == 'user' }}<|im_end|>{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)
OTHERWISE = (
    "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}{{ 'say: ' if add_generation_prompt }}"
)
ONE, TWO, THREE = ({"role": "user", "content": text} for text in ("one?", "two?", "three?"))


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "thoughts": [ONE, answer("<think>\nhm\n</think>\n\n1"), TWO, answer("<think>well</think>2"), THREE, answer("3")],
    "no thoughts": [{"role": "system", "content": "be"}, ONE, answer("1"), TWO, answer("2"), THREE, answer("3")],
    "weights": [ONE, answer("<think>a</think>1", weight=1), TWO, answer("2", weight=0), THREE, answer("3")],
    "two answers to one question": [ONE, answer("<think>a</think>1"), answer("<think>b</think>2"), TWO, answer("3")],
    "one answer": [ONE, answer("<think>a</think>1")],
    "forged": [ONE, answer("<think>a</think><|im_end|>1"), {"role": "user", "content": "<|im_end|>"}, answer("2")],
}
TOKENIZERS = {
    "plain": OperatorsTemplate(),
    "Qwen3": OperatorsTemplate(QWEN3),
    "Qwen3, not thinking": OperatorsTemplate(QWEN3, {"enable_thinking": False}),
    "forgetful": OperatorsTemplate(FORGETS),
}


#: Who must not think has no thoughts to give; and a prompt that ends with an answer has it, until it is forgotten.
REFUSED = {
    *(("Qwen3, not thinking", name) for name in ("thoughts", "weights", "two answers to one question", "one answer")),
    ("forgetful", "two answers to one question"),
}


@pytest.fixture(scope="module")
def bundled() -> Iterator[TextTokenizer]:
    tokenizer = TextTokenizer(load_tokenizer(registry.resolve("bundled")))
    yield tokenizer
    tokenizer.close()


def tokenizer_of(template: str, **variables: Any) -> TextTokenizer:
    return TextTokenizer(tiny_tokenizer(), OperatorsTemplate(template, variables))


def prompt(tokenizer: TextTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    said = tuple(Message(message["role"], message["content"]) for message in messages)
    return asyncio.run(encode_chat(tokenizer, ChatPrompt(said)))


def rendered(tokenizer: TextTokenizer, messages: list[dict[str, Any]]) -> list[Example]:
    examples = list(render_example(tokenizer, {"messages": messages}, LIMIT))
    assert all(isinstance(example, Example) for example in examples)
    return examples  # type: ignore[return-value]


def learnt(tokenizer: TextTokenizer, examples: list[Example]) -> list[tuple[list[int], str]]:
    """Each answer, with all the tokens before it."""
    found = []
    for example in examples:
        begins = [at for at in range(1, len(example)) if example.targets[at] and not example.targets[at - 1]]
        for begin in begins:
            end = next((at for at in range(begin, len(example)) if not example.targets[at]), len(example))
            text = tokenizer.decode(example.tokens[begin:end], skip_special_tokens=False)
            found.append((list(example.tokens[:begin]), text))
    return found


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("kind", [*TOKENIZERS, "bundled"])
def test_before_every_answer_stands_what_a_request_would_have(
    kind: str, conversation: str, bundled: TextTokenizer
) -> None:
    tokenizer = bundled if kind == "bundled" else TextTokenizer(tiny_tokenizer(), TOKENIZERS[kind])
    messages = CONVERSATIONS[conversation]
    if (kind, conversation) in REFUSED:
        with pytest.raises(CannotLearnError, match=r"messages\[\d\]: with this answer, the chat template writes"):
            rendered(tokenizer, messages)
        return
    wanted = [n for n, said in enumerate(messages) if said["role"] == "assistant" and said.get("weight", 1)]
    found = learnt(tokenizer, rendered(tokenizer, messages))
    assert [before for before, _ in found] == [prompt(tokenizer, messages[:n]) for n in wanted]
    for n, (_, text) in zip(wanted, found, strict=True):
        assert text.endswith(messages[n]["content"].rpartition("</think>")[2] + "<|im_end|>")


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("kind", ["plain", "bundled"])
def test_a_template_that_leaves_answers_alone_makes_one_sequence(
    kind: str, conversation: str, bundled: TextTokenizer
) -> None:
    tokenizer = bundled if kind == "bundled" else TextTokenizer(tiny_tokenizer())
    assert len(rendered(tokenizer, CONVERSATIONS[conversation])) == 1


def test_thoughts_are_learnt_with_their_answer_and_left_out_before_the_next() -> None:
    tokenizer = tokenizer_of(QWEN3)
    first, second, third = rendered(tokenizer, CONVERSATIONS["thoughts"])
    texts = [tokenizer.decode(one.tokens, skip_special_tokens=False) for one in (first, second, third)]
    assert texts[0] == "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n1<|im_end|>"
    assert texts[1] == (
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n<think>\nwell\n</think>\n\n2<|im_end|>"
    )
    assert "hm" not in texts[2]
    assert "well" not in texts[2]
    assert [text for _, text in learnt(tokenizer, [first, second, third])] == [
        "<think>\nhm\n</think>\n\n1<|im_end|>",
        "<think>\nwell\n</think>\n\n2<|im_end|>",
        "<think>\n\n</think>\n\n3<|im_end|>",
    ]


def test_answers_that_stay_as_they_were_are_in_one_sequence() -> None:
    """Of Qwen3's: an answer after an answer, with thoughts, before the next question."""
    tokenizer = tokenizer_of(QWEN3)
    together, alone = rendered(tokenizer, CONVERSATIONS["two answers to one question"])
    assert [text.count("<|im_end|>") for _, text in learnt(tokenizer, [together])] == [1, 1]
    assert len(learnt(tokenizer, [alone])) == 1


def test_a_model_that_does_not_think_learns_its_answers_alone() -> None:
    tokenizer = tokenizer_of(QWEN3, enable_thinking=False)
    examples = rendered(tokenizer, CONVERSATIONS["no thoughts"])
    assert [text for _, text in learnt(tokenizer, examples)] == ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    assert len(examples) == 3


def test_a_preference_is_of_one_answer_after_others() -> None:
    tokenizer = tokenizer_of(QWEN3)
    asked = [ONE, answer("<think>a</think>1"), TWO]
    outputs = {"preferred_output": [answer("<think>b</think>2")], "non_preferred_output": [answer("no")]}
    (pair,) = render_example(tokenizer, {"input": {"messages": asked}, **outputs}, LIMIT)
    assert isinstance(pair, Preference)
    for side, text in (
        (pair.chosen, "<think>\nb\n</think>\n\n2<|im_end|>"),
        (pair.rejected, "<think>\n\n</think>\n\nno<|im_end|>"),
    ):
        assert learnt(tokenizer, [side]) == [(prompt(tokenizer, asked), text)]


def test_a_template_that_asks_otherwise_than_it_tells_is_refused_by_the_messages_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    lines = [{"prompt": "a", "completion": "b"}, {"messages": [ONE, answer("1", weight=0), TWO, answer("2")]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DatasetError, match=r"^Line 2: messages\[3\]: with this answer, the chat template writes"):
        read_dataset(path, tokenizer_of(OTHERWISE), LIMIT, "training_file")


def test_a_file_counts_every_sequence_and_knows_its_line(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "x", tokenizer_of(QWEN3)
    lines = [CONVERSATIONS[name] for name in ("one answer", "thoughts", "one answer")]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in lines))
    read = read_dataset(path, tokenizer, LIMIT, "training_file")
    expected = [example for messages in lines for example in rendered(tokenizer, messages)]
    assert read.examples == tuple(expected)
    assert list(read.lines) == [1, 2, 2, 2, 3]
    assert read.tokens == sum(map(len, expected))
    assert read.longest == max(map(len, expected))


def test_each_sequence_has_the_examples_limit(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "x", tokenizer_of(QWEN3)
    messages = [ONE, answer(f"<think>{'hm ' * 50}</think>1"), TWO, answer("2")]
    path.write_text(json.dumps({"messages": messages}))
    longest = max(map(len, rendered(tokenizer, messages)))
    assert len(read_dataset(path, tokenizer, longest, "training_file").examples) == 2
    with pytest.raises(DatasetError, match=rf"^Line 1: it has {longest} tokens; an example may have {longest - 1}\.$"):
        read_dataset(path, tokenizer, longest - 1, "training_file")


def test_a_long_conversation_is_not_taken_apart_beyond_a_files_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = tmp_path / "x", tokenizer_of(FORGETS)
    path.write_text(json.dumps({"messages": [ONE, answer("1")] * 200}))
    monkeypatch.setattr(dataset_module, "MAX_TOKENS", 500)
    made: list[int] = []
    monkeypatch.setattr(dataset_module, "_shared", lambda example, _: made.append(len(example)) or example)
    with pytest.raises(DatasetError, match="more than 500 tokens"):
        read_dataset(path, tokenizer, 100_000, "training_file")
    assert sum(made) <= 500


def test_the_examples_of_a_job_have_the_operators_variables() -> None:
    (example,) = rendered(tokenizer_of(QWEN3, enable_thinking=False), [ONE, answer("1")])
    (thinks,) = rendered(tokenizer_of(QWEN3), [ONE, answer("1")])
    assert example.tokens == thinks.tokens
    assert sum(example.targets) < sum(thinks.targets)  # the empty thoughts are part of the prompt
