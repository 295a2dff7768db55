"""A runner without a model: it keeps what was written to each slot of each block, and the next token is a hash of all
tokens that the block table reaches. So a wrong table, prefix hit, chunk or resumption gives wrong tokens. An adapter is
a folder with a number in a file: it is part of what is written, so another adapter's pages give wrong tokens too."""

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from token_logprobs import token_logprobs

from models.batch import (
    IN_FLIGHT,
    NO_ADAPTER,
    AdapterFacts,
    PromptLogprobs,
    SamplingParams,
    ScheduledSeq,
    ScoredRows,
    StepBatch,
    StepOutput,
)
from models.errors import AdapterError
from models.shared_runs import SharingLimits
from models.stages import Stages
from server.engine.config import EngineConfig
from server.engine.runner import CannotServeError, LoadedRunner

VOCAB_SIZE = 32_000
EOS = 0
NOTHING = -1  # never written
ADAPTER_STRIDE = 1_000_000  # an adapter's number times this is added to each of its tokens

WRITTEN = 1_700_000_000  # and its number: when an adapter's weights were

#: Files of an adapter's folder
KEY = "key"  # its number
GATE = "gate"  # the path of a file: reading waits until that is there

# Prompt tokens with an effect
NAN = 31_001  # the row's logits are not finite
RAISE = 31_002  # the step raises
OUT_OF_MEMORY = 31_003  # the step runs out of memory
DIE = 31_004  # the process is killed
REFUSED = 31_006  # the runner does not take the request
QUOTES = 31_007  # the answer mostly quotes the request's own tokens
LOST = 31_005  # the step raises, and the device is gone


class DeviceLostError(RuntimeError):
    pass


def next_token(token_ids: npt.ArrayLike, *, vocab_size: int = 31_000) -> int:
    """Never a token with an effect, rarely EOS."""
    ids = np.asarray(token_ids, dtype=np.int64)
    drawn = zlib.crc32(ids.tobytes())
    if drawn % 8 and (ids == QUOTES).any():
        places = np.flatnonzero(ids[:-1] == ids[-1]) + 1
        place = places[-1] if len(places) else drawn % len(ids)  # a quotation goes on, or begins
        return int(ids[place]) % vocab_size
    return drawn % vocab_size


def expected(prompt: Sequence[int], max_tokens: int, *, stop: Iterable[int] = (EOS,), adapter: int = 0) -> list[int]:
    """What a request alone, in one piece, without caches, would answer."""
    token_ids = list(prompt)
    stop = set(stop)
    for _ in range(max_tokens):
        token_ids.append(next_token(np.array(token_ids) + ADAPTER_STRIDE * adapter))
        if token_ids[-1] in stop:
            break
    return token_ids[len(prompt) :]


def score(seen: npt.ArrayLike, token: int) -> float:
    """The log-probability of a token of a prompt after those before it."""
    return -float(1 + zlib.crc32(np.append(np.asarray(seen, np.int64), token).tobytes()) % 1000)


def expected_scores(prompt: Sequence[int], *, adapter: int = 0) -> list[float]:
    """Of each of its tokens but the first."""
    seen = np.asarray(prompt, np.int64) + ADAPTER_STRIDE * adapter
    return [score(seen[:number], prompt[number]) for number in range(1, len(prompt))]


class FakeAdapters:
    """Slots of numbers."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.on_host: dict[int, int] = {}
        self.placed: dict[int, int] = {}  # slot -> the adapter's number
        self.history: list[tuple[int, int]] = []  # (slot, the adapter's number)
        self.fails_to_place: set[int] = set()

    def read(self, adapter_id: int, folder: str, within: str | None = None) -> AdapterFacts:
        place = Path(folder)
        if within is not None and not place.is_relative_to(within):
            raise AdapterError(f"{folder} is not in the folder that adapters may be loaded from")
        if not (place / KEY).exists():
            raise AdapterError(f"there is no folder {folder}")
        while (place / GATE).exists() and not Path((place / GATE).read_text()).exists():
            time.sleep(0.002)
        key = int((place / KEY).read_text())
        if key < 0:
            raise MemoryError
        self.on_host[adapter_id] = key
        return AdapterFacts(f"digest of {key}", 8, 1, None, WRITTEN + key)

    def place(self, adapter_id: int, slot: int) -> None:
        assert 0 <= slot < self.max_loras
        key = self.on_host[adapter_id]
        if key in self.fails_to_place:
            raise RuntimeError("injected")
        self.placed[slot] = key
        self.history.append((slot, key))

    def drop(self, adapter_id: int) -> None:
        del self.on_host[adapter_id]


def make_adapter(folder: Path, key: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / KEY).write_text(str(key))
    return str(folder)


class FakeStep:
    """A result that can be taken once."""

    def __init__(self, output: StepOutput) -> None:
        self._output: StepOutput | None = output

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None, "a step was collected twice"
        return output


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int, max_num_batched_tokens: int, max_loras: int = 0) -> None:
        self.adapters = FakeAdapters(max_loras) if max_loras else None
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kernels = {"full_attention": "fake"}
        self.sharing_limits: SharingLimits | None = SharingLimits(4, max_levels=2)
        self.memory = np.full((num_blocks, block_size), NOTHING, dtype=np.int64)
        self.slots: dict[int, SamplingParams] = {}
        self.lengths: dict[int, int] = {}  # tokens that a sampler with penalties would know
        self.sampled: dict[int, int] = {}  # by slot
        self.batches: list[StepBatch] = []
        self.keep_batches = False
        self.num_steps = 0
        self.num_shared_runs = 0
        self.num_scored = 0  # tokens of prompts
        self.lost = False
        self.memory_for: Callable[[StepBatch], bool] = bool

    def warm_up(self, *, all_graphs: bool = True) -> None:
        pass

    def add_request(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        assert slot not in self.slots, "slot added twice"
        if REFUSED in prompt_token_ids:
            raise ValueError("injected")
        assert prompt_token_ids
        self.slots[slot] = sampling
        self.lengths[slot] = len(prompt_token_ids)

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None:
        self.lengths[slot] += len(token_ids)

    def remove_request(self, slot: int) -> None:
        self.slots.pop(slot, None)
        self.sampled.pop(slot, None)

    def probe(self) -> None:
        if self.lost:
            raise DeviceLostError("the device is gone")

    def launch(self, batch: StepBatch) -> "FakeStep":
        return FakeStep(self._run(self._known(batch)))

    def _known(self, batch: StepBatch) -> StepBatch:
        """With the tokens that the step before sampled, in case the engine has not seen them."""
        seqs = [
            seq._replace(token_ids=[self.sampled[seq.slot], *seq.token_ids[1:]])
            if seq.token_ids[0] == IN_FLIGHT
            else seq
            for seq in batch.seqs
        ]
        return replace(batch, seqs=tuple(seqs))

    def _run(self, batch: StepBatch) -> StepOutput:
        self.num_steps += 1
        if self.keep_batches:
            self.batches.append(batch)
        assert batch.seqs
        lengths = [len(seq.token_ids) for seq in batch.seqs]
        assert sorted(lengths, key=lambda n: n != 1) == lengths, "one-token rows come first"
        assert sum(lengths) <= self.max_num_batched_tokens
        assert len({seq.slot for seq in batch.seqs}) == len(lengths)
        self._check_sharing(batch)
        self._trigger(batch)
        output = StepOutput([], [], [])
        for seq in batch.seqs:
            self._row(seq, output)
        for rows in batch.scored:
            output.prompt_logprobs.append(self._scores(batch.seqs[rows.seq], rows))
        return output

    def _scores(self, seq: ScheduledSeq, rows: ScoredRows) -> PromptLogprobs | None:
        """Alternatives are the next numbers, each as likely as the token."""
        assert 0 < len(rows.targets) <= len(seq.token_ids)
        self.num_scored += len(rows.targets)
        flat = self.memory[list(seq.block_ids)].reshape(-1)
        seen = [flat[: seq.num_computed + number] for number in range(1, len(rows.targets) + 1)]
        if NAN in seen[-1]:
            return None
        values = np.array([score(*pair) for pair in zip(seen, rows.targets, strict=True)], np.float32)
        ids = np.asarray(rows.targets, np.int32)[:, None] + np.arange(rows.num_top, dtype=np.int32)
        top = np.repeat(values, rows.num_top)
        ranks = np.ones(len(values), np.int32)
        return PromptLogprobs(rows.num_top, values.tobytes(), ranks.tobytes(), ids.tobytes(), top.tobytes())

    def _check_sharing(self, batch: StepBatch) -> None:
        decodes = [seq for seq in batch.seqs if len(seq.token_ids) == 1]
        for seqs, levels in (decodes, batch.sharing.decodes), (batch.seqs[len(decodes) :], batch.sharing.prefills):
            for run in (run for level in levels for run in level):
                self.num_shared_runs += 1
                assert run.end - run.first > 1
                assert len({tuple(seq.block_ids[: run.stop]) for seq in seqs[run.first : run.end]}) == 1
                assert all(seq.num_computed >= run.stop * self.block_size for seq in seqs[run.first : run.end])

    def _row(self, seq: ScheduledSeq, output: StepOutput) -> None:
        sampling = self.slots[seq.slot]
        size = self.block_size
        length = seq.num_computed + len(seq.token_ids)
        assert 0 not in seq.block_ids
        assert len(seq.block_ids) * size >= length
        first, last = seq.num_computed // size, -(-length // size)
        flat = self.memory[list(seq.block_ids[first:last])].reshape(-1)
        key = 0
        if seq.adapter_slot != NO_ADAPTER:
            assert self.adapters is not None
            key = self.adapters.placed[seq.adapter_slot]
        written = np.asarray(seq.token_ids, dtype=np.int64) + ADAPTER_STRIDE * key
        flat[seq.num_computed - first * size : length - first * size] = written
        self.memory[list(seq.block_ids[first:last])] = flat.reshape(-1, size)
        if not seq.sample:
            return
        length -= seq.num_drafts
        assert self.lengths[seq.slot] == length, "the sampler has not seen every generated token"
        drafts = list(seq.token_ids[len(seq.token_ids) - seq.num_drafts :])
        wanted = sampling.logprobs
        right = True
        for number in range(seq.num_drafts + 1):
            seen = self.memory[list(seq.block_ids[:last])].reshape(-1)[: length + number]
            token = next_token(seen)
            output.token_ids.append(token)
            output.logprobs.append(None if wanted is None else token_logprobs(-0.5, [(token, -0.5)] * wanted))
            output.finite.append(NAN not in seen)
            self.lengths[seq.slot] += right
            right = right and [token] == drafts[number : number + 1]
        if seq.num_drafts:
            self.sampled.pop(seq.slot, None)  # nobody knows yet which is right
        else:
            self.sampled[seq.slot] = token

    def _trigger(self, batch: StepBatch) -> None:
        found = {token for seq in batch.seqs for token in seq.token_ids if token > 31_000}
        if DIE in found:
            os.kill(os.getpid(), signal.SIGKILL)
        if OUT_OF_MEMORY in found or not self.memory_for(batch):
            raise MemoryError
        if LOST in found:
            self.lost = True
        if RAISE in found or self.lost:
            raise RuntimeError("injected")


def load(config: EngineConfig, _stages: Stages) -> LoadedRunner:
    """The factory for EngineConfig.runner; `model` may name how loading fails, or a file with the number of blocks for
    which there is memory."""
    if config.model == "missing":
        raise FileNotFoundError("no such model")
    if config.model == "refused":
        raise CannotServeError("this model has no attention")
    runner = FakeRunner(
        config.num_gpu_blocks_override or _measured_blocks(config.model),
        config.block_size,
        config.step_tokens("cpu"),
        config.max_loras if config.enable_lora else 0,
    )
    return LoadedRunner(
        runner=runner,
        model=config.model,
        device="cpu",
        dtype="float32",
        max_model_len=config.max_model_len or 4096,
        max_num_batched_tokens=config.step_tokens("cpu"),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        probe=runner.probe,
    )


def _measured_blocks(model: str) -> int:
    return int(Path(model).read_text()) if Path(model).is_file() else 256
