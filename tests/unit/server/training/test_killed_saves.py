"""kill -9 at every instant of a save that replaces weights, and of a delete: what was saved is there, old or new."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from live_training import STEP, Work, at_work, load, save, script, until

from server.errors import TrainingModelLost
from server.training import LiveModel, Loaded, weights

pytestmark = pytest.mark.timeout(180)

#: How many optimiser steps the weights have then: the old ones 1, the new ones 2.
INSTANTS = {"written": 1, "out of the way": 1, "replaced": 2}


async def killed(work: Work, monkeypatch: pytest.MonkeyPatch, instant: str) -> LiveModel:
    """A model whose process was killed while its weights "one" were replaced."""
    model = await work.create()
    await work.do(model, STEP, save(), STEP)
    script(work.folder, monkeypatch, die_at=instant)
    (lost,) = await work.do(model, save(overwrite=True))
    assert isinstance(lost, TrainingModelLost)
    assert f"load_weights from longwave://{model.id}/weights/one" in lost.message
    script(work.folder, monkeypatch)
    return model


async def loaded(work: Work, model: LiveModel) -> Any:
    """What comes of loading the weights "one" of a model that was lost."""
    (outcome,) = await work.do(await work.create(), load(model))
    return outcome


def hidden(folder: Path) -> list[Path]:
    return list((folder / "training" / "saved").glob("*/*/.*"))


@pytest.mark.parametrize(("instant", "steps"), INSTANTS.items())
def test_weights_whose_replacement_a_killed_process_cut_short_are_whole_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str, steps: int
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            model = await killed(work, monkeypatch, instant)
            outcome = await loaded(work, model)
            path = load(model).path
            assert outcome == Loaded(path, steps)
            (saved,) = await work.training.saved("me")
            assert (saved.label.path, saved.label.steps) == (path, steps)

    asyncio.run(main())


@pytest.mark.parametrize(("instant", "steps"), INSTANTS.items())
def test_weights_whose_replacement_was_cut_short_with_the_server_are_whole_after_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str, steps: int
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        with monkeypatch.context() as patched:  # the server dies with its process: it sees to nothing
            patched.setattr(weights.WeightsStore, "mend", lambda _: None)
            async with at_work(tmp_path) as work:
                model = await killed(work, monkeypatch, instant)
        monkeypatch.setattr(weights, "UNFINISHED_SECONDS", 0.0)
        async with at_work(tmp_path) as work:
            assert hidden(tmp_path) == []
            (saved,) = await work.training.saved("me")
            assert (saved.label.path, saved.label.steps) == (load(model).path, steps)
            assert await loaded(work, model) == Loaded(load(model).path, steps)

    asyncio.run(main())


def test_weights_that_were_deleted_do_not_come_back_with_what_they_had_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server deletes them before the one that was killed is there again."""
    script(tmp_path, monkeypatch)

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(weights.WeightsStore, "mend", lambda _: None)
            async with at_work(tmp_path) as work:
                model = await killed(work, monkeypatch, "replaced")
                assert len(hidden(tmp_path)) == 1
                await work.training.delete_weights(load(model).path, "me")
        async with at_work(tmp_path) as work:
            assert (await work.training.saved("me"), hidden(tmp_path)) == ([], [])

    asyncio.run(main())


def test_what_a_delete_has_left_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            model = await work.create()
            await work.do(model, save())
            with monkeypatch.context() as patched:
                patched.setattr(weights.shutil, "rmtree", lambda *_, **__: 1 / 0)  # killed before anything is removed
                with pytest.raises(ZeroDivisionError):
                    await work.training.delete_weights(load(model).path, "me")
            assert await work.training.saved("me") == []
            assert len(hidden(tmp_path)) == 1
        async with at_work(tmp_path):
            assert hidden(tmp_path) == []

    asyncio.run(main())


def test_what_was_being_written_goes_when_it_is_old_though_no_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)
    monkeypatch.setattr("server.training.training.SWEEP_TURNS", 1)

    async def main() -> None:
        async with at_work(tmp_path, idle_seconds=2.0) as work:
            model = await killed(work, monkeypatch, "written")
            assert len(hidden(tmp_path)) == 1
            monkeypatch.setattr(weights, "UNFINISHED_SECONDS", 0.0)
            await until(lambda: hidden(tmp_path) == [])
            assert [saved.label.path for saved in await work.training.saved("me")] == [load(model).path]

    asyncio.run(main())
