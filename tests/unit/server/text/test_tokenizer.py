import asyncio
import threading

import pytest

from server.text.tokenizer import INLINE_CHARACTERS, TextTokenizer


@pytest.mark.parametrize("text", ["hello", "héllo 🙂 日本", "<|im_end|>", "a\x00b", ""])
def test_plain_encoding_decodes_to_the_same_text(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_plain(text), skip_special_tokens=False) == text


def test_token_bytes_are_the_bytes_a_token_stands_for(tokenizer: TextTokenizer) -> None:
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(256) == b"he"
    assert tokenizer.token_bytes(258) == b"<|endoftext|>"
    assert tokenizer.token_bytes(9999) == b""


def test_long_texts_leave_the_event_loop(tokenizer: TextTokenizer) -> None:
    async def where(size: int) -> int:
        return await tokenizer.in_thread(threading.get_ident, size)

    assert asyncio.run(where(INLINE_CHARACTERS)) == threading.get_ident()
    assert asyncio.run(where(INLINE_CHARACTERS + 1)) != threading.get_ident()
