"""Trainers that rest while answers are open: they see the server's sign, and a rest keeps nobody waiting."""

import pytest
from working import LIMIT, Run, Work, is_running

from server.answering import AnsweringSign

pytestmark = pytest.mark.timeout(180)
SHARE = 0.01
assert (1 - SHARE) / SHARE > LIMIT, "a rest after a second's work lasts longer than any test waits"


def test_a_trainer_rests_until_the_last_answer_has_ended(run: Run, truth: str) -> None:
    sign = AnsweringSign()

    async def main(work: Work) -> None:
        job = await work.create()
        await work.trainer(job, step=2)
        sign.show(True)
        await work.wait(job, lambda _: (work.folder / "rests").exists())
        sign.show(False)
        await work.succeeded(job)
        assert work.weights(job) == truth

    run(main, {"rest_at": 3}, answering_fd=sign.fd, gpu_share=SHARE)


def test_a_trainer_that_rests_still_stops_when_it_is_told_to(run: Run) -> None:
    sign = AnsweringSign()
    sign.show(True)

    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=2)
        await work.wait(job, lambda _: (work.folder / "rests").exists())
        await work.jobs.pause(job.id, "me")
        await work.wait(job, lambda _: not is_running(pid))
        assert len(work.trained()) == 3

    run(main, {"rest_at": 3}, answering_fd=sign.fd, gpu_share=SHARE)


def test_with_all_of_the_time_nobody_rests(run: Run) -> None:
    sign = AnsweringSign()
    sign.show(True)

    async def main(work: Work) -> None:
        await work.succeeded(await work.create())
        assert not (work.folder / "rests").exists()

    run(main, {"rest_at": 3}, answering_fd=sign.fd, gpu_share=1.0)
