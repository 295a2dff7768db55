import random
from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from server.text.detokenizer import (
    LONGEST_UNFINISHED,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    detokenizer_for,
)
from server.text.tokenizer import TextTokenizer

NUM_SEQUENCES = 10_000


def sentencepiece_like() -> TextTokenizer:
    """Llama 2's kind: words with ▁, byte fallback, and a decoder that strips the first space."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁hello", "▁world", "hello", "é", "日本", "🙂", "▁🙂", ".", "▁▁"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )


def sequences(seed: int, count: int, vocabulary: int, longest: int = 24) -> list[list[int]]:
    """Random tokens, so mostly broken UTF-8, mixed with whole emoji and CJK."""
    rng = random.Random(seed)
    whole = ["🙂".encode(), "日本".encode(), "é".encode(), b"plain ", "👩‍👩‍👧".encode(), "\ufffd".encode()]
    result = []
    for _ in range(count):
        tokens: list[int] = []
        while len(tokens) < rng.randrange(1, longest):
            tokens += rng.choice(whole) if rng.random() < 0.5 else [rng.randrange(vocabulary)]
        result.append(tokens)
    return result


def text_of(detokenizer: Detokenizer, tokens: Iterable[int]) -> str:
    return "".join(map(detokenizer.feed, tokens))


def whole(detokenizer: Detokenizer, tokens: list[int]) -> str:
    return text_of(detokenizer, tokens) + detokenizer.finish()


def test_deltas_join_to_the_decoding_of_all_tokens(tokenizer: TextTokenizer) -> None:
    for tokens in sequences(0, NUM_SEQUENCES, 261):
        assert whole(ByteDetokenizer(tokenizer), tokens) == tokenizer.decode(tokens), tokens


def test_window_agrees_with_whole_decoding_for_byte_level_vocabularies(tokenizer: TextTokenizer) -> None:
    for tokens in sequences(3, 1000, 261):
        assert whole(WindowDetokenizer(tokenizer), tokens) == tokenizer.decode(tokens), tokens


def test_deltas_join_for_vocabularies_with_byte_fallback() -> None:
    tokenizer, rng = sentencepiece_like(), random.Random(4)
    assert not tokenizer.is_byte_level
    for _ in range(2000):
        tokens = [rng.randrange(len(tokenizer.source)) for _ in range(rng.randrange(1, 20))]
        if rng.random() < 0.5:
            tokens += [3 + byte for byte in "🙂é".encode()]
        assert whole(WindowDetokenizer(tokenizer), tokens) == tokenizer.decode(tokens), tokens


def test_half_a_character_is_never_shown(tokenizer: TextTokenizer) -> None:
    for text in ("🙂", "日", "é", "a🙂b"):
        detokenizer = detokenizer_for(tokenizer, ())
        for byte in text.encode():
            assert "\ufffd" not in detokenizer.feed(byte)
        assert detokenizer.finish() == ""


def test_window_shows_the_space_that_the_prompt_makes_visible() -> None:
    tokenizer = sentencepiece_like()
    hello, world = (tokenizer.source.convert_tokens_to_ids(piece) for piece in ("▁hello", "▁world"))
    assert detokenizer_for(tokenizer, [hello]).feed(world) == " world"
    assert detokenizer_for(tokenizer, []).feed(world) == "world"


@pytest.mark.parametrize("text", ["ကခဂ" * 100, "ภาษาไทย" * 40, "👩‍👩‍👧" * 30, "aé日🙂" * 50])
def test_a_long_run_of_bytes_is_shown_by_whole_characters(text: str) -> None:
    tokenizer = sentencepiece_like()
    detokenizer = WindowDetokenizer(tokenizer, [tokenizer.source.convert_tokens_to_ids("hello")])
    shown = ""
    for number, byte in enumerate(text.encode(), start=1):
        shown += detokenizer.feed(3 + byte)
        assert text.startswith(shown)
        assert number - len(shown.encode()) < LONGEST_UNFINISHED
    assert shown + detokenizer.finish() == text


def test_what_was_shown_of_a_run_of_bytes_stays_when_it_breaks() -> None:
    tokenizer = sentencepiece_like()
    hello = tokenizer.source.convert_tokens_to_ids("hello")
    text = "က" * 25  # 75 bytes
    detokenizer = WindowDetokenizer(tokenizer, [hello])
    shown = text_of(detokenizer, [3 + byte for byte in text.encode()])
    assert shown == "က" * 21
    assert text_of(detokenizer, [3 + 0xFF, hello]) == "\ufffd" * (12 + 1) + "hello"


@pytest.mark.parametrize("prompt", ["🎉🎉", "日本", "🎉é", "🎉" * 40, "日" * 23 + "🎉"])
@pytest.mark.parametrize("answer", ["\n", "🎉"])
def test_an_answer_after_bytes_is_what_it_says(prompt: str, answer: str) -> None:
    """However many of them there are, and wherever the last few tokens of the prompt begin."""
    tokenizer = sentencepiece_like()
    hello = tokenizer.source.convert_tokens_to_ids("hello")
    detokenizer = WindowDetokenizer(tokenizer, [1, hello, *(3 + byte for byte in prompt.encode())])
    assert text_of(detokenizer, [*(3 + byte for byte in answer.encode()), hello]) == answer + "hello"


def test_a_character_that_the_prompt_begins_takes_nothing_from_the_answer() -> None:
    tokenizer = sentencepiece_like()
    hello = tokenizer.source.convert_tokens_to_ids("hello")
    first, second, third = (3 + byte for byte in "日".encode())
    assert text_of(WindowDetokenizer(tokenizer, [hello, first, second]), [third, hello]) == "\ufffdhello"


def test_endless_broken_bytes_are_not_held_for_ever() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = WindowDetokenizer(tokenizer)
    shown = text_of(detokenizer, [3 + 0xFF] * 200)
    assert len(shown) > 150


@pytest.mark.parametrize("special", [258, 259, 260])
def test_control_tokens_are_never_text(tokenizer: TextTokenizer, special: int) -> None:
    assert text_of(detokenizer_for(tokenizer, ()), [104, special, 105]) == "hi"


def places(detokenizer: Detokenizer, tokens: list[int]) -> list[int]:
    """Of each token's first character in the text of all of them."""
    found, shown = [], 0
    for token in tokens:
        found.append(shown + detokenizer.num_held_before(token))
        shown += len(detokenizer.feed(token))
    assert shown + detokenizer.num_held_before(None) == shown + len(detokenizer.finish())
    return found


def characters_of(data: bytes) -> list[int]:
    """For each byte, the place of the character that it is of."""
    return [len((data[: at + 1]).decode(errors="replace")) - 1 for at in range(len(data))]


def test_what_is_held_back_has_its_place_before_the_token_that_follows(tokenizer: TextTokenizer) -> None:
    for tokens in sequences(5, 2000, 256):
        assert places(ByteDetokenizer(tokenizer), tokens) == characters_of(bytes(tokens)), tokens


def test_a_run_of_bytes_has_a_place_for_each_character_or_for_each_byte() -> None:
    tokenizer = sentencepiece_like()
    hello, dot = (tokenizer.source.convert_tokens_to_ids(piece) for piece in ("hello", "."))

    def found(*tokens: bytes | int) -> list[int]:
        ids = [[token] if isinstance(token, int) else [3 + byte for byte in token] for token in tokens]
        return places(WindowDetokenizer(tokenizer, [hello]), [one for some in ids for one in some])

    assert found("é日".encode(), dot, dot) == [0, 0, 1, 1, 1, 2, 3]
    assert found(b"\xe6\x97", dot, dot) == [0, 0, 2, 3]
    assert found("日".encode() + b"\xff", b"\xe6", dot) == [0, 0, 0, 3, 4, 5]  # that it breaks is not foreseen
