"""The flat tensors of a step against a naive construction, token by token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.batch import IN_FLIGHT, ScheduledSeq, StepBatch
from models.inputs import StepInputs, StepTensors
from models.shared_runs import SharedRun, StepSharing

MAX_SEQS = 6
MAX_TOKENS = 200
MAX_BLOCKS = 40


def _inputs(block_size: int, device: str = "cpu", sample_sizes: tuple[int, ...] = ()) -> StepInputs:
    return StepInputs(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_blocks_per_seq=MAX_BLOCKS,
        block_size=block_size,
        device=torch.device(device),
        sample_sizes=sample_sizes,
    )


def _check(step: StepTensors, batch: StepBatch, block_size: int, *, alone: bool = True) -> None:
    ids, positions, slot_mapping, cu_seqlens = [], [], [], [0]
    sample_rows: list[int] = []
    for seq in batch.seqs:
        for i, token in enumerate(seq.token_ids):
            position = seq.num_computed + i
            ids.append(token)
            positions.append(position)
            slot_mapping.append(seq.block_ids[position // block_size] * block_size + position % block_size)
        cu_seqlens.append(len(ids))
        if seq.sample:
            sample_rows += range(len(ids) - 1 - seq.num_drafts, len(ids))
    totals = [seq.num_computed + len(seq.token_ids) for seq in batch.seqs]
    meta = step.metadata
    assert step.input_ids.tolist() == [ids]
    assert step.position_ids.tolist() == [positions]
    assert meta.slot_mapping.tolist() == slot_mapping
    assert meta.cu_seqlens_q.tolist() == cu_seqlens
    assert meta.seq_lens.tolist() == totals
    assert step.sample_rows.tolist() == sample_rows
    slots = [seq.slot for seq in batch.seqs if seq.sample for _ in range(seq.num_drafts + 1)]
    assert step.sample_slots.tolist() == step.sample_slots_on_device.tolist() == slots
    assert step.sample_positions.tolist() == [positions[row] + 1 for row in sample_rows]
    alone &= 2 * len(sample_rows) < len(ids)
    assert (step.sampled is not None) == alone
    if step.sampled is not None:
        tables = {seq.slot: row for seq, row in zip(batch.seqs, meta.block_table.tolist(), strict=True)}
        assert step.sampled.seq_lens.tolist() == [positions[row] + 1 for row in sample_rows]
        assert step.sampled.block_table.tolist() == [tables[slot] for slot in slots]
        assert step.sampled.num_decodes == step.sampled.num_seqs == len(step.sampled.slot_mapping) == len(slots)
    for row, seq, total in zip(meta.block_table.tolist(), batch.seqs, totals, strict=True):
        used = -(-total // block_size)
        assert row[:used] == list(seq.block_ids[:used])
    assert meta.max_seqlen_q == max(len(seq.token_ids) for seq in batch.seqs)
    assert meta.max_seqlen_k == max(totals)
    lengths = [len(seq.token_ids) for seq in batch.seqs]
    assert lengths[: meta.num_decodes] == [1] * meta.num_decodes
    assert 1 not in lengths[meta.num_decodes : meta.num_decodes + 1]
    assert meta.cu_seqlens_q.dtype == meta.seq_lens.dtype == meta.block_table.dtype == torch.int32
    assert step.input_ids.dtype == step.position_ids.dtype == meta.slot_mapping.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tensors_equal_a_naive_construction_over_many_steps(data: st.DataObject) -> None:
    """Slots come, go on, are interrupted, restarted with other blocks and reused; the tables must follow."""
    block_size = data.draw(st.sampled_from([4, 16]))
    inputs = _inputs(block_size)
    computed: dict[int, int] = {}
    blocks: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        slots = data.draw(st.lists(st.integers(0, MAX_SEQS - 1), min_size=1, max_size=MAX_SEQS, unique=True))
        seqs = []
        for slot in slots:
            if slot not in computed or data.draw(st.booleans()) or computed[slot] > 100:
                if data.draw(st.booleans()):
                    inputs.forget(slot)
                    computed[slot] = data.draw(st.integers(0, 30))  # a prefix hit
                else:
                    computed[slot] = 0
                blocks[slot] = []
                inputs.forget(slot)
            new = data.draw(st.one_of(st.just(1), st.integers(1, 30)))
            tokens = data.draw(st.lists(st.integers(0, 50_000), min_size=new, max_size=new))
            needed = -(-(computed[slot] + new) // block_size) + data.draw(st.integers(0, 1))
            while len(blocks[slot]) < needed:
                blocks[slot].append(data.draw(st.integers(1, 9999)))
            samples = data.draw(st.booleans())
            drafts = data.draw(st.integers(0, new - 1)) if samples else 0
            table = list(blocks[slot])
            seqs.append(ScheduledSeq(slot, tokens, computed[slot], table, samples, num_drafts=drafts))
            computed[slot] += new - data.draw(st.integers(0, drafts))  # wrong drafts are computed over
        seqs.sort(key=lambda seq: len(seq.token_ids) > 1)
        batch = StepBatch(tuple(seqs))
        _check(inputs.build(batch), batch, block_size)


def test_a_restarted_sequence_gets_its_new_blocks_without_being_forgotten() -> None:
    inputs = _inputs(4)
    for num_computed, block_ids in ((0, [7, 8]), (0, [3, 4])):
        batch = StepBatch((ScheduledSeq(0, [1] * 8, num_computed, block_ids, True),))
        _check(inputs.build(batch), batch, 4)


def test_a_token_in_flight_may_stand_before_drafts() -> None:
    inputs = _inputs(16)
    inputs.note(torch.tensor([0, 2]), torch.tensor([70, 72]))
    seqs = (
        ScheduledSeq(1, [5], 9, [1], True),
        ScheduledSeq(2, [IN_FLIGHT], 3, [2], True),
        ScheduledSeq(0, [IN_FLIGHT, 6, 7], 4, [3], True, num_drafts=2),
        ScheduledSeq(3, [8, 9], 0, [4], True),
    )
    assert inputs.build(StepBatch(seqs)).input_ids.tolist() == [[5, 72, 70, 6, 7, 8, 9]]


@pytest.mark.parametrize(("rows", "padded"), [(40, 4), (4, 4), (3, 2)], ids=["alone", "among all", "too few rows"])
def test_samples_are_padded_with_rows_that_see_nothing(rows: int, padded: int) -> None:
    inputs = _inputs(16, sample_sizes=(1, 4, 8))
    seqs = (ScheduledSeq(3, [5], 9, [7], True), ScheduledSeq(1, [6] * (rows - 1), 0, [8, 9, 10], True))
    step = inputs.build(StepBatch(seqs))
    _check(replace(step, sample_rows=step.sample_rows[:2], sampled=None), StepBatch(seqs), 16, alone=False)
    assert step.sample_rows.tolist() == [0, rows - 1] + [0] * (padded - 2)
    if rows == 40:
        assert step.sampled is not None
        assert step.sampled.seq_lens.tolist() == [10, 39, 0, 0]
        assert step.sampled.block_table.tolist() == [[7, 0, 0], [8, 9, 10], [0, 0, 0], [0, 0, 0]]


def test_a_step_larger_than_the_limits_is_refused() -> None:
    batch = StepBatch((ScheduledSeq(0, [1] * (MAX_TOKENS + 1), 0, list(range(1, 14)), True),))
    with pytest.raises(ValueError, match=r"201 tokens in 1 sequences"):
        _inputs(16).build(batch)


@pytest.mark.gpu
def test_a_busy_gpu_gets_every_step_as_it_was_built() -> None:
    """Steps that sample nothing (chunks of a long prompt) follow each other without a wait for the device."""
    inputs = _inputs(16, "cuda:0")
    batches = [
        StepBatch((ScheduledSeq(0, [100 * step + i for i in range(20)], 20 * step, [1, 2, 3, 4, 5, 6, 7], False),))
        for step in range(4)
    ]
    torch.cuda._sleep(1_000_000_000)  # the copies stand in line behind it
    steps = [inputs.build(batch) for batch in batches]
    for step, batch in zip(steps, batches, strict=True):
        _check(step, batch, 16)


def test_short_contexts_have_the_shapes_of_the_long_ones() -> None:
    """What a rehearsal runs: every sequence sees its own tokens and no more than one key before them."""
    seqs = (ScheduledSeq(0, [5], 300, list(range(1, 20)), True), ScheduledSeq(1, [7] * 30, 0, [20, 21], True),
            ScheduledSeq(2, [9] * 12, 200, list(range(22, 36)), True))  # fmt: skip
    step = _inputs(16).build(StepBatch(seqs))
    short = step.with_short_contexts()
    assert short.metadata.seq_lens.tolist() == [2, 30, 13]
    assert short.metadata.seq_lens.dtype == torch.int32
    assert short.metadata.block_table.shape == step.metadata.block_table.shape == (3, 19)
    assert short.metadata.max_seqlen_k == step.metadata.max_seqlen_k == 301
    assert torch.equal(short.position_ids, step.position_ids)
    assert step.sampled is not None
    assert short.sampled is not None
    assert step.sampled.seq_lens.tolist() == [301, 30, 212]
    assert short.sampled.seq_lens.tolist() == [31, 30, 31]


PROMPTS = (ScheduledSeq(0, [5], 64, list(range(1, 20)), True), ScheduledSeq(1, [7] * 40, 64, list(range(1, 20)), True),
           ScheduledSeq(2, [9] * 40, 64, list(range(1, 20)), True))  # fmt: skip
SHARED = ((SharedRun(0, 2, 0, 4),),)


@pytest.mark.parametrize(
    ("batch", "alone"),
    [
        (StepBatch(PROMPTS), True),
        (StepBatch(PROMPTS, StepSharing(prefills=SHARED)), True),
        (
            StepBatch(tuple(s._replace(token_ids=s.token_ids[:31]) for s in PROMPTS), StepSharing(prefills=SHARED)),
            False,
        ),
        (StepBatch((PROMPTS[0]._replace(slot=3), *PROMPTS), StepSharing(decodes=SHARED)), False),
        (StepBatch((*PROMPTS[:2], PROMPTS[2]._replace(adapter_slot=0))), False),
        (StepBatch((PROMPTS[1]._replace(num_drafts=39),)), False),
    ],
    ids=["prompts", "sharing pages", "few rows that share", "decodes that share", "an adapter", "drafts"],
)
def test_samples_are_sequences_of_their_own_where_that_saves_rows(batch: StepBatch, alone: bool) -> None:
    assert (_inputs(16).build(batch).sampled is not None) == alone
