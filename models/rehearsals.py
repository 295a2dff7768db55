"""Steps of sequences that nobody asked for, run before anybody is served: they compile what steps need, and show how
much memory the largest take. Knows no weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from models.batch import NO_ADAPTER, ScheduledSeq, StepBatch
from models.shared_runs import SharedRun, StepSharing

#: A rehearsal on a CPU only has to touch everything once: there is nothing to compile there, and no memory to measure.
_CPU_TOKENS = 32
#: Keys before the rows of a step of many. The memory that such a step takes hardly grows with more of them, its time
#: does: 8,192 rows of an 8B model after 122,880 keys are half a second.
_CONTEXT = 16_384
#: Few rows are served by a decode kernel, compiled for different numbers of them (parts of short prompts, prefix hits).
_SHORT = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Rehearsals:
    """Of one runner. All block tables name the padding page."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    on_gpu: bool
    shares: bool  # steps may name pages that sequences share
    copied_pages: int = 0  # so many of several sequences are copied at once, and of one all that it has
    adapter_slot: int = NO_ADAPTER

    def steps(self) -> Iterator[StepBatch]:
        """The one that takes most memory first."""
        yield self._largest_prefill()
        if self.on_gpu:
            for length in _SHORT:
                if length <= min(self.max_num_batched_tokens, self.max_model_len):
                    yield StepBatch((self._sequence(0, length, 0),))
                fits = 2 * length <= self.max_num_batched_tokens and self.max_model_len >= self.block_size + length
                if self.shares and self.max_num_seqs > 1 and fits:
                    yield self._shared_prefill(length)
        yield self._full_decode()

    def _largest_prefill(self) -> StepBatch:
        """max_num_batched_tokens new tokens, each sequence at the end of a long context. Where pages are copied, it has
        as many sequences as have all that are copied at once: the last ones bring one token."""
        left = self.max_num_batched_tokens if self.on_gpu else min(self.max_num_batched_tokens, _CPU_TOKENS)
        count, keys = 1, _CONTEXT + self.max_num_batched_tokens
        if self.copied_pages:
            count = min(-(-self.copied_pages // self._blocks(self.max_model_len)), self.max_num_seqs, left)
            keys = self.copied_pages // count * self.block_size if count > 1 else self.max_model_len
        seqs: list[ScheduledSeq] = []
        while left and len(seqs) < self.max_num_seqs:
            new = min(left - max(0, count - len(seqs) - 1), self.max_model_len)
            seqs.append(self._sequence(len(seqs), new, self._context(new, max(0, keys - new))))
            left -= new
        return StepBatch(tuple(seqs))

    def _shared_prefill(self, rows: int) -> StepBatch:
        """The ends of two prompts, after the same pages."""
        shared = (self.max_model_len - rows) // self.block_size
        seqs = tuple(self._sequence(slot, rows, shared * self.block_size) for slot in (0, 1))
        return StepBatch(seqs, StepSharing(prefills=((SharedRun(0, 2, 0, shared),),)))

    def _full_decode(self) -> StepBatch:
        """One token of as many sequences as there may be, each at the end of a long context."""
        num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens) if self.on_gpu else 1
        computed = max(1, self._context(1, self.max_model_len if self.copied_pages else _CONTEXT))
        return StepBatch(tuple(self._sequence(slot, 1, computed) for slot in range(num_seqs)))

    def _context(self, new: int, most: int) -> int:
        """Keys before `new` tokens."""
        return min(self.max_model_len - new, most) if self.on_gpu else 0

    def _sequence(self, slot: int, new: int, computed: int) -> ScheduledSeq:
        blocks = [0] * self._blocks(computed + new)
        return ScheduledSeq(slot, [0] * new, computed, blocks, sample=True, adapter_slot=self.adapter_slot)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
