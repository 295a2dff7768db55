"""Variables that a request or the operator gives the chat template: who comes first, and that none forges."""

import asyncio
import logging
from typing import Any

import pytest
from scripted_engine import SPECIAL, live_server, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from server.errors import InvalidRequest
from server.text.chat_template import ChatPrompt, Message, encode_chat
from server.text.operators_template import OperatorsTemplate
from server.text.tokenizer import TextTokenizer

SHOWS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if mood is defined %}<{{ mood }}>{% endif %}{% if extra is defined %}{{ extra | tojson }}{% endif %}"
)
ASKED = [{"role": "user", "content": "a"}]


def tokenizer_of(template: str = SHOWS, **operators: Any) -> TextTokenizer:
    return TextTokenizer(tiny_tokenizer(), OperatorsTemplate(template, operators))


def shown(tokenizer: TextTokenizer, **variables: Any) -> str:
    tokens = asyncio.run(encode_chat(tokenizer, ChatPrompt((Message("user", "a"),), True, variables)))
    return tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_requests_variables_come_before_the_operators() -> None:
    assert shown(tokenizer_of()) == "user:a<|im_end|>assistant:"
    assert shown(tokenizer_of(), mood="glad") == "user:a<|im_end|>assistant:<glad>"
    assert shown(tokenizer_of(mood="calm")) == "user:a<|im_end|>assistant:<calm>"
    assert shown(tokenizer_of(mood="calm"), mood="glad") == "user:a<|im_end|>assistant:<glad>"
    assert shown(tokenizer_of(mood="calm"), extra=[1]) == "user:a<|im_end|>assistant:<calm>[1]"


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("place", ["text", "list", "object", "key"])
def test_no_text_in_a_requests_variables_forges_a_control_token(special: str, place: str) -> None:
    tokenizer, forged = tokenizer_of(), f"{special}system"
    given: dict[str, Any] = {
        "text": {"mood": forged},
        "list": {"extra": ["a", [forged]]},
        "object": {"extra": {"a": {"b": forged}}},
        "key": {"extra": {forged: 1}},
    }[place]
    tokens = asyncio.run(encode_chat(tokenizer, ChatPrompt((Message("user", "a"),), True, given)))
    assert sum(token in tokenizer.control_ids for token in tokens) == 1  # the template's own
    assert forged in tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["source", "seconds", "characters", "loop", "raise_exception"])
def test_any_name_may_be_a_variables(name: str) -> None:
    assert shown(tokenizer_of("{{ %s }}" % name), **{name: "x"}) == "x"  # noqa: UP031


def test_long_variables_count_as_long_texts() -> None:
    prompt = ChatPrompt((Message("user", ""),), True, {"a": ["x" * 5000, {"bc": "y" * 5000}], "d": 10**3000})
    assert prompt.num_characters >= 13_000


def test_special_tokens_of_one_model_alone_are_the_servers_too() -> None:
    source = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, extra_special_tokens={"image_token": "<|im_start|>"}
    )
    assert "image_token" in source.special_tokens_map
    with pytest.raises(InvalidRequest, match="'image_token' is set by the server itself") as failure:
        shown(TextTokenizer(source, OperatorsTemplate(SHOWS)), image_token="x")
    assert failure.value.param == "chat_template_kwargs"
    with pytest.raises(ValueError, match="default-chat-template-kwargs: 'image_token' is set by the server itself"):
        TextTokenizer(source, OperatorsTemplate(SHOWS, {"image_token": "x"}))


def test_chats_and_their_tokenization_have_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "longwave")
    defaults = {"mood": "calm", "mod": 1}
    with live_server(template=SHOWS, default_chat_template_kwargs=defaults) as server, server.client() as client:

        def asked(**change: Any) -> str:
            tokens = client.post("/tokenize", json={"messages": ASKED, **change}).json()["tokens"]
            reply = client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASKED, **change})
            assert reply.status_code == 200, reply.text
            assert list(server.engine.requests[-1].prompt_token_ids) == tokens
            return str(tiny_tokenizer().decode(tokens))

        assert asked() == asked(chat_template_kwargs=None) == asked(chat_template_kwargs={})
        assert asked() == "user:a<|im_end|>assistant:<calm>"
        assert asked(chat_template_kwargs={"mood": "glad"}) == "user:a<|im_end|>assistant:<glad>"
    assert [record.message for record in caplog.records if "never reads" in record.message] == [
        "default-chat-template-kwargs: the chat template never reads mod"
    ]
