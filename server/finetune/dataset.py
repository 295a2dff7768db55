"""A job's training file -> tokenised examples; what cannot be learnt is named by its line. For the trainer process;
must not know SQL, HTTP or tensors."""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from models.training import Example, ExampleError, Preference
from server.finetune.rendering import CannotLearnError, render_example
from server.text.tokenizer import TextTokenizer

MAX_TOKENS = 50_000_000  # of one file: they are kept in memory


class DatasetError(Exception):
    """A file that cannot be learnt from. `param`: which of the request's files it is."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Dataset:
    examples: tuple[Example, ...] | tuple[Preference, ...]
    tokens: int
    longest: int  # tokens of the longest sequence
    lines: Sequence[int]  # where each example stands in the file, counted from 1: a line may be several

    def refusal(self, error: ExampleError, param: str) -> DatasetError:
        """What a trainer has against an example, with its line."""
        place = "" if error.index is None else f"Line {self.lines[error.index]}: "
        return DatasetError(f"{place}{error}", param)


def read_dataset(path: Path, tokenizer: TextTokenizer, max_length: int, param: str) -> Dataset:
    """Raises DatasetError, OSError."""
    same: dict[int, int] = {}  # one object for all places of a token
    examples: list[Example | Preference] = []
    lines = array("L")
    tokens = longest = 0
    for number, example in _examples(path, tokenizer, max_length, param):
        for sequence in _sequences(example):
            longest = max(longest, len(sequence))
            tokens += len(sequence)
        if tokens > MAX_TOKENS:
            raise DatasetError(f"The file has more than {MAX_TOKENS} tokens.", param)
        examples.append(_shared(example, same))
        lines.append(number)
    return Dataset(cast(tuple[Example, ...], tuple(examples)), tokens, longest, lines)


def _examples(
    path: Path, tokenizer: TextTokenizer, max_length: int, param: str
) -> Iterator[tuple[int, Example | Preference]]:
    """With the line of each. One after the other: all sequences of a long conversation may be more than there is room
    for."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                for example in render_example(tokenizer, json.loads(line), max_length):
                    yield number, example
            except CannotLearnError as error:
                raise DatasetError(f"Line {number}: {error}.", param) from None


def _sequences(example: Example | Preference) -> tuple[Example, ...]:
    return (example,) if isinstance(example, Example) else (example.chosen, example.rejected)


def _shared(example: Example | Preference, same: dict[int, int]) -> Example | Preference:
    if isinstance(example, Preference):
        return Preference(_share(example.chosen, same), _share(example.rejected, same))
    return _share(example, same)


def _share(example: Example, same: dict[int, int]) -> Example:
    return Example(tuple(same.setdefault(token, token) for token in example.tokens), example.targets)
