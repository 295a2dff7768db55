"""Tokenize, detokenize, playground."""

import re
import threading

import pytest
from scripted_engine import MAX_MODEL_LEN, LiveServer, live_server


def test_tokenize_and_detokenize_are_inverse(server: LiveServer) -> None:
    text = "héllo <|im_end|> 🙂"
    with server.client() as client:
        reply = client.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
        assert set(reply) == {"count", "max_model_len", "tokens"}
        assert reply["count"] == len(reply["tokens"])
        assert reply["max_model_len"] == MAX_MODEL_LEN
        assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}


def test_tokenize_shows_the_vocabularys_spelling_when_asked(server: LiveServer) -> None:
    with server.client() as client:
        reply = client.post("/tokenize", json={"prompt": "he ll", "return_token_strs": True}).json()
    assert reply["token_strs"] == ["he", "Ġ", "ll"]


def test_spelling_a_long_text_does_not_hold_the_event_loop(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.lifecycle.generator is not None
    tokenizer = server.lifecycle.generator.tokenizer
    spell, spellers = tokenizer.vocabulary_piece, set()

    def recorded(token_id: int) -> str:
        spellers.add(threading.current_thread().name.rpartition("_")[0])
        return spell(token_id)

    monkeypatch.setattr(tokenizer, "vocabulary_piece", recorded)
    with server.client() as client:
        reply = client.post("/tokenize", json={"prompt": "x" * 5000, "return_token_strs": True}).json()
    assert len(reply["token_strs"]) == reply["count"] == 5000
    assert spellers == {"patient-tokenizer"}


def test_tokenize_messages_gives_what_chat_runs(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    with server.client() as client:
        tokens = client.post("/tokenize", json={"model": "tiny", "messages": messages}).json()["tokens"]
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert list(server.engine.requests[0].prompt_token_ids) == tokens


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 5}])
def test_tokenize_needs_one_text(server: LiveServer, body: dict[str, object]) -> None:
    with server.client() as client:
        assert client.post("/tokenize", json=body).status_code == 400


def test_unknown_models_are_404_here_too(server: LiveServer) -> None:
    with server.client() as client:
        assert client.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404
        assert client.post("/detokenize", json={"model": "other", "tokens": [1]}).status_code == 404


@pytest.mark.parametrize("beyond", [512, 2**31 - 1, 2**31])
def test_detokenize_refuses_tokens_beyond_the_vocabulary(server: LiveServer, beyond: int) -> None:
    with server.client() as client:
        assert client.post("/detokenize", json={"tokens": [104, 511]}).status_code == 200
        reply = client.post("/detokenize", json={"tokens": [104, beyond]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize("keys", [None, "one,two"])
def test_the_description_says_where_a_key_is_asked_for(keys: str | None) -> None:
    flags = {} if keys is None else {"api_key": keys}
    with live_server(**flags) as server, server.client() as client:
        described = client.get("/openapi.json", headers={"authorization": "Bearer one"}).json()
    asked = {path for path, methods in described["paths"].items() for one in methods.values() if one["security"]}
    if keys is None:
        assert not asked
    else:
        assert {"/v1/chat/completions", "/metrics", "/v1/files"} <= asked
        assert "/health/live" not in asked
    assert described["components"]["securitySchemes"]["api_key"] == {"type": "http", "scheme": "bearer"}


def test_models_with_a_slash_behind_are_the_list(server: LiveServer) -> None:
    with server.client() as client:
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "a\nb"}', "Invalid control character (line 1, column 14)."),
        (b'{"prompt":\n "a",}', "line 2, column 6"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "it begins with a byte order mark"),
        (b'{"prompt": "\xff"}', "it is no UTF-8 at byte 12."),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number has too many digits."),
    ],
)
def test_what_is_no_json_is_told_where_in_words_that_are_not_pythons(server: LiveServer, body: bytes, why: str) -> None:
    with server.client() as client:
        reply = client.post("/tokenize", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert why in reply.json()["error"]["message"]
    assert "sys." not in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_the_part_that_is_not_served_is_named(server: LiveServer, kind: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": kind}]},
    ]
    with server.client() as client:
        error = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[1].content[1]")
    assert kind in error["message"]


def test_the_page_is_self_contained_and_may_fetch_nothing_else(server: LiveServer) -> None:
    with server.client() as client:
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert sorted(links) == ["data:,", "web/app.js", "web/style.css"]
        modules = re.findall(r'from "\./([^"]+)"', client.get("/web/app.js").text)
        assert modules == ["attachments.js"]
        for link in [*links[1:], *(f"/web/{module}" for module in modules)]:
            reply = client.get(link)
            assert reply.status_code == 200
            assert "://" not in reply.text
    assert "<script>" not in page.text
    assert "style=" not in page.text


def test_every_field_of_the_page_has_a_label(server: LiveServer) -> None:
    with server.client() as client:
        page = client.get("/").text
    fields = re.findall(r'<(?:input|select|textarea) id="([^"]+)"', page)
    assert len(fields) == len(re.findall(r"<(?:input|select|textarea)\b", page)) > 0
    for field in fields:
        labelled = re.search(rf'<label[^>]*>[^<]*<(?:input|select|textarea) id="{field}"', page)
        assert labelled or f'for="{field}"' in page, field
