"""vLLM's `prompt_logprobs`: a prompt's own log-probabilities with ranks, by token id, beside the choices."""

from typing import Any

import pytest
from scripted_engine import LiveServer, Script, scored

from server.api import reply_memory
from server.text import prompt_memory

TEXT = {"model": "tiny", "prompt": list(b"hey"), "max_tokens": 2, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def post(server: LiveServer, path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        reply = client.post(path, json={**body, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def refusal(server: LiveServer, path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        reply = client.post(path, json={**body, **fields})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def own_tokens(scores: list[dict[str, Any] | None]) -> str:
    """The first of each is the prompt's."""
    return "".join(next(iter(of_token.values()))["decoded_token"] for of_token in scores if of_token)


def test_a_prompt_s_tokens_are_told_by_their_ids_with_their_ranks(server: LiveServer) -> None:
    (choice,) = post(server, COMPLETIONS, TEXT, prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"101": entry(-1, 1, "e"), "102": entry(-2, 2, "f")},
        {"121": entry(-2, 100, "y"), "122": entry(-3, 2, "z")},  # the rank of its own, not its place among the others
    ]
    assert (choice["text"], choice["logprobs"]) == ("he", None)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (None, 2)


def test_with_no_alternatives_there_are_the_prompt_s_own_alone(server: LiveServer) -> None:
    (choice,) = post(server, COMPLETIONS, TEXT, prompt_logprobs=0)["choices"]
    assert choice["prompt_logprobs"] == [None, {"101": entry(-1, 1, "e")}, {"121": entry(-2, 100, "y")}]


def test_a_prompt_of_one_token_has_nothing_before_it(server: LiveServer) -> None:
    (choice,) = post(server, COMPLETIONS, TEXT, prompt=[104], prompt_logprobs=3)["choices"]
    assert choice["prompt_logprobs"] == [None]


def test_a_chat_s_prompt_is_told_beside_its_choices(server: LiveServer) -> None:
    reply = post(server, CHATS, CHAT, prompt_logprobs=1, n=2)
    first, *others = reply["prompt_logprobs"]
    assert first is None
    assert own_tokens(others) == "user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert 1 + len(others) == reply["usage"]["prompt_tokens"]
    assert [sorted(choice) for choice in reply["choices"]] == [["finish_reason", "index", "logprobs", "message"]] * 2
    assert scored(server) == [1, None]


def test_each_choice_has_its_prompt_s_which_is_scored_once(server: LiveServer) -> None:
    choices = post(server, COMPLETIONS, TEXT, prompt=["may", "you"], n=3, prompt_logprobs=1)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [own_tokens(choice["prompt_logprobs"]) for choice in choices] == ["ay"] * 3 + ["ou"] * 3
    assert scored(server) == [1, None, None] * 2


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, TEXT), (CHATS, CHAT)])
def test_nobody_is_told_who_has_not_asked(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = post(server, path, body, prompt_logprobs=None)
    assert (reply["choices"][0] if path == COMPLETIONS else reply)["prompt_logprobs"] is None
    assert scored(server) == [None]
    with server.client() as client:
        assert "prompt_logprobs" not in client.post(path, json={**body, "stream": True}).text


@pytest.mark.parametrize(("logprobs", "asked"), [(1, 3), (3, 1)])
def test_an_echo_is_what_it_is_without(server: LiveServer, logprobs: int, asked: int) -> None:
    """Each has as many alternatives as were asked for it, and the prompt is scored with the more of them."""
    echo = {"echo": True, "logprobs": logprobs, "n": 2}
    plain = post(server, COMPLETIONS, TEXT, **echo)["choices"]
    both = post(server, COMPLETIONS, TEXT, **echo, prompt_logprobs=asked)["choices"]
    assert scored(server) == [3, None]
    alone = post(server, COMPLETIONS, TEXT, prompt_logprobs=asked)["choices"]
    assert [choice.pop("prompt_logprobs") for choice in both] == [alone[0]["prompt_logprobs"]] * 2
    assert [choice.pop("prompt_logprobs") for choice in plain] == [None, None]
    assert both == plain


def test_an_end_token_has_no_entry_where_there_is_no_echo(server: LiveServer) -> None:
    server.engine.script = Script(text=b"")
    (choice,) = post(server, COMPLETIONS, TEXT, logprobs=1, prompt_logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == []


def test_a_prompt_may_be_all_that_is_asked_for(server: LiveServer) -> None:
    reply = post(server, COMPLETIONS, TEXT, max_tokens=0, prompt_logprobs=1)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("", "length", 0)
    assert own_tokens(choice["prompt_logprobs"]) == "ey"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, TEXT), (CHATS, CHAT)])
def test_what_is_not_served_is_refused_in_words(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    assert post(server, path, body, prompt_logprobs=20)
    served = "Only the prompt's own tokens with 0 to 20 alternatives each are served."
    for fields, code, said in (
        ({"prompt_logprobs": 1, "stream": True}, None, "`prompt_logprobs` are not available when `stream=True`."),
        ({"prompt_logprobs": 0, "stream": True}, None, "`prompt_logprobs` are not available when `stream=True`."),
        ({"prompt_logprobs": 21}, None, "less than or equal to 20"),
        ({"prompt_logprobs": -2}, None, "greater than or equal to 0"),
        ({"prompt_logprobs": True}, None, "integer"),
        ({"prompt_logprobs": -1}, "unsupported_parameter", served),
    ):
        error = refusal(server, path, body, **fields)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "prompt_logprobs", code)
        assert said in error["message"]


def test_more_than_may_be_held_is_refused_by_name(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 tokens with an alternative each: 16 bytes a token, whatever the number of choices."""
    monkeypatch.setattr(prompt_memory, "ONE_BYTES", 48)
    assert post(server, COMPLETIONS, TEXT, prompt_logprobs=1, n=3)
    assert post(server, COMPLETIONS, TEXT, prompt_logprobs=0, echo=True, logprobs=1, n=2)
    for fields in ({"prompt_logprobs": 2}, {"prompt_logprobs": 0, "echo": True, "logprobs": 2, "n": 2}):
        assert refusal(server, COMPLETIONS, TEXT, **fields)["param"] == "prompt_logprobs"
    monkeypatch.undo()
    monkeypatch.setattr(reply_memory, "ONE_BYTES", 1000)
    error = refusal(server, COMPLETIONS, TEXT, prompt=[104 + at % 7 for at in range(3000)], prompt_logprobs=0)
    assert error["param"] == "prompt_logprobs"
    assert post(server, COMPLETIONS, TEXT, prompt_logprobs=1)
