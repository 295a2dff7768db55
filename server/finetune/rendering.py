"""One line of a training file -> token ids, and which of them are learnt. Must not know files, jobs or tensors.

The tokens are those that a request would have: a prompt ends where the assistant begins, and its answer is tokenised
apart from it, as the answer of a generation is. Text of users and assistants can forge no control token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from models.training import Example, Preference
from server.errors import InvalidRequest
from server.text.chat_template import HiddenTexts, Message, encode_rendered, hide_control_text, render_chat
from server.text.tokenizer import TextTokenizer

#: From here on a conversation is measured before it is taken apart, which takes quadratic time in its answers.
MANY_MESSAGES = 32


class CannotLearnError(Exception):
    """Why nothing can be learnt from a line: a sentence that goes on from "Line 3: "."""


def render_example(
    tokenizer: TextTokenizer, example: dict[str, Any], max_length: int
) -> Iterator[Example] | Iterator[Preference]:
    """All that is learnt from a line that server.files has accepted: of a conversation, perhaps several sequences.
    Raises CannotLearnError, for more than `max_length` tokens of one too."""
    if "messages" in example:
        return render_conversation(tokenizer, example["messages"], max_length)
    if "input" in example:
        return iter([_render_preference(tokenizer, example, max_length)])
    return iter([_render_pair(tokenizer, example["prompt"], example["completion"], max_length)])


def render_conversation(
    tokenizer: TextTokenizer, messages: Sequence[dict[str, Any]], max_length: int
) -> Iterator[Example]:
    """What the assistant says is learnt, with the control token that ends it; not where `weight` is 0.

    Before each answer stands what a request for it would have there. Usually that begins with the answer before, and
    they are one sequence. Where the template writes that one otherwise by then (Qwen3's leaves out what was thought
    before the last question), another sequence begins.
    """
    answers = [n for n, said in enumerate(messages) if said["role"] == "assistant" and said.get("weight", 1)]
    hidden = HiddenTexts()
    shown = [hide_control_text(tokenizer, _message(said), hidden) for said in messages]
    if answers and len(messages) > MANY_MESSAGES:
        through = _render(tokenizer, shown[: answers[-1] + 1]).rstrip()
        _check_length(len(encode_rendered(tokenizer, through, hidden)), max_length)
    sequence = _Sequence(tokenizer, hidden)
    for number in answers:
        prompt, through = _answer(tokenizer, shown, number)
        if not prompt.startswith(sequence.text):
            yield _example(sequence.tokens, sequence.targets, max_length)
            sequence = _Sequence(tokenizer, hidden)
        sequence.go_on(prompt, learnt=False)
        sequence.go_on(through, learnt=True)
    yield _example(sequence.tokens, sequence.targets, max_length)


class _Sequence:
    """A rendered conversation as far as it is taken apart: its text, and that as tokens."""

    def __init__(self, tokenizer: TextTokenizer, hidden: HiddenTexts) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.targets: list[bool] = []
        self._tokenizer, self._hidden = tokenizer, hidden

    def go_on(self, text: str, *, learnt: bool) -> None:
        """`text`: all of it, of which what is there already is the beginning."""
        after = self.tokens[-1] if self.tokens else None
        ids = encode_rendered(self._tokenizer, text[len(self.text) :], self._hidden, after)
        self.text = text
        self.tokens += ids
        self.targets += [learnt] * len(ids)


def _message(said: dict[str, Any]) -> Message:
    """As server.schemas.chat makes it of the same message in a request."""
    role, content = said["role"], said["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return Message("system" if role == "developer" else role, text, said.get("name"))


def _answer(tokenizer: TextTokenizer, shown: Sequence[Message], number: int) -> tuple[str, str]:
    """What is rendered before the assistant's message `number`, and that with the message."""
    if number == 0:
        raise CannotLearnError("messages[0] is the assistant's: there is nothing that it would answer")
    prompt = _render(tokenizer, shown[:number], add_generation_prompt=True)
    through = _render(tokenizer, shown[: number + 1]).rstrip()  # a generation ends at the control token before
    if not through.startswith(prompt):
        raise CannotLearnError(
            f"messages[{number}]: with this answer, the chat template writes something else before it than where it is "
            "asked for, so its tokens cannot be told apart"
        )
    return prompt, through


def _render_preference(tokenizer: TextTokenizer, example: dict[str, Any], max_length: int) -> Preference:
    prompt = [{**message, "weight": 0} for message in example["input"]["messages"]]
    chosen, rejected = (
        [*render_conversation(tokenizer, [*prompt, *example[output]], max_length)]
        for output in ("preferred_output", "non_preferred_output")
    )
    return Preference(*chosen, *rejected)


def _render(tokenizer: TextTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        raise CannotLearnError(error.message) from error


def _render_pair(tokenizer: TextTokenizer, prompt: str, completion: str, max_length: int) -> Example:
    """The completion is learnt, and that it ends there."""
    before = tokenizer.encode(prompt, add_special_tokens=True)
    end = tokenizer.source.eos_token_id
    said = tokenizer.encode_plain(completion, after=before[-1] if before else None)
    after = [*said, *([] if end is None else [end])]
    return _example([*before, *after], [*(False for _ in before), *(True for _ in after)], max_length)


def _example(tokens: list[int], targets: list[bool], max_length: int) -> Example:
    _check_length(len(tokens), max_length)
    example = Example(tuple(tokens), tuple(targets))
    if not example.learnt:
        raise CannotLearnError("nothing in it is learnt")
    return example


def _check_length(length: int, max_length: int) -> None:
    if length > max_length:
        raise CannotLearnError(f"it has {length} tokens; an example may have {max_length}")
