"""The groups of a recorded step, on a CPU: whatever was shared in the replay before, a step in any shape with padding
computes what the step alone does."""

import numpy as np
import pytest
import torch
from tiny_models import as_loaded, random_model, tiny_config

from models import recorded_groups
from models.batch import ScheduledSeq, StepBatch
from models.graph_fields import StepFields, num_bytes, step_tensors
from models.recorded_groups import RecordedGroups
from models.runner import ModelRunner
from models.shared_runs import Levels, SharedRun
from models.step_rows import StepRows
from models.step_shapes import CHUNKS, GraphKey, StepNeeds, chunk_shapes, decode_shapes, sharing_keys

MAX_SEQS, MAX_TOKENS, MAX_LEN, BLOCK = 12, 192, 256, 16
KEYS = sharing_keys([*decode_shapes(MAX_SEQS), *chunk_shapes(MAX_SEQS, MAX_TOKENS)], 2)
SHARED = list(range(1, 9))  # blocks that all sequences begin with
SHARINGS: dict[str, Levels] = {
    "documents": ((SharedRun(0, 5, 0, 3),), (SharedRun(0, 2, 3, 8), SharedRun(2, 5, 3, 7))),
    "one": ((SharedRun(0, 4, 0, 8),),),
    "nothing": (),
    "one of them": ((SharedRun(0, 3, 0, 2), SharedRun(3, 5, 0, 8)), (SharedRun(1, 3, 2, 6),)),
}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    made = ModelRunner(
        as_loaded(random_model(tiny_config())), block_size=BLOCK, max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, num_blocks=60,
    )  # fmt: skip
    for pages in made._kv_caches:
        pages.k[1:].normal_(generator=torch.Generator().manual_seed(1))
        pages.v[1:].normal_(generator=torch.Generator().manual_seed(2))
    return made


def decodes_and(chunk: int) -> StepBatch:
    """Five decodes, and a prompt's piece of `chunk` tokens."""
    seqs = [ScheduledSeq(s, [7 + s], 128 + 3 * s, [*SHARED, 20 + 2 * s, 21 + 2 * s], True) for s in range(5)]
    if chunk:
        seqs.append(ScheduledSeq(5, list(range(3, 3 + chunk)), 30, list(range(40, 50)), True))
    return StepBatch(tuple(seqs))


@pytest.mark.parametrize("chunk", [0, 60])
@pytest.mark.parametrize("num_levels", [1, 2])
def test_replays_follow_what_decodes_share_in_every_shape(runner: ModelRunner, chunk: int, num_levels: int) -> None:
    batch = decodes_and(chunk)
    rows, inputs = StepRows.of(batch), runner._inputs
    sharings = [levels for levels in SHARINGS.values() if len(levels) <= num_levels]
    fitting = [key.shape for key in KEYS if key.levels == num_levels and key.shape.fits(StepNeeds.of(rows))]
    assert len(fitting) > 1
    with torch.inference_mode():
        want = runner._logits(inputs.build(batch, rows), False).clone()
        for shape in fitting:
            fields = StepFields.of(torch.zeros(num_bytes(shape), dtype=torch.uint8), shape)
            count = len(batch.seqs)
            temperature, keys = np.ones(count, np.float32), np.ones((count, 2), np.int32)
            padding_slot = inputs.tables.padding_slot
            fields.fill(shape, inputs.arrays(batch, rows), rows, temperature, keys, padding_slot=padding_slot)
            step = step_tensors(fields, shape, inputs, max_model_len=MAX_LEN)
            groups = RecordedGroups(inputs, shape.decodes, num_levels, torch.device("cpu"))
            found: dict[Levels, torch.Tensor] = {}
            for levels in [*sharings, *reversed(sharings)]:
                groups.write(levels)
                logits = runner._logits(groups.shared_by(step), shape.only_decodes)[:count].clone()
                torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
                assert torch.equal(found.setdefault(levels, logits), logits)
            # Other sums: so what was written was read.
            assert len({tuple(logits.flatten().tolist()) for logits in found.values()}) == len(sharings)


def test_groups_that_were_not_written_whole_are_written_again(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    groups = RecordedGroups(runner._inputs, 8, 2, cpu)
    copies = 0

    def one_copy(array: np.ndarray, device: torch.device) -> torch.Tensor:
        nonlocal copies
        copies += 1
        if copies == 2:
            raise torch.OutOfMemoryError
        return torch.from_numpy(array).to(device)

    monkeypatch.setattr(recorded_groups, "to_device", one_copy)
    with pytest.raises(torch.OutOfMemoryError):
        groups.write(SHARINGS["documents"])
    for _ in range(2):  # again, and then not
        groups.write(())
    assert copies == 4
    assert not groups._groups[:, 2].any()
    assert not groups._own_starts.any()


def test_more_levels_than_were_recorded_are_refused(runner: ModelRunner) -> None:
    groups = RecordedGroups(runner._inputs, 8, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="do not fit 1 levels"):
        groups.write(SHARINGS["documents"])


def test_keys_are_few() -> None:
    """One more for prefixes within prefixes where there is one for prefixes, but for every other of the small sizes."""
    shapes = [*decode_shapes(256), *chunk_shapes(256, 8192)]
    assert sharing_keys(shapes, 0) == []
    one, two = sharing_keys(shapes, 1), [key for key in sharing_keys(shapes, 2) if key.levels == 2]
    assert [key for key in sharing_keys(shapes, 2) if key.levels == 1] == one
    assert {key.shape for key in two} <= {key.shape for key in one}
    sizes = [[key.shape.rows for key in keys if key.shape.only_decodes] for keys in (one, two)]
    assert sizes[0] == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert sizes[1] == [4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert len(two) - len(sizes[1]) == len(one) - len(sizes[0]) == len(CHUNKS)  # beside prompts
    few = [key for key in sharing_keys([*decode_shapes(64), *chunk_shapes(64, 8192)], 1) if not key.shape.only_decodes]
    assert [key.shape.rows for key in few] == list(CHUNKS), "none more for few prompts"
    assert [key.shape.rows for key in sharing_keys(decode_shapes(3), 2) if key.levels == 2] == [3]
    assert GraphKey(decode_shapes(3)[0]) not in sharing_keys(decode_shapes(3), 2)
