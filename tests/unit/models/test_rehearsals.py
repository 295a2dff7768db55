"""Steps that run before anybody is served: their sizes, and how long their contexts are."""

import pytest

from models.batch import StepBatch
from models.rehearsals import Rehearsals


def steps(*, on_gpu: bool = True, copied_pages: int = 0, max_model_len: int = 131_072) -> list[StepBatch]:
    rehearsals = Rehearsals(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=max_model_len, block_size=32, on_gpu=on_gpu,
        shares=True, copied_pages=copied_pages,
    )  # fmt: skip
    return list(rehearsals.steps())


def contexts(step: StepBatch) -> set[int]:
    return {seq.num_computed for seq in step.seqs}


def test_the_largest_steps_of_a_gpu_have_a_long_context_and_not_the_longest() -> None:
    """With 131,072 keys before them these two took a second of an 8B model's start."""
    first, *_, last = steps()
    assert (len(first.seqs), len(first.seqs[0].token_ids), contexts(first)) == (1, 8192, {16_384})
    assert (len(last.seqs), len(last.seqs[0].token_ids), contexts(last)) == (256, 1, {16_384})
    assert all(len(seq.block_ids) * 32 >= seq.num_computed + len(seq.token_ids) for seq in first.seqs + last.seqs)


def test_where_pages_are_copied_the_longest_context_is_what_takes_most_memory() -> None:
    first, *_, last = steps(copied_pages=1000)
    assert (len(first.seqs), contexts(first)) == (1, {131_072 - 8192})
    assert contexts(last) == {131_072 - 1}


@pytest.mark.parametrize("max_model_len", [131_072, 100_000, 32_768, 1000])
@pytest.mark.parametrize("copied_pages", [8192, 5000])
def test_so_many_sequences_that_all_pages_that_are_copied_at_once_are(max_model_len: int, copied_pages: int) -> None:
    """One sequence's alone were rehearsed, and memory for two of 131,072 keys was not there when they came."""
    first, *_ = steps(copied_pages=copied_pages, max_model_len=max_model_len)
    width = max(len(seq.block_ids) for seq in first.seqs)
    at_once = min(copied_pages // width, len(first.seqs))
    most = min(copied_pages, 256 * -(-max_model_len // 32))
    assert at_once * width > 0.9 * most
    assert max(len(seq.token_ids) for seq in first.seqs) > min(1024, max_model_len - 1)  # so that they are
    assert sum(len(seq.token_ids) for seq in first.seqs) == 8192
    assert all(seq.num_computed + len(seq.token_ids) <= max_model_len for seq in first.seqs)


def test_no_context_is_longer_than_a_model_allows() -> None:
    first, *others, last = steps(max_model_len=1000)
    assert [len(seq.token_ids) for seq in first.seqs] == [1000] * 8 + [192]
    assert [seq.num_computed for seq in first.seqs] == [0] * 8 + [808]
    assert contexts(last) == {999}
    for step in (first, *others, last):
        assert all(seq.num_computed + len(seq.token_ids) <= 1000 for seq in step.seqs)


def test_few_rows_that_share_pages_come_at_the_end_of_the_longest_context() -> None:
    """Their keys are read in parts, the more the longer, and parts take memory."""
    shared = [step for step in steps() if step.sharing is not None and step.sharing.prefills]
    assert {len(step.seqs[0].token_ids) for step in shared} == {2, 4, 8, 16, 32, 64, 128}
    assert all(max(contexts(step)) > 131_072 - 128 - 32 for step in shared)


def test_a_cpu_only_touches_everything_once() -> None:
    first, last = steps(on_gpu=False)
    assert (len(first.seqs[0].token_ids), contexts(first)) == (32, {0})
    assert (len(last.seqs), contexts(last)) == (1, {1})
