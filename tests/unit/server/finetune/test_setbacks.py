"""A job whose training is done is not given up, whatever goes wrong with what is left of it."""

from pathlib import Path
from typing import Any

import pytest
from job_makers import MODEL, create, leases, messages, opened, step, training
from working import Run, Work

from server.finetune import Status
from server.finetune.finishing import Finishing
from server.finetune.leases import TRAIN, Killed
from server.finetune.setbacks import MAX_BACK_OFF, MAX_CRASHES, MAX_WAIT

pytestmark = pytest.mark.timeout(180)


def test_servers_killed_after_the_last_checkpoint_are_no_reason_to_give_the_job_up(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held, now = leases(store), 1000.0
        job = training(store, held)
        held.stepped(job, now, step(4), 4, checkpoint=True)
        for number in range(3 * MAX_CRASHES):
            holder = f"server-{number}" if number else "server-a"
            others = leases(store, f"server-{number + 1}", gone=[holder])
            assert others.claim(TRAIN, MODEL, now) == Killed(failed=False)  # it waits a moment
            now += MAX_BACK_OFF
            assert others.claim(TRAIN, MODEL, now) is not None
        assert messages(store)[-1] == (
            "The server or its trainer was killed. The training is done and kept; what is left of the job is tried "
            f"again in {MAX_BACK_OFF:.0f} s"
        )


def test_a_clock_that_is_set_back_lengthens_no_wait_by_more_than_the_longest_one(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        held.no_room(training(store, held), 10_000.0, "no room")
        assert held.claim(TRAIN, MODEL, 9_999.0 + MAX_WAIT) is None
        assert held.claim(TRAIN, MODEL, 10_000.0) is None
        assert held.claim(TRAIN, MODEL, 9_999.0) is not None


def test_a_trainer_that_cannot_make_a_result_of_the_last_checkpoint_is_given_up(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        held.stepped(job, 103.0, step(4), 4, checkpoint=True)
        for number in range(1, MAX_CRASHES):
            assert not held.crashed(job, 1000.0 * number, "x")
            claimed = held.claim(TRAIN, MODEL, 1000.0 * number + 500)
            assert claimed is not None
            job = claimed
        assert held.crashed(job, 1e6, "x")


def test_a_mistake_of_ours_while_a_job_ends_loses_no_model(
    run: Run, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, mistakes = Finishing.load, []

    async def wrong(*given: Any) -> list[str]:
        if len(mistakes) <= MAX_CRASHES:
            mistakes.append(given)
            raise RuntimeError("a mistake")
        return await load(*given)

    monkeypatch.setattr(Finishing, "load", wrong)

    async def main(work: Work) -> None:
        job = await work.create()
        done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
        assert (done.status, len(mistakes)) == (Status.SUCCEEDED, MAX_CRASHES + 1)
        assert work.weights(job) == truth
        assert len(work.trained()) == 6  # no trainer was needed again

    run(main)
