"""Saved weights as models: served from their saving to their deletion, or not kept."""

import asyncio
import errno
from pathlib import Path

import pytest
from live_training import STEP, Run, Work, at_work, load, save, script, until

from server.errors import (
    EngineUnavailable,
    InsufficientStorage,
    InvalidAdapter,
    LongwaveError,
    QuotaExceeded,
    TrainingMissing,
)
from server.training import Loaded, Saved

pytestmark = pytest.mark.timeout(180)


def test_served_weights_are_their_owners_models_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            model = await work.create()
            saved, _, kept = await work.do(
                model, save("a", kind="sampler_weights", serve=True), save("b"), save("c", serve=True)
            )
            assert {name: info.owner for name, info in work.engine.infos.items()} == {saved.path: "me", kept.path: "me"}
            await work.do(model, save("c", overwrite=True))  # no longer served
            assert set(work.engine.infos) == {saved.path}
        async with at_work(tmp_path) as work:
            assert {name: info.owner for name, info in work.engine.infos.items()} == {saved.path: "me"}
            await work.training.delete_weights(saved.path, "me")
            assert work.engine.infos == {}
            with pytest.raises(TrainingMissing):
                await work.training.delete_weights(saved.path, "me")

    asyncio.run(main())


@pytest.mark.parametrize("refusal", [EngineUnavailable("It restarts."), QuotaExceeded("64 adapters are loaded.")])
def test_weights_that_the_engine_cannot_take_when_the_server_starts_are_served_later_unless_they_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: LongwaveError
) -> None:
    script(tmp_path, monkeypatch)
    monkeypatch.setattr("server.training.training.TIDY_SECONDS", 0.02)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            kept, deleted = await work.do(await work.create(), save("a", serve=True), save("b", serve=True))
        async with at_work(tmp_path, start=False) as work:
            work.engine.refusal = refusal
            await work.training.start()
            await asyncio.sleep(0.1)  # several looks
            await work.training.delete_weights(deleted.path, "me")
            assert not work.engine.infos
            work.engine.refusal = None
            await until(lambda: work.engine.infos)
            await asyncio.sleep(0.1)
            assert [*work.engine.infos] == [kept.path]

    asyncio.run(main())
    assert len([record for record in caplog.records if "is not served" in record.message]) == 2


def test_weights_that_cannot_be_served_are_not_kept(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.refusal = InvalidAdapter("It cannot be loaded.")
        (refused,) = await work.do(model, save(kind="sampler_weights", serve=True))
        assert refused is work.engine.refusal
        assert await work.training.saved("me") == []
        work.engine.refusal = None
        (saved,) = await work.do(model, save(kind="sampler_weights", serve=True))
        assert isinstance(saved, Saved)

    run(main)


def test_weights_that_cannot_be_deleted_are_served_further(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    async def main(work: Work) -> None:
        (saved,) = await work.do(await work.create(), save(kind="sampler_weights", serve=True))
        with monkeypatch.context() as patch:
            patch.setattr("server.training.weights.Path.rename", refuse)
            with pytest.raises(InsufficientStorage, match="cannot be deleted"):
                await work.training.delete_weights(saved.path, "me")
        assert [*work.engine.infos] == [saved.path]
        await work.training.delete_weights(saved.path, "me")
        assert not work.engine.infos

    run(main)


def test_weights_that_are_being_saved_while_their_model_is_deleted_are_served(run: Run) -> None:
    """They are on the disk a moment later, and would be listed as served."""

    async def main(work: Work) -> None:
        model = await work.create()
        (saving,) = work.submit(model, save(kind="sampler_weights", serve=True))
        await until(lambda: f"{model.id} Save" in work.log())
        deleting = asyncio.create_task(work.training.delete(model))
        assert isinstance(await work.outcome(saving), TrainingMissing)
        (work.folder / "go").touch()
        await deleting
        await until(lambda: work.engine.infos)
        assert [weights.label.path for weights in await work.training.saved("me")] == [*work.engine.infos]

    run(main, {"hold": "Save"})


def test_weights_that_replace_others_are_kept_though_they_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have replaced is gone: without them, nothing would be left."""
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            model = await work.create()
            await work.do(model, STEP, save(serve=True), STEP)
            work.engine.refusal = InvalidAdapter("It cannot be loaded.")
            (refused,) = await work.do(model, save(serve=True, overwrite=True))
            assert refused is work.engine.refusal
            assert work.engine.infos == {}  # not the old ones under the name of the new
            assert await work.do(model, load(model)) == [Loaded(load(model).path, 2)]
            work.engine.refusal = None
            assert isinstance((await work.do(model, save(serve=True, overwrite=True)))[0], Saved)
            assert list(work.engine.infos) == [load(model).path]

    asyncio.run(main())
