"""A prompt's log-probabilities spelled out: which token each is of, and where that stands in the echo."""

import numpy as np
import pytest
from test_detokenizer import sentencepiece_like

from models.batch import PromptLogprobs
from server.engine.messages import TokenDelta
from server.text.details import PromptDetails
from server.text.pieces import MAX_LOGPROBS, in_pieces
from server.text.tokenizer import TextTokenizer


def scores(count: int, num_top: int = 0) -> PromptLogprobs:
    values, ids = -np.arange(count, dtype=np.float32), np.arange(count * num_top, dtype=np.int32)
    ranks = np.arange(1, count + 1, dtype=np.int32)
    return PromptLogprobs(
        num_top, values.tobytes(), ranks.tobytes(), ids.tobytes(), (-ids).astype(np.float32).tobytes()
    )


def offsets(tokenizer: TextTokenizer, token_ids: list[int], echo: str) -> list[int]:
    details = PromptDetails(tokenizer, token_ids, echo)
    return [detail.offset for detail in details.feed([scores(len(token_ids) - 1)])]


def test_offsets_are_places_in_the_echo(tokenizer: TextTokenizer) -> None:
    assert offsets(tokenizer, list(b"hello"), "hello") == [0, 1, 2, 3, 4]
    text = "a日b"
    assert offsets(tokenizer, list(text.encode()), text) == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(("echo", "wanted"), [("hi", [0, 0, 1, 2]), ("<|im_start|>hi", [0, 12, 13, 14])])
def test_control_tokens_take_room_where_they_are_shown(tokenizer: TextTokenizer, echo: str, wanted: list[int]) -> None:
    """A prompt of token ids is echoed without them, and a text as it was written."""
    ids = dict(zip(tokenizer.special_ids, map(tokenizer.token_bytes, tokenizer.special_ids), strict=True))
    start = next(token for token, spelled in ids.items() if spelled == b"<|im_start|>")
    end = next(token for token, spelled in ids.items() if spelled == b"<|im_end|>")
    assert offsets(tokenizer, [start, *b"hi", end], echo) == wanted


def test_a_vocabulary_of_pieces_is_spelled_too() -> None:
    tokenizer = sentencepiece_like()
    text = "日a"
    assert offsets(tokenizer, [3 + byte for byte in text.encode()], text) == [0, 0, 0, 1]


def test_bytes_that_are_no_character_take_room(tokenizer: TextTokenizer) -> None:
    token_ids = [*b"a\xe2", *b"b\xe2\x82", *b"\xe2\x82\xac\xff", *b"c"]
    echo = tokenizer.decode(token_ids)
    assert echo == "a\ufffdb\ufffd€\ufffdc"
    assert offsets(tokenizer, token_ids, echo) == [0, 1, 2, 3, 3, 4, 4, 4, 5, 6]


def test_control_tokens_end_a_run_of_bytes_that_is_echoed() -> None:
    tokenizer = sentencepiece_like()
    start, end = (tokenizer.source.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
    token_ids = [start, *(3 + byte for byte in "日".encode()), end, 3 + ord("a")]
    assert offsets(tokenizer, token_ids, "<s>日</s>a") == [0, 3, 3, 3, 4, 8]
    assert offsets(tokenizer, token_ids, "日a") == [0, 0, 0, 0, 1, 1]


def test_a_space_that_decoding_leaves_out_is_in_the_echo() -> None:
    tokenizer = sentencepiece_like()
    start, hello, dot = (tokenizer.source.convert_tokens_to_ids(token) for token in ("<s>", "▁hello", "."))
    assert offsets(tokenizer, [hello, dot], " hello.") == [0, 6]
    assert offsets(tokenizer, [start, hello, dot], "<s> hello.") == [0, 3, 9]
    assert offsets(tokenizer, [start, hello, dot], "hello.") == [0, 0, 5]


def test_the_first_token_has_none_and_comes_once(tokenizer: TextTokenizer) -> None:
    details = PromptDetails(tokenizer, list(b"hello"), "hello")
    first, second = list(details.feed([])), list(details.feed([scores(1, 2), scores(3, 2)]))
    assert [detail.is_first for detail in (*first, *second)] == [True, False, False, False, False]
    assert "".join(detail.chosen.text for detail in (*first, *second)) == "hello"
    assert [candidate.logprob for candidate in second[0].top] == [0.0, -1.0]
    assert [detail.chosen.rank for detail in second] == [1, 1, 2, 3]
    assert [(candidate.token_id, candidate.rank) for candidate in second[-1].top] == [(4, 1), (5, 2)]


def test_a_step_s_worth_of_scores_is_spelled_a_little_at_a_time(tokenizer: TextTokenizer) -> None:
    """In front of the token that came with them."""
    delta = TokenDelta("r", [104], None, "length", prompt_logprobs=[scores(1000, 5), scores(10, 5)])
    pieces = list(in_pieces(delta))
    counts = [len(some) for piece in pieces for some in piece.prompt_logprobs or ()]
    assert (max(counts), sum(counts)) == (MAX_LOGPROBS // 6, 1010)
    assert [piece.token_ids for piece in pieces] == [[]] * len(counts) + [[104]]
    assert [piece.finish_reason for piece in pieces] == [None] * len(counts) + ["length"]
    assert len(list(in_pieces(TokenDelta("r", [], prompt_logprobs=[scores(3)])))) == 1
    prompt = PromptDetails(tokenizer, [104] * 1011, "h" * 1011)
    details = [detail for piece in pieces for detail in prompt.feed(piece.prompt_logprobs or ())]
    assert [detail.offset for detail in details] == list(range(1011))
