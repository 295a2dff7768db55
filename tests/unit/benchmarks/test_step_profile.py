"""Steps that are profiled find room in their runner."""

from unittest import mock

import pytest

from benchmarks.engine_steps import BLOCK_SIZE, DECODED, Steps
from benchmarks.step_profile import longest_sequence, most_rows
from models.step_shapes import StepNeeds, chunk_shapes


@pytest.mark.parametrize("context", [1, 1000, 8192, 131_072])
def test_a_decode_has_no_more_blocks_than_a_sequence_of_its_runner(context: int) -> None:
    """Alone or beside a chunk, where nothing else is as long."""
    for decodes, chunks in (([(2, context)], []), ([], [((100, 64), (2, context))])):
        longest = longest_sequence(decodes, [], chunks)
        runner = mock.Mock(num_blocks=2 * -(-longest // BLOCK_SIZE) + 1)
        work = Steps(runner, (2, context), chunks[0][0] if chunks else None)
        assert all(len(blocks) <= -(-longest // BLOCK_SIZE) for blocks in work.blocks)
        work.run(DECODED + 1)
        steps = [call.args[0].seqs[0] for call in runner.launch.call_args_list]
        assert max(step.num_computed for step in steps) + 1 == context + DECODED <= longest
        assert steps[-1].num_computed == context, "it begins again"


def test_prompts_and_chunks_count_as_well() -> None:
    assert longest_sequence([(1, 1000)], [], [((512, 4000), (0, 0))]) == 4512
    assert longest_sequence([(1, 1000)], [5000], []) > 5000


@pytest.mark.parametrize(("tokens", "rows"), [(8, 0), (64, 0), (240, 7), (185, 7), (1000, 24)])
def test_a_step_has_the_graph_that_the_engine_takes_for_it(tokens: int, rows: int) -> None:
    step = StepNeeds(tokens + rows, rows, 1, tokens, rows, all_sampled=False)
    assert any(shape.fits(step) for shape in chunk_shapes(64, most_rows([((tokens, 1000), (rows, 700))])))


def test_steps_of_more_rows_than_graphs_have_are_as_large_as_asked_for() -> None:
    assert most_rows([((8192, 0), (0, 0)), ((100, 0), (7, 700))]) == 8192
    assert most_rows([]) == 64
