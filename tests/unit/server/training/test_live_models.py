"""Live models from creation to their end, through real processes that are killed, stopped and ended."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from live_training import (
    LIMIT,
    NEW,
    SAMPLE,
    STEP,
    Run,
    Work,
    compute,
    is_running,
    load,
    save,
    until,
)
from scripted_engine import Script

from server.answering import AnsweringSign
from server.errors import (
    InvalidRequest,
    LongwaveError,
    RequestFailedError,
    TrainingDiverged,
    TrainingMissing,
    TrainingModelLost,
    TrainingOutOfMemory,
)
from server.training import Computed, Created, Loaded, Sampled, Saved, Stepped, Unload, Unloaded
from server.training.weights import WeightsStore

pytestmark = pytest.mark.timeout(180)


def test_calls_run_in_the_process_in_their_order(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        assert model.creating.outcome == Created(model.id, 10)
        computed, stepped, saved = await work.do(model, compute(), STEP, save())
        assert computed == Computed(1.5, 3, None, (bytes(12),))
        assert stepped == Stepped(2.5, 1)
        assert saved == Saved(f"longwave://{model.id}/weights/one", "weights", 1)
        (loaded,) = await work.do(model, load(model))
        assert loaded == Loaded(saved.path, 1)
        assert [line.partition(" ")[2] for line in work.log()] == ["Create", "Compute", "OptimStep", "Save", "Load"]
        assert (work.training.stats.models, work.training.stats.tokens) == (1, 3)
        assert work.training.stats.calls["Compute", "succeeded"] == 1

    run(main)


def test_the_process_sees_whether_answers_are_open(run: Run) -> None:
    sign = AnsweringSign()

    async def main(work: Work) -> None:
        creating = asyncio.create_task(work.create())
        await until(lambda: work.pid is not None)
        assert not creating.done()
        sign.show(True)
        assert isinstance((await creating).creating.outcome, Created)

    run(main, {"await_sign": True}, answering_fd=sign.fd)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", InvalidRequest),
        ("diverged", TrainingDiverged),
        ("memory", TrainingOutOfMemory),
        ("internal", RequestFailedError),
    ],
)
def test_a_failed_call_is_told_through_its_future_and_the_model_goes_on(
    run: Run, kind: str, error: type[LongwaveError]
) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        failed, stepped = await work.do(model, compute(), STEP)
        assert type(failed) is error
        assert failed.message == "It is so."
        assert stepped == Stepped(2.5, 1)
        assert work.training.stats.calls["Compute", "failed"] == 1

    run(main, scripted={"fail": "Compute", "kind": kind})


@pytest.mark.parametrize(
    ("at", "said", "param"),
    [
        ("Create", "target_modules: the decoder layers have no linear x", "lora_config.target_modules"),
        ("Compute", "data[12]: there is nothing to learn", "data[12]"),
        ("Compute", "No step was taken: there was no forward_backward", None),
    ],
)
def test_a_field_that_the_process_refuses_is_named_as_it_is_written(
    run: Run, at: str, said: str, param: str | None
) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        failed = model.creating.outcome if at == "Create" else (await work.do(model, compute()))[0]
        assert isinstance(failed, InvalidRequest)
        assert (failed.message, failed.param) == (f"{said}.", param)

    run(main, scripted={"fail": at, "kind": "invalid", "said": said if param else said[:1].lower() + said[1:]})


def test_a_mistake_of_ours_ends_the_model_and_nobody_waits_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        monkeypatch.setattr(model.sequence, "pass_on", lambda _: 1 / 0)
        first, second = await work.do(model, compute(), STEP)
        assert first == Computed(1.5, 3, None, (bytes(12),))
        assert isinstance(second, TrainingModelLost)
        with pytest.raises(TrainingModelLost, match=r"The server failed, and the model .* is lost with it"):
            work.submit(model, STEP)
        await until(lambda: work.log()[-1] == f"{model.id} Remove")
        await until(lambda: work.training.shared.child is None)  # it was the last one

    run(main)


def test_a_base_that_cannot_be_trained_fails_the_creation(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        assert isinstance(model.creating.outcome, RequestFailedError)
        assert model.creating.outcome.message.endswith("cannot be trained on this server: no linear head.")
        with pytest.raises(RequestFailedError, match="no linear head"):
            work.training.submit(model, None, STEP)
        assert work.training.live() == []

    run(main, scripted={"unable": True})


def test_the_process_ends_with_its_last_model(run: Run) -> None:
    async def main(work: Work) -> None:
        first, second = await work.create(), await work.create()
        pid = work.pid
        assert pid is not None
        assert await work.do(first, Unload()) == [Unloaded(first.id)]
        assert is_running(pid)
        with pytest.raises(TrainingMissing, match="was unloaded"):
            work.training.submit(first, None, STEP)
        await work.do(second, Unload())
        await until(lambda: not is_running(pid))
        assert work.training.stats.crashes == 0
        assert work.training.stats.models == 0

    run(main)


def test_an_idle_model_is_saved_and_unloaded(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, compute(), STEP, save())
        pid = work.pid
        assert pid is not None
        await until(lambda: model.end is not None)
        with pytest.raises(TrainingMissing, match=r"no call for 0\.5 s\. .*saved as longwave://.*/weights/autosave"):
            work.training.submit(model, None, STEP)
        await until(lambda: not is_running(pid))
        again = await work.create()
        assert await work.do(again, load(model, "autosave")) == [Loaded(f"longwave://{model.id}/weights/autosave", 1)]

    run(main, idle_seconds=0.5, max_saved=1)  # what would be lost is saved beyond the quota


def test_drain_lets_what_was_taken_end_and_saves_every_model(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        models = [await work.create(), await work.create("you")]
        fresh = await work.create("you")  # has nothing that could be lost
        await work.do(models[1], STEP)
        futures = work.submit(models[0], compute(), STEP)
        draining = asyncio.create_task(work.training.drain())
        await until(lambda: f"{models[0].id} Compute" in work.log())
        assert not draining.done()
        (tmp_path / "go").touch()
        await asyncio.wait_for(draining, 60)
        assert [type(future.outcome) for future in futures] == [Computed, Stepped]
        for owner, model in zip(("me", "you"), models, strict=True):
            (saved,) = await work.training.saved(owner)
            assert saved.label.path == f"longwave://{model.id}/weights/autosave"
        assert fresh.end is not None
        assert "It had learnt nothing." in fresh.end.message
        assert work.pid is None

    run(main, scripted={"hold": "Compute"}, max_saved=1)


def test_drain_saves_each_model_when_its_own_calls_have_ended(run: Run) -> None:
    async def main(work: Work) -> None:
        sampled, idle = await work.create(), await work.create("you")
        for model in (sampled, idle):
            await work.do(model, STEP)
        work.engine.script = Script(hold_after=1)
        (sampling,) = work.submit(sampled, SAMPLE)
        await until(lambda: work.engine.held)
        draining = asyncio.create_task(work.training.drain())
        await until(lambda: [line for line in work.log() if line == f"{idle.id} Remove"])
        assert len(await work.training.saved("you")) == 1
        assert (sampled.end, sampling.outcome) == (None, None)
        work.engine.resume.set()
        await draining
        assert isinstance(sampling.outcome, Sampled)
        assert len(await work.training.saved("me")) == 1

    run(main)


def test_drain_does_not_wait_for_numbers_that_can_come_no_more(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, STEP)
        behind = work.training.submit(model, 3, STEP)
        await asyncio.wait_for(work.training.drain(), LIMIT)
        assert isinstance(behind.outcome, InvalidRequest)
        assert "seq_id 2, which has not come before the server was shut down" in behind.outcome.message
        assert len(await work.training.saved("me")) == 1

    run(main, gap_seconds=10 * LIMIT)


def test_an_idle_model_that_cannot_be_saved_is_gone_and_its_owner_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(work: Work) -> None:
        model, fresh = await work.create(), await work.create()
        pid = work.pid
        assert pid is not None
        await work.do(model, STEP, save(), STEP)

        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(WeightsStore, "of", fail)
        await until(lambda: not is_running(pid))
        with pytest.raises(TrainingMissing) as told:
            work.submit(model, STEP)
        assert told.value.message == (
            f"The model {model.id} was unloaded, and its weights could not be saved. Its weights after optimiser step "
            "1 are saved: create a model with the same lora_config and load_weights from "
            f"longwave://{model.id}/weights/one."
        )
        assert fresh.end is not None
        assert "It had learnt nothing." in fresh.end.message

    run(main, idle_seconds=0.5)


def test_tidying_goes_on_after_a_turn_that_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        forget, failures = model.sequence.forget, [OSError(errno.EIO, "Input/output error")]

        def fail_once(before: float) -> None:
            if failures:
                raise failures.pop()
            forget(before)

        monkeypatch.setattr(model.sequence, "forget", fail_once)
        await until(lambda: model.end is not None)
        assert not failures

    run(main, idle_seconds=0.5)


def test_deleting_a_model_fails_its_calls_and_leaves_the_others(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        model, other = await work.create(), await work.create()
        futures = work.submit(model, compute(), STEP)
        await until(lambda: work.log()[-1].endswith("Compute"))
        deleting = asyncio.create_task(work.training.delete(model))
        for future in futures:
            assert isinstance(await work.outcome(future), TrainingMissing)
        (tmp_path / "go").touch()
        await deleting
        assert await work.do(other, STEP) == [Stepped(2.5, 1)]

    run(main, scripted={"hold": "Compute"})


def test_a_model_deleted_while_it_is_made_leaves_nothing(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.training.create("me", "base", NEW)
        await work.training.delete(model)
        assert isinstance(model.creating.outcome, TrainingMissing)
        await until(lambda: work.pid is None and not work.training._tasks - {_tidy(work)})

    run(main)


def _tidy(work: Work) -> "asyncio.Task[None]":
    (task,) = [task for task in work.training._tasks if task.get_name() == "training-tidy"]
    return task


def test_ended_models_are_forgotten_with_their_results(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create(key="k")
        (future,) = work.submit(model, Unload())
        await work.outcome(future)
        await until(lambda: model.id not in work.training._models)
        with pytest.raises(TrainingMissing, match=r"Results are kept for 0\.2 s"):
            work.training.future(future.request_id, "me")
        assert work.training._keys == {}

    run(main, idle_seconds=0.4, result_seconds=0.2)
