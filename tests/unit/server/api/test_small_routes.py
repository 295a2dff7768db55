"""Tokenize, detokenize, playground."""

import re
import threading

import pytest
from scripted_engine import MAX_MODEL_LEN, LiveServer


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


def test_detokenize_survives_tokens_beyond_the_vocabulary(server: LiveServer) -> None:
    with server.client() as client:
        assert client.post("/detokenize", json={"tokens": [104, 2**31 - 1]}).json() == {"prompt": "h"}
        assert client.post("/detokenize", json={"tokens": [2**31]}).status_code == 400


def test_the_page_is_self_contained_and_may_fetch_nothing_else(server: LiveServer) -> None:
    with server.client() as client:
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert sorted(links) == ["/web/app.js", "/web/style.css", "data:,"]
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
    for field in re.findall(r'<(?:input|select|textarea) id="([^"]+)"', page):
        labelled = re.search(rf'<label[^>]*>[^<]*<(?:input|select|textarea) id="{field}"', page)
        assert labelled or f'for="{field}"' in page, field
