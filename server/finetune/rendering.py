"""One line of a training file -> token ids, and which of them are learnt. Must not know files, jobs or tensors.

The tokens are those that a request would have: a prompt ends where the assistant begins, and its answer is tokenised
apart from it, as the answer of a generation is. Text of users and assistants can forge no control token.
"""

from collections.abc import Sequence
from typing import Any

from models.training import Example, Preference
from server.errors import InvalidRequest
from server.text.chat_template import Message, encode_rendered, hide_control_text, render_chat
from server.text.tokenizer import TextTokenizer


class CannotLearnError(Exception):
    """Why nothing can be learnt from a line: a sentence that goes on from "Line 3: "."""


def render_example(tokenizer: TextTokenizer, example: dict[str, Any]) -> Example | Preference:
    """Of a line that server.files has accepted. Raises CannotLearnError."""
    if "messages" in example:
        return render_conversation(tokenizer, example["messages"])
    if "input" in example:
        prompt = [{**message, "weight": 0} for message in example["input"]["messages"]]
        return Preference(
            render_conversation(tokenizer, [*prompt, *example["preferred_output"]]),
            render_conversation(tokenizer, [*prompt, *example["non_preferred_output"]]),
        )
    return _render_pair(tokenizer, example["prompt"], example["completion"])


def render_conversation(tokenizer: TextTokenizer, messages: Sequence[dict[str, Any]]) -> Example:
    """What the assistant says is learnt, with the control token that ends it; not where `weight` is 0."""
    hidden: dict[str, str] = {}
    shown = [
        hide_control_text(tokenizer, Message(said["role"], said["content"], said.get("name")), hidden)
        for said in messages
    ]
    whole = _render(tokenizer, shown)
    tokens: list[int] = []
    targets: list[bool] = []
    at = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        start, end = _answer(tokenizer, shown, number, whole)
        for piece, learnt in ((whole[at:start], False), (whole[start:end], True)):
            ids = encode_rendered(tokenizer, piece, hidden)
            tokens += ids
            targets += [learnt] * len(ids)
        at = end
    return _example(tokens, targets)


def _answer(tokenizer: TextTokenizer, shown: Sequence[Message], number: int, whole: str) -> tuple[int, int]:
    """Where the assistant's message `number` begins and ends in the rendered conversation."""
    if number == 0:
        raise CannotLearnError("messages[0] is the assistant's: there is nothing that it would answer")
    prompt = _render(tokenizer, shown[:number], add_generation_prompt=True)
    through = _render(tokenizer, shown[: number + 1]).rstrip()  # a generation ends at the control token before
    if not (through.startswith(prompt) and whole.startswith(through)):
        raise CannotLearnError(
            f"messages[{number}]: the model's chat template writes an answer differently once it is given, so its "
            "tokens cannot be told apart"
        )
    return len(prompt), len(through)


def _render(tokenizer: TextTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        raise CannotLearnError(error.message) from error


def _render_pair(tokenizer: TextTokenizer, prompt: str, completion: str) -> Example:
    """The completion is learnt, and that it ends there."""
    before = tokenizer.encode(prompt, add_special_tokens=True)
    end = tokenizer.source.eos_token_id
    after = [*tokenizer.encode_plain(completion), *([] if end is None else [end])]
    return _example([*before, *after], [*(False for _ in before), *(True for _ in after)])


def _example(tokens: list[int], targets: list[bool]) -> Example:
    example = Example(tuple(tokens), tuple(targets))
    if not example.learnt:
        raise CannotLearnError("nothing in it is learnt")
    return example
