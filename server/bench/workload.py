"""What is asked: conversations of one or several turns, token-exact. Knows no server, no time, no text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from server.bench.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt` is token ids, or a text that a tokenizer encodes to exactly `prompt_tokens`."""

    prompt: list[int] | str
    prompt_tokens: int
    max_tokens: int


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """`count` conversations of `num_turns` requests. All of them begin with the same `prefix_len` tokens; each turn
    asks `input` new tokens after everything before it. In place of a real answer the next turn repeats as many random
    tokens as were asked for: lengths stay exact, and prefix caches find the earlier prompts but not the answers."""

    count: int
    input: Lengths
    output: Lengths
    prefix_len: int = 0
    num_turns: int = 1

    def conversations(self, vocabulary: Sequence[int], generator: random.Random) -> list[Conversation]:
        prefix = draw_tokens(vocabulary, self.prefix_len, generator)
        return [self._conversation(prefix, vocabulary, generator) for _ in range(self.count)]

    def _conversation(self, prefix: list[int], vocabulary: Sequence[int], generator: random.Random) -> Conversation:
        turns, history = [], prefix
        for _ in range(self.num_turns):
            prompt = history + draw_tokens(vocabulary, self.input.draw(generator), generator)
            out = self.output.draw(generator)
            turns.append(Turn(prompt, len(prompt), out))
            history = prompt + draw_tokens(vocabulary, out, generator)
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class SharedDocuments:
    """`count` questions of `suffix` own tokens on `num_documents` documents of `document_len` tokens, in turn: what
    vLLM's benchmark calls prefix repetition."""

    count: int
    num_documents: int
    document_len: int
    suffix: Lengths
    output: Lengths

    def conversations(self, vocabulary: Sequence[int], generator: random.Random) -> list[Conversation]:
        documents = [draw_tokens(vocabulary, self.document_len, generator) for _ in range(self.num_documents)]
        questions: list[Conversation] = []
        for number in range(self.count):
            own = draw_tokens(vocabulary, self.suffix.draw(generator), generator)
            prompt = documents[number % self.num_documents] + own
            questions.append((Turn(prompt, len(prompt), self.output.draw(generator)),))
        return questions


Workload = RandomPrompts | SharedDocuments


def draw_tokens(vocabulary: Sequence[int], count: int, generator: random.Random) -> list[int]:
    return generator.choices(vocabulary, k=count)
