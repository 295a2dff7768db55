"""Strings <-> token ids, without ever blocking the event loop on a long text. Must not know requests, roles or the
wire format."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Any, TypeVar

from tokenizers import Tokenizer

from server.text.operators_template import NOTHING_SAID, OperatorsTemplate
from server.text.prefixes import GoingOn

INLINE_CHARACTERS = 4096  # a text this short costs less on the event loop (about a millisecond) than a thread hop
SAMPLE_CHARACTERS, SAMPLE_EVERY = 2**10, 2**15  # of a text whose tokens are estimated: one part in 32
PIECE_CHARACTERS = 2**16  # of a text whose tokens are only counted: about 30 milliseconds
NUM_THREADS = 2
BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")

T = TypeVar("T")


class TextTokenizer:
    """One model's vocabulary. `source` is a transformers fast tokenizer (for its chat template and special tokens);
    `operators` is what chat_template renders with before what the model brings."""

    def __init__(self, source: Any, operators: OperatorsTemplate = NOTHING_SAID) -> None:
        if not hasattr(source, "backend_tokenizer"):
            raise ValueError("the model has no tokenizer.json: only tokenizers of the tokenizers library are served")
        taken = sorted(operators.variables.keys() & source.special_tokens_map.keys())
        if taken:
            raise ValueError(f"default-chat-template-kwargs: '{taken[0]}' is set by the server itself")
        self.source = source
        self.operators = operators
        self._tokens: Tokenizer = Tokenizer.from_str(source.backend_tokenizer.to_str())
        self._tokens.no_truncation()
        self._tokens.no_padding()
        # A second copy reads special tokens as plain text. (The switch is state of the tokenizer, hence two objects.)
        self._plain: Tokenizer = Tokenizer.from_str(self._tokens.to_str())
        self._plain.encode_special_tokens = True
        state = json.loads(self._tokens.to_str())
        self._going_on, self._plain_going_on = GoingOn(self._tokens, state), GoingOn(self._plain, state)
        self.is_byte_level = _decodes_bytes(state.get("decoder"))
        added = self._tokens.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)  # never shown
        self.control_ids = self._control_ids()
        self._control_texts = self._control_texts_by_start()
        self._lacking = [byte for text, byte in BYTE_OF_CHARACTER.items() if self._tokens.token_to_id(text) is None]
        self._longest = self._longest_token(state)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._patient = ThreadPoolExecutor(1, thread_name_prefix="patient-tokenizer")
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False, after: int | None = None) -> list[int]:
        """Special tokens written in `text` become their ids: for templates, and prompts that are all the caller's.
        `after`: the token behind which it goes on, without special tokens of its own."""
        if after is not None:
            return self._going_on.encode(text, after)
        # The batch call is the one that releases the GIL.
        return list(self._tokens.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_plain(self, text: str, *, after: int | None = None) -> list[int]:
        """No part of `text` becomes a control token, whatever it spells; decoding gives `text` back. `after`: the token
        behind which it goes on."""
        if after is not None:
            ids = self._plain_going_on.encode(text, after)
            if self.control_ids.isdisjoint(ids):
                return ids
        parts: list[str | list[int]] = [text]
        while texts := [part for part in parts if isinstance(part, str)]:
            encodings = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
            done, parts = parts, []
            for part in done:
                parts += self._without_control(part, next(encodings).ids) if isinstance(part, str) else [part]
        return [token for part in parts if not isinstance(part, str) for token in part]

    def count_up_to(self, most: int, text: str, *, plain: bool) -> int:
        """How many tokens `text` has, piece by piece and hardly further than `most`: each cut may add or save a few."""
        tokens, counted = self._plain if plain else self._tokens, 0
        for at in range(0, len(text), PIECE_CHARACTERS):
            if counted >= most:
                break
            piece = text[at : at + PIECE_CHARACTERS]
            counted += len(tokens.encode_batch_fast([piece], add_special_tokens=False)[0])
        return counted

    def estimate(self, text: str, *, plain: bool) -> int:
        """About how many tokens `text` has, by samples from everywhere in it; nobody knows from where."""
        tokens, begin = self._plain if plain else self._tokens, random.randrange(SAMPLE_EVERY)
        samples = [text[at : at + SAMPLE_CHARACTERS] for at in range(begin, len(text), SAMPLE_EVERY)]
        counted = sum(map(len, tokens.encode_batch_fast(samples, add_special_tokens=False)))
        return counted * (SAMPLE_EVERY // SAMPLE_CHARACTERS)

    def fewest_tokens(self, text: str) -> int:
        """So many tokens, or more, `text` has: known without encoding it. 0 where nothing is known."""
        if self._longest is None:
            return 0
        left_out = sum(text.count(chr(byte)) for byte in self._lacking if byte < 0x80)
        return -(-(len(text) - left_out) // self._longest)

    def spells_control_token(self, text: str) -> bool:
        """Whether `encode` could find a control token in `text`, before or after the tokenizer's normalisation."""
        if self._holds_control_text(text):
            return True
        normalizer = self._tokens.normalizer
        return normalizer is not None and self._holds_control_text(normalizer.normalize_str(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # The batch call is the one that releases the GIL, here too.
        return str(self._tokens.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, half characters included. Ids beyond the vocabulary stand for nothing."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def vocabulary_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it ("Ġhello")."""
        return self._tokens.id_to_token(token_id) or ""

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether it is SentencePiece's token for one byte: <0x0A>."""
        return BYTE_FALLBACK.fullmatch(self.vocabulary_piece(token_id)) is not None

    async def in_thread(self, work: Callable[[], T], num_characters: int, *, fits: bool = True) -> T:
        """Runs `work` here if it is short, else on a thread. What need not fit the model's context (`fits` False) may
        take long, and has one of its own: nobody's answer waits for it."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        if not fits:
            return await self.in_patient_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def in_patient_thread(self, work: Callable[[], T]) -> T:
        """One after the other, where nothing else waits."""
        return await asyncio.get_running_loop().run_in_executor(self._patient, work)

    def close(self) -> None:
        for threads in (self._threads, self._patient):
            threads.shutdown(wait=False, cancel_futures=True)

    def _longest_token(self, state: dict[str, Any]) -> int | None:
        """The bytes of the longest token (a character has one or more). None where text may have fewer tokens than that
        says: no bytes are spelled, or characters are left out, a normaliser shortens it, added tokens take spaces
        along, or it is dropped between words."""
        greedy = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        lacking = any(0x80 <= byte < 0xC0 for byte in self._lacking)  # every character beyond ASCII ends in one
        exact = self.is_byte_level and state["normalizer"] is None and _keeps_text(state["pre_tokenizer"])
        if not exact or greedy or lacking:
            return None
        return max(len(piece.encode()) for piece in self._tokens.get_vocab(with_added_tokens=True))

    def _control_ids(self) -> frozenset[int]:
        special = self.special_ids | set(self.source.all_special_ids)
        unknown = self.source.unk_token_id
        if self.is_byte_level or unknown in (self.source.eos_token_id, self.source.bos_token_id):
            return frozenset(special)
        # <unk> is what honest text becomes when a vocabulary lacks a character; it controls nothing.
        return frozenset(special - {unknown})

    def _without_control(self, text: str, ids: list[int]) -> list[str] | list[list[int]]:
        """Its tokens; or `text` in pieces to be encoded again, when the vocabulary itself spells control tokens in it
        (Unigram models do): each is cut through its middle."""
        if self.control_ids.isdisjoint(ids):
            return [ids]
        spans = zip(ids, self._plain.encode_batch([text], add_special_tokens=False)[0].offsets, strict=True)
        cuts = {(start + end) // 2 for token, (start, end) in spans if token in self.control_ids and end - start > 1}
        if not cuts:  # single characters: they are left out
            return [[token for token in ids if token not in self.control_ids]]
        return [text[start:end] for start, end in pairwise((0, *sorted(cuts), len(text)))]

    def _holds_control_text(self, text: str) -> bool:
        """Plain searches, not one regular expression: on megabytes, that would keep the GIL for a second."""
        return any(start in text and any(whole in text for whole in texts) for start, texts in self._control_texts)

    def _control_texts_by_start(self) -> list[tuple[str, list[str]]]:
        """A vocabulary may have hundreds of them, but they begin in few ways ("<|")."""
        texts = sorted(text for text in map(self._tokens.id_to_token, self.control_ids) if text)
        return [(start, list(group)) for start, group in groupby(texts, key=lambda text: text[:2])]

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self.vocabulary_piece(token_id)
        if self.is_byte_level:
            return byte_level_bytes(piece)
        if self.is_byte_fallback(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def byte_level_bytes(piece: str) -> bytes:
    """GPT-2's printable spelling of bytes, undone; a piece with any other character stands for its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """https://github.com/openai/gpt-2/blob/master/src/encoder.py: bytes_to_unicode, turned round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _keeps_text(splitter: dict[str, Any] | None) -> bool:
    """Whether what cuts texts into words is known to drop none of it."""
    if splitter is None:
        return True
    if splitter["type"] == "Sequence":
        return all(map(_keeps_text, splitter["pretokenizers"]))
    return splitter["type"] in ("ByteLevel", "Digits") or (
        splitter["type"] == "Split" and splitter["behavior"] != "Removed"
    )


def _decodes_bytes(decoder: dict[str, Any] | None) -> bool:
    """Whether the tokenizer's decoder is GPT-2's byte alphabet and nothing else."""
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _decodes_bytes(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")
