"""A step's sequences as arrays on the host: one entry a sequence, or one a token. Knows no device and no model."""

from dataclasses import dataclass

import numpy as np

from models.batch import StepBatch
from models.shared_runs import StepSharing

#: Rows of a prompt that take longer to compute over shared keys than these take to read.
MANY_ROWS = 32


@dataclass(frozen=True, slots=True)
class StepRows:
    """A batch as arrays, one entry a sequence: int64, `sampled` bool, `adapters` int32."""

    slots: np.ndarray
    lengths: np.ndarray  # new tokens
    computed: np.ndarray  # tokens in the cache before
    sampled: np.ndarray
    drafts: np.ndarray  # guesses among the new tokens, at their end
    adapters: np.ndarray
    first_tokens: np.ndarray  # the first new token's id, or IN_FLIGHT

    @classmethod
    def of(cls, batch: StepBatch) -> "StepRows":
        count = len(batch.seqs)
        slots, token_ids, computed, _, sampled, adapters, drafts = zip(*batch.seqs, strict=True)  # as they are declared
        return cls(
            slots=np.fromiter(slots, np.int64, count),
            lengths=np.fromiter(map(len, token_ids), np.int64, count),
            computed=np.fromiter(computed, np.int64, count),
            sampled=np.fromiter(sampled, np.bool_, count),
            drafts=np.fromiter(drafts, np.int64, count),
            adapters=np.fromiter(adapters, np.int32, count),
            first_tokens=np.fromiter((ids[0] for ids in token_ids), np.int64, count),
        )

    @property
    def totals(self) -> np.ndarray:
        return self.computed + self.lengths

    @property
    def num_decodes(self) -> int:
        """Sequences with one token, which come first."""
        longer = self.lengths != 1
        return int(np.argmax(longer)) if longer.any() else len(longer)

    @property
    def num_samples(self) -> int:
        return int((self.drafts + 1)[self.sampled].sum())

    def samples_alone(self, sharing: StepSharing) -> bool:
        """Whether the last layer's attention had better be of the sampled rows alone, as sequences of one row: whose
        keys are stored needs no more of that layer. Each then reads its own pages, whatever sequences share."""
        rows, decodes, count = int(self.lengths.sum()), self.num_decodes, len(self.lengths)
        few = rows - decodes < (count - decodes) * MANY_ROWS
        return not sharing.decodes and not (sharing.prefills and few) and 2 * self.num_samples < rows


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What a forward is told of every token, int64, and of what is sampled."""

    token_ids: np.ndarray  # [num_tokens]; IN_FLIGHT where only the device knows
    positions: np.ndarray  # [num_tokens]
    slot_mapping: np.ndarray  # [num_tokens]
    row_slots: np.ndarray  # [num_tokens]
    ends: np.ndarray  # [num_seqs]: one past a sequence's last token
    sample_rows: np.ndarray  # [num_samples]: tokens whose logits are wanted

    @property
    def sample_slots(self) -> np.ndarray:
        return self.row_slots[self.sample_rows]

    @property
    def sample_positions(self) -> np.ndarray:
        """Where the sampled tokens will stand."""
        return self.positions[self.sample_rows] + 1
