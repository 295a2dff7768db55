"""The tensors of a recorded step, on a CPU: a step in a shape with padding computes what the step alone does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import as_loaded, random_model, tiny_config

from attention_backend.heuristics.layer_chain import MOST_KEYS, MOST_ROWS
from models.batch import IN_FLIGHT, ScheduledSeq, StepBatch
from models.graph_fields import StepFields, num_bytes, step_tensors
from models.runner import ModelRunner
from models.step_rows import StepRows
from models.step_shapes import StepNeeds, StepShape, chunk_shapes, decode_shapes, draft_shapes

MAX_SEQS, MAX_TOKENS, MAX_LEN, BLOCK = 6, 192, 256, 16
SHAPES = sorted(
    [*decode_shapes(MAX_SEQS, MOST_KEYS + 1), *draft_shapes(MAX_SEQS, 3), *chunk_shapes(MAX_SEQS, MAX_TOKENS)]
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    made = ModelRunner(
        as_loaded(random_model(tiny_config())), block_size=BLOCK, max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, num_blocks=1 + MAX_SEQS * MAX_LEN // BLOCK,
    )  # fmt: skip
    for pages in made._kv_caches:
        pages.k[1:].normal_(generator=torch.Generator().manual_seed(1))
        pages.v[1:].normal_(generator=torch.Generator().manual_seed(2))
    return made


def sequence(slot: int, computed: int, count: int, drafts: int | None, *, in_flight: bool = False) -> ScheduledSeq:
    per_slot = MAX_LEN // BLOCK
    blocks = [1 + slot * per_slot + i for i in range(-(-(computed + count) // BLOCK))]
    ids = [(7 * slot + 3 * i + computed) % 100 + 3 for i in range(count)]
    if in_flight:
        ids[0] = IN_FLIGHT
    return ScheduledSeq(slot, ids, computed, blocks, drafts is not None, num_drafts=drafts or 0)


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    """Decodes, some with drafts, or chunks of prompts, or both."""
    slots = draw(st.permutations(range(MAX_SEQS)))[: draw(st.integers(1, MAX_SEQS))]
    kind = draw(st.sampled_from(["decodes", "drafts", "chunks"]))
    seqs = []
    for slot in slots:
        computed = draw(st.integers(0, 100))
        if kind == "decodes" or draw(st.booleans()):
            seqs.append(sequence(slot, computed, 1, 0, in_flight=draw(st.booleans())))
        elif kind == "drafts":
            count = draw(st.integers(2, 4))
            seqs.append(sequence(slot, computed, count, count - 1))
        else:
            seqs.append(sequence(slot, computed, draw(st.integers(2, 60)), draw(st.sampled_from([None, 0]))))
    return StepBatch(tuple(sorted(seqs, key=lambda seq: len(seq.token_ids) > 1)))


@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_every_shape_that_fits_gives_the_logits_of_the_step_alone(runner: ModelRunner, batch: StepBatch) -> None:
    rows = StepRows.of(batch)
    inputs = runner._inputs
    inputs.last_tokens[:] = torch.arange(len(inputs.last_tokens)) + 11
    fitting = [shape for shape in SHAPES if shape.fits(StepNeeds.of(rows))]
    with torch.inference_mode():
        if rows.lengths.sum() > MAX_TOKENS:
            assert not fitting
            return
        step = inputs.build(batch, rows)
        want = runner._logits(step, False).clone()
        torch.testing.assert_close(want, runner._logits(step, True)[step.sample_rows], rtol=1e-4, atol=1e-4)
        slots, positions = step.sample_slots, step.sample_positions
        for shape in fitting:
            buffer = torch.randint(0, 255, (num_bytes(shape),), dtype=torch.uint8)
            fields = StepFields.of(buffer, shape)
            arrays = inputs.arrays(batch, rows)
            count = len(arrays.sample_rows)
            temperature, keys = np.full(count, 0.5, np.float32), np.full((count, 2), 9, np.int32)
            fields.fill(shape, arrays, rows, temperature, keys, padding_slot=inputs.tables.padding_slot)
            step = step_tensors(fields, shape, inputs, max_model_len=MAX_LEN)
            logits = runner._logits(step, shape.only_decodes)
            assert logits.shape[0] == shape.samples
            assert torch.isfinite(logits).all()  # of padding, too: nothing of it may reach others
            torch.testing.assert_close(logits[:count], want, rtol=1e-4, atol=1e-4)
            assert step.sample_slots_on_device[:count].tolist() == slots.tolist() == arrays.sample_slots.tolist()
            assert positions.tolist() == arrays.sample_positions.tolist()
            assert fields.temperature.tolist() == [0.5] * count + [0.0] * (shape.samples - count)
    assert fitting or rows.drafts.any()  # drafts of most sequences find no shape if there are more than DRAFTING says


def test_padding_stores_nothing_and_reads_the_padding_page(runner: ModelRunner) -> None:
    """Block 0 and everybody's pages stay what they were."""
    inputs = runner._inputs
    batch = StepBatch((sequence(0, 30, 1, 0), sequence(1, 0, 50, 0)))
    rows = StepRows.of(batch)
    inputs.update_tables(batch, rows)
    shape = StepShape(128, 6, 16, 128, 22)
    fields = StepFields.of(torch.zeros(num_bytes(shape), dtype=torch.uint8), shape)
    arrays = inputs.arrays(batch, rows)
    fields.fill(
        shape, arrays, rows, np.ones(2, np.float32), np.ones((2, 2), np.int32), padding_slot=inputs.tables.padding_slot
    )
    before = [(pages.k.clone(), pages.v.clone()) for pages in runner._kv_caches]
    with torch.inference_mode():
        runner._logits(step_tensors(fields, shape, inputs, max_model_len=MAX_LEN), False)
    stored = np.unique(arrays.slot_mapping // BLOCK)
    for (k, v), pages in zip(before, runner._kv_caches, strict=True):
        for old, new in ((k, pages.k), (v, pages.v)):
            changed = (old != new).flatten(1).any(dim=1).nonzero().flatten().numpy()
            assert set(changed) <= set(stored)
            assert not new[0].any()


def shapes_for(*counts: tuple[int, int | None], computed: int = 40) -> StepShape | None:
    """The smallest shape for sequences of (rows, drafts)."""
    batch = StepBatch(tuple(sequence(slot, computed, count, drafts) for slot, (count, drafts) in enumerate(counts)))
    return next((shape for shape in SHAPES if shape.fits(StepNeeds.of(StepRows.of(batch)))), None)


def test_a_step_runs_in_the_smallest_shape_of_its_kind() -> None:
    assert shapes_for((1, 0)) == StepShape(1, 1, 0, 0, 1, any_length=False)
    assert shapes_for(*[(1, 0)] * MOST_ROWS) == StepShape(MOST_ROWS, MOST_ROWS, 0, 0, MOST_ROWS, any_length=False)
    assert shapes_for(*[(1, 0)] * (MOST_ROWS + 1)) == StepShape(6, 6, 0, 0, 6)
    assert shapes_for((1, 0), (1, 0), (1, 0), (1, 0), (1, 0)) == StepShape(6, 6, 0, 0, 6)
    assert shapes_for((4, 3)) == StepShape(4, 0, 2, 4, 4, few_rows=True)
    assert shapes_for((1, 0), (3, 2)) == StepShape(4, 0, 2, 4, 4, few_rows=True)
    assert shapes_for((1, 0), (4, 3)) == StepShape(8, 0, 4, 4, 8, few_rows=True)
    assert shapes_for((64, None)) == StepShape(64, 0, 16, 64, 16)
    assert shapes_for((1, 0), (64, 0)) == StepShape(128, 6, 16, 128, 22)
    assert shapes_for((120, 0), (80, 0)) is None
    assert shapes_for((1, 0), (100, None), (70, 0)) == StepShape(192, 6, 3, 192, 9), "a long prompt's, another, padding"
    assert shapes_for((100, None), (70, 0), (20, 0)) == StepShape(192, 0, 16, 192, 16)
    assert shapes_for((100, None), (70, 0), (22, 0)) == StepShape(192, 0, 3, 192, 3), "no padding"
    assert [(shape.rows, shape.decodes) for shape in chunk_shapes(300, 200)] == [
        (64, 0), (64, 64), (128, 0), (128, 64), (128, 128), (192, 0), (192, 0), (192, 64), (192, 64), (192, 192)
    ]  # fmt: skip
    assert draft_shapes(64, 0) == []
    assert all(shape.any_length for shape in decode_shapes(MAX_SEQS, MOST_KEYS))


@pytest.mark.parametrize("keys", [1, MOST_KEYS, MOST_KEYS + 1])
def test_few_rows_of_few_keys_have_graphs_of_their_own(keys: int) -> None:
    batch = StepBatch((ScheduledSeq(0, [3], keys - 1, [1], True), ScheduledSeq(1, [3], 0, [2], True)))
    needs = StepNeeds.of(StepRows.of(batch))
    found = next(shape for shape in SHAPES if shape.fits(needs))
    assert found == StepShape(2, 2, 0, 0, 2, any_length=keys > MOST_KEYS)


def test_sixteen_prompts_at_once_are_too_many_where_padding_is_needed() -> None:
    shape = StepShape(64, 0, 16, 64, 16)
    exact = StepBatch(tuple(ScheduledSeq(slot, [3] * 4, 0, [slot], True) for slot in range(16)))
    padded = StepBatch(tuple(ScheduledSeq(slot, [3] * 3, 0, [slot], True) for slot in range(16)))
    assert shape.fits(StepNeeds.of(StepRows.of(exact)))
    assert not shape.fits(StepNeeds.of(StepRows.of(padded)))
