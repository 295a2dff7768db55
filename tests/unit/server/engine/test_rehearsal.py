"""Rehearsed steps are real ones on pages of their own, and leave nothing behind."""

import itertools

from fake_runner import FakeRunner

from server.engine.rehearsal import LONG_STEP, ROUNDS, measure, rehearse
from server.engine.runner import LoadedRunner
from server.engine.step_time import rehearsals, work_of


def loaded(runner: FakeRunner, filled: list[int] | None = None) -> LoadedRunner:
    return LoadedRunner(runner, "", "", "", 1000, 512, 300, (), fill_blocks=([] if filled is None else filled).append)


def test_every_step_is_measured_and_the_fastest_round_counts() -> None:
    runner = FakeRunner(2000, 16, 512)
    runner.keep_batches = True
    filled: list[int] = []
    ticks = itertools.accumulate(itertools.cycle([1.0, 5.0, 1.0, 3.0]))  # the rounds of a step take 5 s and 3 s
    samples = rehearse(
        loaded(runner, filled), max_num_batched_tokens=512, max_num_seqs=16, max_model_len=1000,
        clock=lambda: next(ticks),
    )  # fmt: skip
    steps = rehearsals(512, 16, 1000)
    assert [sample.work for sample in samples] == [work_of(chunks) for chunks in steps]
    assert {sample.seconds for sample in samples} == {3.0}
    assert len(runner.batches) == ROUNDS * len(steps)
    assert not runner.slots
    read = {block for batch in runner.batches for seq in batch.seqs for block in seq.block_ids}
    assert filled == [len(read)], "once: all that is read"
    longest = max((batch.seqs[0].token_ids for batch in runner.batches), key=len)
    assert len(set(longest)) == 300


def test_no_more_blocks_are_filled_than_there_are() -> None:
    filled: list[int] = []
    rehearse(loaded(FakeRunner(10, 16, 512), filled), max_num_batched_tokens=512, max_num_seqs=16, max_model_len=1000)
    assert filled == [9]


def test_sequences_share_no_page() -> None:
    runner = FakeRunner(2000, 16, 512)
    runner.keep_batches = True
    rehearse(loaded(runner), max_num_batched_tokens=512, max_num_seqs=16, max_model_len=1000)
    for batch in runner.batches:
        blocks = [block for seq in batch.seqs for block in seq.block_ids]
        assert len(set(blocks)) == len(blocks)
    assert max(len(batch.seqs) for batch in runner.batches) == 16


def test_steps_that_the_pool_does_not_hold_are_left_out() -> None:
    runner = FakeRunner(10, 16, 512)
    samples = rehearse(loaded(runner), max_num_batched_tokens=512, max_num_seqs=16, max_model_len=1000)
    assert samples
    assert all(sample.work.rows <= 9 * 16 for sample in samples)


def test_one_round_of_a_long_step_has_to_do() -> None:
    runner = FakeRunner(2000, 16, LONG_STEP)
    runner.keep_batches = True
    rehearse(loaded(runner), max_num_batched_tokens=LONG_STEP, max_num_seqs=16, max_model_len=5000)
    rows = [sum(len(seq.token_ids) for seq in batch.seqs) for batch in runner.batches]
    assert rows.count(LONG_STEP) == 1
    assert rows.count(LONG_STEP // 4) == ROUNDS


def test_steps_of_more_rows_than_there_may_be_are_left_out() -> None:
    runner = FakeRunner(2000, 16, 512)
    runner.keep_batches = True
    samples = measure(loaded(runner), [[(0, 1)], [(0, 32)]], max_rows=31)
    assert [sample.work.rows for sample in samples] == [1]
    assert len(runner.batches) == 1
    assert not runner.slots
