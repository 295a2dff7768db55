import asyncio
import json
import threading

import pytest
from scripted_engine import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from server.text.tokenizer import INLINE_CHARACTERS, PIECE_CHARACTERS, SAMPLE_EVERY, TextTokenizer


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


def test_the_fewest_tokens_of_a_text_are_known_by_the_longest_token(tokenizer: TextTokenizer) -> None:
    longest = len("<|endoftext|>")
    assert [tokenizer.fewest_tokens("x" * size) for size in (0, 1, longest, longest + 1)] == [0, 1, 1, 2]


def test_tokens_are_counted_no_further_than_one_wants_to_know(tokenizer: TextTokenizer) -> None:
    text = "<|im_end|>" * PIECE_CHARACTERS
    assert tokenizer.count_up_to(10**9, text, plain=True) == len(text)
    assert tokenizer.count_up_to(PIECE_CHARACTERS + 1, text, plain=True) == 2 * PIECE_CHARACTERS
    assert tokenizer.count_up_to(0, text, plain=True) == 0
    assert tokenizer.count_up_to(10**9, "<|im_end|>" * 9, plain=False) == 9


def test_tokens_are_estimated_by_samples(tokenizer: TextTokenizer) -> None:
    text = "he" * (20 * SAMPLE_EVERY) + "<|im_end|>" * (4 * SAMPLE_EVERY)
    for plain, tokens in ((True, 60 * SAMPLE_EVERY), (False, 24 * SAMPLE_EVERY)):
        assert tokenizer.estimate(text, plain=plain) == pytest.approx(tokens, rel=0.1)


def test_nothing_is_known_of_lengths_where_a_token_may_take_more_than_it_spells() -> None:
    stripping = tiny_tokenizer()
    stripping.backend_tokenizer.add_special_tokens([AddedToken("<|greedy|>", lstrip=True)])
    normalized = tiny_tokenizer()
    normalized.backend_tokenizer.normalizer = normalizers.Strip()
    dropping = tiny_tokenizer()
    bytes_of_words = dropping.backend_tokenizer.pre_tokenizer
    dropping.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), bytes_of_words]
    )
    removing = tiny_tokenizer()
    removing.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), bytes_of_words]
    )
    lacking = tiny_tokenizer()
    lacking.backend_tokenizer.model = models.BPE(vocab={"a": 0}, merges=[])
    for source in (stripping, normalized, dropping, removing, lacking):
        assert TextTokenizer(source).fewest_tokens("x" * 10**6) == 0


def test_characters_that_a_vocabulary_leaves_out_are_no_tokens() -> None:
    source = tiny_tokenizer()
    state = json.loads(source.backend_tokenizer.to_str())
    del state["model"]["vocab"]["Ą"]  # the byte 4
    lacking = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state))))
    left_out = "\x04"
    assert lacking.encode(left_out) == []
    assert lacking.fewest_tokens(left_out * 10**6) == 0
    assert lacking.fewest_tokens(left_out * 10**6 + "x") == 1


def with_prefix(scheme: str) -> TextTokenizer:
    """SentencePiece's kind: ▁ in front of a text, by a normalizer as Llama 2's or where words are cut."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "▁▁": 3, "a": 4, "▁a": 5, "b": 6, "▁b": 7, "\n": 8}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "▁"), ("▁", "a"), ("▁", "b")]))
    if scheme == "normalizer":
        tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokens.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokens.add_special_tokens(["<s>", "</s>"])
    source = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>")
    return TextTokenizer(source)


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize(
    "pieces", [("a\n", "a"), ("a", " b"), ("<s>", "a b"), ("a</s>", "\n", "b</s>a"), ("a\n", "b</s>a</s>", "<s>b")]
)
def test_a_text_that_goes_on_has_the_tokens_that_it_has_together_with_what_is_in_front(
    scheme: str, pieces: tuple[str, ...]
) -> None:
    tokenizer = with_prefix(scheme)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(piece, after=ids[-1] if ids else None)
    assert ids == tokenizer.encode("".join(pieces))


def test_plain_text_goes_on_without_a_prefix_either() -> None:
    tokenizer = with_prefix("always")
    first = tokenizer.encode_plain("b\n")
    assert tokenizer.encode_plain("a b", after=first[-1]) == tokenizer.encode("b\na b")[len(first) :]
