"""Small arrays on their way to a GPU and back: steps find the pinned memory that they want."""

import pytest
import torch
from batch_driver import generate
from tiny_models import as_loaded, random_model, tiny_config

from models.copies import reserve_pinned
from models.runner import ModelRunner


def test_nothing_is_reserved_on_a_cpu() -> None:
    reserve_pinned(torch.device("cpu"))  # and nothing fails where there is no CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_step_waits_for_pinned_memory(enforce_eager: bool) -> None:
    """Of any number of rows, before and after recordings."""
    runner = ModelRunner(
        as_loaded(random_model(tiny_config()).to("cuda", torch.bfloat16)), block_size=16, max_num_seqs=64,
        max_num_batched_tokens=256, max_model_len=128, num_blocks=1 + 64 * 8, enforce_eager=enforce_eager,
    )  # fmt: skip
    runner.warm_up(all_graphs=False)
    while runner.prepare():
        pass
    before = torch.cuda.host_memory_stats()
    for count in (1, 2, 5, 9, 20, 33, 57, 64):
        generate(runner, [[3 + i, 4, 5, 6, 7] * 3 for i in range(count)], 8, budget=256)
    after, facts = torch.cuda.host_memory_stats(), ("num_host_alloc", "allocated_bytes.allocated")
    assert [after[fact] for fact in facts] == [before[fact] for fact in facts]
