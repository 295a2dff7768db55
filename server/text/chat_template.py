"""Messages -> prompt token ids by the model's own chat template or the operator's, in which user text can never forge a
control token. Must not know the wire format."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jinja2

from server.errors import InvalidRequest, NoChatTemplate
from server.text.limited_templates import LEAST_CHARACTERS, RenderingTooLongError, names_read, render
from server.text.tokenizer import TextTokenizer

MESSAGE_FRAME = 32  # characters that a template puts around a message, more or less
QUICK_SECONDS = 0.05  # that a template may take where others wait for it: most take less than a thousandth
RENDER_SECONDS = 2.0  # that it may take at all
NO_VARIABLES: Mapping[str, Any] = {}
COPIES = 8  # of all messages, with what is around them, that one text of a template may have room for
#: What its expressions raise on messages that it was not written for, `content + 1`.
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    name: str | None = None

    def fields(self) -> dict[str, Any]:
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, before the operator's of these names

    @property
    def num_characters(self) -> int:
        """Roughly what is rendered: a message's role and control tokens are text as well."""
        messages = sum(len(message.content) + MESSAGE_FRAME for message in self.messages)
        return messages + (len(str(self.variables)) if self.variables else 0)


Pieces = list[tuple[str, bool]]  # of a rendered conversation: text, and whether control tokens in it are plain text


def any_length(_pieces: Pieces) -> None:
    return None


async def encode_chat(
    tokenizer: TextTokenizer,
    prompt: ChatPrompt,
    check_length: Callable[[Pieces], None] = any_length,
    *,
    fits: bool = True,
) -> list[int]:
    """`check_length` is called in a thread with the rendered text, and may raise before that is encoded. `fits`
    is in_thread's. Raises InvalidRequest when the model has no template, or its template refuses the messages or does
    not end with them."""
    try:
        encode = partial(_encode, tokenizer, prompt, check_length, QUICK_SECONDS)
        return await tokenizer.in_thread(encode, prompt.num_characters, fits=fits)
    except RenderingTooLongError:  # once more, and nobody waits
        return await tokenizer.in_patient_thread(partial(_encode, tokenizer, prompt, check_length, RENDER_SECONDS))


def _encode(
    tokenizer: TextTokenizer, prompt: ChatPrompt, check_length: Callable[[Pieces], None], seconds: float
) -> list[int]:
    """Exactly what transformers' apply_chat_template gives, unless a message spells a control token.

    Such a message is replaced by a random word before rendering, and its text is encoded apart, as plain text, where
    the word stands. Other messages stay in place: templates may look into them. So it is with the texts among the
    request's variables. Raises RenderingTooLongError where less than RENDER_SECONDS are given.
    """
    hidden = HiddenTexts()
    shown = [hide_control_text(tokenizer, message, hidden) for message in prompt.messages]
    variables = _without_control_text(tokenizer, prompt.variables, hidden)
    rendered = render_chat(
        tokenizer, shown, add_generation_prompt=prompt.add_generation_prompt, variables=variables, seconds=seconds
    )
    check_length(list(hidden.pieces(rendered)))
    return encode_rendered(tokenizer, rendered, hidden)


class HiddenTexts:
    """Texts of one conversation, each behind a word that nobody could have guessed."""

    def __init__(self) -> None:
        self._mark = f"text{secrets.token_hex(16)}x"  # what all their words begin with
        self._texts: dict[str, str] = {}  # by what follows the mark, up to the next x

    def hide(self, text: str) -> str:
        """The word to render in its place."""
        number = str(len(self._texts))
        self._texts[number] = text
        return f"{self._mark}{number}x"

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """(text, whether it was hidden) in order. Templates may repeat, reorder or leave out messages."""
        first, *others = rendered.split(self._mark)
        yield first, False
        for other in others:
            number, _, rest = other.partition("x")
            if number in self._texts:
                yield self._texts[number], True
                yield rest, False
            else:  # a template has cut the word
                yield self._mark + other, False


def encode_rendered(
    tokenizer: TextTokenizer, rendered: str, hidden: HiddenTexts, after: int | None = None
) -> list[int]:
    """A rendered conversation, or a piece of one behind the token `after`, with the text that `hide_control_text` took
    out back in its place."""
    ids: list[int] = []
    for piece, was_hidden in hidden.pieces(rendered):
        encode = tokenizer.encode_plain if was_hidden else tokenizer.encode
        ids += encode(piece, after=ids[-1] if ids else after)
    return ids


def hide_control_text(tokenizer: TextTokenizer, message: Message, hidden: HiddenTexts) -> Message:
    """The message with a random word for its content, which goes to `hidden`, when that spells a control token."""
    if not tokenizer.spells_control_token(message.content):
        return message
    return replace(message, content=hidden.hide(message.content))


def _without_control_text(tokenizer: TextTokenizer, value: Any, hidden: HiddenTexts) -> Any:
    """A JSON value with a random word for each text in it that spells a control token."""
    if isinstance(value, str):
        return hidden.hide(value) if tokenizer.spells_control_token(value) else value
    if isinstance(value, Mapping):
        shown = partial(_without_control_text, tokenizer, hidden=hidden)
        return {shown(name): shown(one) for name, one in value.items()}
    return [_without_control_text(tokenizer, one, hidden) for one in value] if isinstance(value, list) else value


def unread_variables(tokenizer: TextTokenizer) -> list[str]:
    """Those of the operator's that the template never looks at: misspelt, most likely."""
    if not tokenizer.operators.variables:
        return []
    try:
        return sorted(tokenizer.operators.variables.keys() - names_read(_source(tokenizer)))
    except (NoChatTemplate, ValueError, jinja2.TemplateError):  # chats will be refused
        return []


def _source(tokenizer: TextTokenizer) -> str:
    """Raises NoChatTemplate; ValueError where a model has several and names none of them."""
    if tokenizer.operators.source is not None:
        return tokenizer.operators.source
    if not tokenizer.source.chat_template:
        raise NoChatTemplate("This model has no chat template. Use /v1/completions.")
    return str(tokenizer.source.get_chat_template())


def render_chat(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] = NO_VARIABLES,
    seconds: float = RENDER_SECONDS,
) -> str:
    """What transformers' apply_chat_template renders, with the operator's variables and before them the given ones.
    Raises InvalidRequest; RenderingTooLongError where a second try may have more `seconds`."""
    special = tokenizer.source.special_tokens_map
    taken = sorted(variables.keys() & special.keys())
    if taken:  # names that this model alone has; those of all models are refused before
        message = f"Invalid value for 'chat_template_kwargs': '{taken[0]}' is set by the server itself."
        raise InvalidRequest(message, param="chat_template_kwargs")
    said = sum(len(message.content) + MESSAGE_FRAME for message in messages)
    try:
        return render(
            _source(tokenizer),
            seconds,
            LEAST_CHARACTERS + COPIES * said,
            {
                **tokenizer.operators.variables,
                **variables,
                "messages": [message.fields() for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **special,
            },
        )
    except RenderingTooLongError as error:
        if seconds < RENDER_SECONDS:
            raise
        message = f"The model's chat template does not end with these messages within {RENDER_SECONDS:g} s."
        raise InvalidRequest(message, param="messages") from error
    except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
        why = error if isinstance(error, jinja2.TemplateError) else repr(error)
        raise InvalidRequest(f"The model's chat template refuses these messages: {why}", param="messages") from error
