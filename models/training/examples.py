"""What is learnt from: token ids, and which of them count. Knows no text and no tensor."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from models.training.errors import ExampleError
from models.training.plan import TrainingPlan


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence of tokens; `targets[i]` says that `tokens[i]` is learnt, from all the tokens before it.

    The first token is never learnt: nothing stands before it.
    """

    tokens: tuple[int, ...]
    targets: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def learnt(self) -> int:
        """How many tokens are learnt."""
        return sum(self.targets[1:])


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of one prompt, of which the first is preferred (Rafailov et al. 2023)."""

    chosen: Example
    rejected: Example

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


TrainingData = Sequence[Example | Preference]


def sequences(example: Example | Preference) -> tuple[Example, ...]:
    """The sequences of an example: itself, or chosen and rejected."""
    return (example,) if isinstance(example, Example) else (example.chosen, example.rejected)


def check(examples: TrainingData, plan: TrainingPlan) -> None:
    """Raises ExampleError for the first example that the plan cannot learn from."""
    if not examples:
        raise ExampleError("there are no examples to learn from")
    wanted = Preference if plan.method == "dpo" else Example
    for index, example in enumerate(examples):
        if not isinstance(example, wanted):
            raise ExampleError(
                f"example {index}: method {plan.method!r} learns from {wanted.__name__}, not {type(example).__name__}",
                index,
            )
        for sequence in sequences(example):
            problem = _problem(sequence, plan.max_length)
            if problem is not None:
                raise ExampleError(f"example {index}: {problem}", index)


def check_vocabulary(examples: TrainingData, vocab_size: int) -> None:
    """Raises ExampleError for the first example with a token id that the model does not have."""
    for index, example in enumerate(examples):
        for sequence in sequences(example):
            if min(sequence.tokens) < 0 or max(sequence.tokens) >= vocab_size:
                raise ExampleError(f"example {index}: a token id is outside the vocabulary of {vocab_size}", index)


def _problem(sequence: Example, max_length: int) -> str | None:
    if len(sequence.tokens) != len(sequence.targets):
        return f"{len(sequence.tokens)} tokens but {len(sequence.targets)} targets"
    if len(sequence.tokens) > max_length:
        return f"{len(sequence.tokens)} tokens are more than max_length {max_length}"
    if not sequence.learnt:
        return "no token is learnt"
    return None


def digest(examples: TrainingData) -> str:
    """SHA-256 of all examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        for sequence in sequences(example):
            digest.update(repr((sequence.tokens, tuple(map(bool, sequence.targets)))).encode())
    return digest.hexdigest()
