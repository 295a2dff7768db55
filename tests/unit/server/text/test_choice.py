import pytest
from test_detokenizer import sentencepiece_like
from token_logprobs import token_logprobs

from server.engine.messages import TokenDelta
from server.errors import RequestFailedError
from server.text.choice import ChoiceText
from server.text.tokenizer import TextTokenizer

EOS = 260


def delta(text: bytes, **fields: object) -> TokenDelta:
    return TokenDelta("r", list(text), **fields)


def test_tokens_after_a_stop_string_do_not_count(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(tokenizer, 0, stop=["lo"])
    result = choice.feed(delta(b"hello world"))
    assert (result.text, result.finish_reason, choice.num_tokens) == ("hel", "stop", 5)


def test_a_stop_token_is_counted_and_not_shown(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(tokenizer, 0)
    result = choice.feed(TokenDelta("r", [104, 105, 33], None, "stop", 33))
    assert (result.text, result.finish_reason, choice.num_tokens) == ("hi", "stop", 3)


def test_a_stop_string_in_held_bytes_at_the_end_still_stops(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(tokenizer, 0, stop=["\ufffd"])
    assert choice.feed(delta(b"a\xe6", finish_reason="length")).finish_reason == "stop"


def byte_fallback(text: str, **fields: object) -> TokenDelta:
    return TokenDelta("r", [3 + byte for byte in text.encode()], **fields)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "num_tokens"),
    [
        ("\n", "\n", "", 1),
        ("a\n\nb", "\n\n", "a", 3),
        ("a\nb", "a\n", "", 2),
        ("日本語", "本", "日", 6),
        ("日本語", "語本", "日本語", 9),
        ("日本語", "\ufffd", "日本語", 9),
    ],
)
def test_a_stop_string_of_byte_tokens_stops_at_its_last_one(text: str, stop: str, shown: str, num_tokens: int) -> None:
    """Their text is held back, as a broken byte after them would change it; but nothing comes after a stop."""
    tokenizer = sentencepiece_like()
    choice = ChoiceText(tokenizer, 0, stop=[stop])
    logprobs = [token_logprobs(-1.0) for _ in text.encode()]
    result = choice.feed(byte_fallback(text, logprobs=logprobs, finish_reason="length"))
    assert (result.text, result.finish_reason) == (shown, "length" if shown == text else "stop")
    assert choice.num_tokens == len(result.details) == num_tokens


def test_held_bytes_that_do_not_stop_are_text_once() -> None:
    tokenizer = sentencepiece_like()
    choice = ChoiceText(tokenizer, 0, stop=["\n\n", "x"])
    hello = tokenizer.source.convert_tokens_to_ids("hello")
    first = choice.feed(byte_fallback("a\n"))
    second = choice.feed(TokenDelta("r", [hello], None, "length"))
    assert first.text + second.text == "a\nhello"


def test_stop_strings_wait_for_min_tokens(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(tokenizer, 0, stop=["a"], min_tokens=3)
    assert choice.feed(delta(b"aaa")).text == "aaa"
    assert choice.feed(delta(b"ba")).finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "shown"),
    [("aab", "ab", 2, "a"), ("ababx", "bx", 4, "aba"), ("xyxyxy", "yxy", 6, "xyxyxy"), ("xyxyxyxy", "yxyxy", 6, "xyx")],
)
def test_a_stop_string_that_ends_after_min_tokens_stops_wherever_it_begins(
    tokenizer: TextTokenizer, text: str, stop: str, min_tokens: int, shown: str
) -> None:
    choice = ChoiceText(tokenizer, 0, stop=[stop], min_tokens=min_tokens)
    result = choice.feed(delta(text.encode(), finish_reason="length"))
    assert (result.text, result.finish_reason) == (shown, "length" if shown == text else "stop")


def test_held_text_comes_out_when_the_length_ends_it(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(tokenizer, 0, stop=["lot"])
    assert choice.feed(delta(b"hello")).text == "hel"
    assert choice.feed(delta(b"", finish_reason="length")).text == "lo"


def test_logprobs_are_cut_with_the_text(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(tokenizer, 0, stop=["b"])
    logprobs = [token_logprobs(-1.0, [(97, -1.0)]) for _ in range(3)]
    result = choice.feed(delta(b"abc", logprobs=logprobs))
    assert [detail.chosen.text for detail in result.details] == ["a", "b"]


def test_offsets_count_characters_of_the_text(tokenizer: TextTokenizer) -> None:
    token_ids = [*"aé🌍".encode(), EOS, *b"b!"]
    choice = ChoiceText(tokenizer, 0, stop=["b"])
    logprobs = [token_logprobs(-1.0) for _ in token_ids]
    first = choice.feed(TokenDelta("r", token_ids[:4], logprobs[:4]))
    second = choice.feed(TokenDelta("r", token_ids[4:], logprobs[4:]))
    assert first.text + second.text == "aé🌍"
    assert [detail.offset for detail in (*first.details, *second.details)] == [0, 1, 1, 2, 2, 2, 2, 3, 3]


def test_offsets_count_bytes_that_are_no_character(tokenizer: TextTokenizer) -> None:
    """Also behind the echo, up to the token that stopped it."""
    token_ids = [*b"\xf0\x9fa", *b"\xe2\xe2\x82\xac\xe2", EOS]
    choice = ChoiceText(tokenizer, 0, prompt_token_ids=list(b"hi"), echo="hi", follows_details=True)
    deltas = [
        choice.feed(TokenDelta("r", [token], [token_logprobs(-1.0)], *(("stop", EOS) if token == EOS else ())))
        for token in token_ids
    ]
    assert "".join(delta.text for delta in deltas) == "\ufffda\ufffd€\ufffd"
    found = [detail.offset for delta in deltas for detail in delta.details]
    assert found == [2, 2, 3, 4, 5, 5, 5, 6, 7]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_the_engine_gave_up_is_a_failure(tokenizer: TextTokenizer, reason: str) -> None:
    with pytest.raises(RequestFailedError):
        ChoiceText(tokenizer, 0).feed(delta(b"a", finish_reason=reason))
