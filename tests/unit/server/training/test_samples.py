"""Samples come from the weights of their place in the sequence, together, and leave nothing in the engine."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_training import SAMPLE, STEP, Run, Work, compute, load, save, until
from scripted_engine import Script

from server.errors import EngineUnavailable, InsufficientStorage, InvalidAdapter
from server.training import Call, Sample, Sampled, SampledSequence, Stepped, Unload

pytestmark = pytest.mark.timeout(180)


def test_a_sample_has_tokens_their_logprobs_and_the_reason_of_its_end(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.script = Script(text=b"hello")
        (cut,) = await work.do(model, replace_sample(max_tokens=3))
        assert cut == Sampled((SampledSequence(tuple(b"hel"), (-0.5,) * 3, "length"),))
        (whole,) = await work.do(model, replace_sample(max_tokens=9))
        assert whole.sequences[0] == SampledSequence((*b"hello", 260), (-0.5,) * 6, "stop")  # what stopped it, too
        (stopped,) = await work.do(model, replace_sample(max_tokens=9, stop=("ll",)))
        assert stopped.sequences[0] == SampledSequence(tuple(b"hell"), (-0.5,) * 4, "stop")

    run(main)


def replace_sample(**changes: Any) -> Sample:
    return msgspec.structs.replace(SAMPLE, **changes)


def test_samples_of_a_call_are_one_batch_with_seeds_of_their_own(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create(salt=b"mine")
        (result,) = await work.do(model, replace_sample(num_samples=3, seed=7, temperature=0.5, top_k=4))
        assert len(result.sequences) == 3
        requests = work.engine.requests
        assert [request.sampling.seed for request in requests] == [7, 8, 9]
        assert {request.cache_salt for request in requests} == {b"mine"}
        assert {
            (request.sampling.temperature, request.sampling.top_k, request.sampling.logprobs) for request in requests
        } == {(0.5, 4, 0)}
        assert len({request.request_id for request in requests}) == 3
        assert work.door.reserved == 0

    run(main)


def test_a_sample_keeps_the_weights_it_began_with_while_training_goes_on(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.script = Script(hold_after=1)
        first, second = work.submit(model, SAMPLE, SAMPLE)
        (stepped,) = await work.do(model, STEP)  # the samples run, and do not hold up the sequence
        assert stepped == Stepped(2.5, 1)
        await until(lambda: len(work.engine.held) == 2)
        (third,) = work.submit(model, SAMPLE)
        await until(lambda: len(work.engine.held) == 3)
        assert (first.outcome, second.outcome) == (None, None)
        adapters = [request.adapter for request in work.engine.requests]
        assert adapters[0] == adapters[1] != adapters[2]
        assert set(work.engine.infos) == {adapters[0], adapters[2]}  # the old one is still in use
        folders = [Path(info.folder) for info in work.engine.infos.values()]
        assert [(folder / "steps").read_text() for folder in folders] == ["0", "1"]
        assert {info.owner for info in work.engine.infos.values()}.isdisjoint({"", "me"})
        work.engine.resume.set()
        for future in (first, second, third):
            assert isinstance(await work.outcome(future), Sampled)
        await until(lambda: set(work.engine.infos) == {adapters[2]})  # and gone with its last sample
        await until(lambda: not folders[0].exists())
        assert folders[1].exists()
        work.engine.resume.clear()

    run(main)


@pytest.mark.parametrize("unchanged", [save(), compute(), compute(backward=False)])
def test_calls_that_change_no_weights_cost_no_new_adapter(run: Run, unchanged: Call) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, SAMPLE, unchanged, SAMPLE)
        adapters = {request.adapter for request in work.engine.requests}
        assert len(adapters) == 1

    run(main)


def test_loaded_weights_are_sampled_from(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, SAMPLE, save(), load(model), SAMPLE)
        adapters = {request.adapter for request in work.engine.requests}
        assert len(adapters) == 2

    run(main)


@pytest.mark.parametrize("end", ["unload", "delete", "kill"])
def test_a_model_that_ends_leaves_no_adapter(run: Run, end: str) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, SAMPLE)
        assert len(work.engine.infos) == 1
        (folder,) = [Path(info.folder) for info in work.engine.infos.values()]
        if end == "unload":
            await work.do(model, Unload())
        elif end == "delete":
            await work.training.delete(model)
        else:
            assert work.pid is not None
            os.kill(work.pid, 9)
        await until(lambda: not work.engine.infos and not folder.exists())

    run(main)


def test_unloading_waits_for_samples_before_it(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.script = Script(hold_after=1)
        sampled, unloaded = work.submit(model, SAMPLE, Unload())
        await until(lambda: work.engine.held)
        assert (sampled.outcome, unloaded.outcome) == (None, None)
        work.engine.resume.set()
        assert isinstance(await work.outcome(sampled), Sampled)
        await work.outcome(unloaded)
        work.engine.resume.clear()

    run(main)


def test_what_the_engine_refuses_is_told_and_the_model_goes_on(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.refusal = InvalidAdapter("It cannot be loaded.")
        (refused,) = await work.do(model, SAMPLE)
        assert refused is work.engine.refusal
        work.engine.refusal = None
        work.engine.script = Script(fail_after=1)
        (failed,) = await work.do(model, replace_sample(num_samples=2))
        assert isinstance(failed, EngineUnavailable)
        assert work.door.reserved == 0
        work.engine.script = Script()
        assert isinstance((await work.do(model, SAMPLE))[0], Sampled)

    run(main)


def test_a_data_folder_that_cannot_be_used_is_told_and_the_model_goes_on(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        place = tmp_path / "training" / "snapshots"
        place.parent.mkdir(exist_ok=True)
        place.touch()  # no folder
        refused, stepped = await work.do(model, SAMPLE, STEP)
        assert isinstance(refused, InsufficientStorage)
        assert stepped == Stepped(2.5, 1)
        place.unlink()
        (sampled,) = await work.do(model, SAMPLE)
        assert isinstance(sampled, Sampled)

    run(main)
