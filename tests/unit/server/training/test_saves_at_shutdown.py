"""What a shutdown saves while a call is in the process for longer than it waits, through real processes."""

import asyncio
import json
from pathlib import Path

import pytest
from live_training import LIMIT, STEP, Run, Work, compute, script, until

from server.errors import ServerDraining
from server.training import Computed, LiveModel, Stepped
from server.training.messages import Done, Save
from server.training.messages import Work as Asked
from server.training.weights import LABEL

pytestmark = pytest.mark.timeout(180)


async def cut(draining: "asyncio.Task[None]") -> None:
    """As a shutdown does whose time is over."""
    assert not draining.done()
    draining.cancel()
    await asyncio.wait([draining])


async def steps_saved(work: Work, model: LiveModel) -> list[int]:
    return [saved.label.steps for saved in await work.training.saved(model.owner) if model.id in saved.label.path]


async def until_saved(work: Work, model: LiveModel, *steps: int) -> None:
    async with asyncio.timeout(LIMIT):
        while await steps_saved(work, model) != [*steps]:
            await asyncio.sleep(0.01)  # between two looks at the folders


def warnings_of(caplog: pytest.LogCaptureFixture, model: LiveModel) -> list[str]:
    return [line for line in caplog.messages if line.startswith(model.id)]


def test_all_that_was_learnt_is_saved_whatever_one_call_does(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main(work: Work) -> None:
        busy, behind, idle = await work.create("a"), await work.create("b"), await work.create("c")
        for model in (busy, behind, idle):
            await work.do(model, STEP)
        (computing,) = work.submit(busy, compute())
        await until(lambda: work.log()[-1] == f"{busy.id} Compute")
        (stepping,) = work.submit(behind, STEP)
        draining = asyncio.create_task(work.training.drain())
        for model in (busy, behind, idle):
            await until_saved(work, model, 1)
        await until(lambda: all(model.last_saved for model in (busy, behind, idle)))
        await cut(draining)
        await work.training.close()
        assert isinstance(computing.outcome, ServerDraining)
        assert isinstance(stepping.outcome, ServerDraining)
        for model in (busy, behind):
            (said,) = warnings_of(caplog, model)
            assert "ends with the server; calls that have not ended: 1. Its weights after optimiser step 1 are" in said
            assert f"load_weights from longwave://{model.id}/weights/autosave" in said
        assert warnings_of(caplog, idle) == []
        assert idle.end is not None
        assert f"Its weights were saved as longwave://{idle.id}/weights/autosave" in idle.end.message

    run(main, scripted={"hold": "Compute"})


def test_a_shutdown_waits_for_a_model_that_is_being_unloaded(run: Run) -> None:
    """Whose runner still gives back what it holds; the model itself is none of the live ones any more."""

    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, STEP)
        gives_back = asyncio.Event()

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await gives_back.wait()

        runner, real = work.training._runners[model.id]
        slow = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        work.training._runners[model.id] = runner, slow
        leaving = asyncio.create_task(work.training._put_away(model, "There was no call."))
        await until(lambda: model.end is not None)
        draining = asyncio.create_task(work.training.drain())
        await asyncio.sleep(0)
        gives_back.set()
        await draining
        assert await steps_saved(work, model) == [1]
        await leaving
        real.cancel()

    run(main)


def test_calls_that_end_in_time_are_in_what_is_saved(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, STEP)
        futures = work.submit(model, compute(), STEP)
        draining = asyncio.create_task(work.training.drain())
        await until_saved(work, model, 1)
        (tmp_path / "go").touch()
        await asyncio.wait_for(draining, LIMIT)
        assert [type(future.outcome) for future in futures] == [Computed, Stepped]
        assert await steps_saved(work, model) == [2]

    run(main, scripted={"hold": "Compute"})


def test_a_save_that_waited_for_a_step_says_so(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, STEP)
        asked: list[Asked] = []

        async def ask(command: Asked) -> Done:
            asked.append(command)
            return Done(len(asked), steps=2)

        saved = await work.training._saving.autosave(model, ask)
        assert saved.steps == 2
        labels = [json.loads(command.files[LABEL])["steps"] for command in asked if isinstance(command, Save)]
        assert labels == [1, 2]

    run(main)


def test_what_could_not_be_saved_is_in_the_log(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(work: Work) -> None:
        changing, behind = await work.create("a"), await work.create("b")
        for model in (changing, behind):
            await work.do(model, STEP)
        script(tmp_path, monkeypatch, hold="OptimStep")
        work.submit(changing, STEP)
        await until(lambda: work.log().count(f"{changing.id} OptimStep") == 2)
        draining = asyncio.create_task(work.training.drain())
        await until(lambda: behind.end is not None)
        await cut(draining)
        await work.training.close()
        (said,) = warnings_of(caplog, changing)
        assert said.endswith("calls that have not ended: 1. Nothing of it was saved: create a model and begin anew.")
        (said,) = warnings_of(caplog, behind)
        assert "ends with the server, before its last save. Nothing of it was saved" in said
        assert await work.training.saved("a") == await work.training.saved("b") == []

    run(main)


def test_a_save_that_fails_early_is_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, STEP)
        work.submit(model, compute())
        await until(lambda: work.log()[-1].endswith("Compute"))
        script(tmp_path, monkeypatch, fail="Save", kind="storage")
        draining = asyncio.create_task(work.training.drain())
        await until(lambda: f"{model.id} could not be saved before its calls have ended" in caplog.messages)
        script(tmp_path, monkeypatch)
        (tmp_path / "go").touch()
        await asyncio.wait_for(draining, LIMIT)
        assert await steps_saved(work, model) == [1]

    run(main, scripted={"hold": "Compute"})


def test_a_drain_waits_for_models_that_are_just_being_saved(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, STEP)
        await until(lambda: work.log()[-1] == f"{model.id} Save")  # as there was no call for long
        draining = asyncio.create_task(work.training.drain())
        await asyncio.sleep(0)
        assert model.end is not None
        assert not draining.done()
        (tmp_path / "go").touch()
        await asyncio.wait_for(draining, LIMIT)
        assert await steps_saved(work, model) == [1]

    run(main, scripted={"hold": "Save"}, idle_seconds=0.5)


def test_a_call_has_no_more_time_for_saves_beside_it(run: Run) -> None:
    async def main(work: Work) -> None:
        busy, idle = await work.create("a"), await work.create("b")
        await work.do(idle, STEP)
        work.submit(busy, compute())
        await until(lambda: work.log()[-1] == f"{busy.id} Compute")
        child = work.training.shared.child
        assert child is not None
        limit = child._limit
        draining = asyncio.create_task(work.training.drain())
        await until_saved(work, idle, 1)
        await until(lambda: idle.last_saved)
        assert limit is not None
        assert child._limit is limit
        await cut(draining)

    run(main, scripted={"hold": "Compute"})
