"""However a trainer process ends, its job goes on from a checkpoint or fails with the reason."""

import math
import os
import signal
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from working import Run, Work, is_running

from models.patching import UnsupportedModelError
from server.finetune import Job
from server.finetune.attempt import _ended as ended_by
from server.finetune.messages import MAX_FRAME_BYTES, Stepped
from server.finetune.setbacks import MAX_CRASHES
from server.finetune.worker import NICENESS, OOM_SCORE
from server.frames import HEADER, frame

pytestmark = pytest.mark.timeout(180)


SILENCE = 1000.0  # seconds: longer than any start of a trainer takes


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def frame_of(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.thorough) for step in (1, 4)), 5])
def test_a_trainer_that_is_killed_is_followed_by_one_that_ends_with_the_same_weights(
    run: Run, truth: str, step: int
) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        await work.succeeded(job)
        assert work.weights(job) == truth
        said = await work.said(job)
        assert sum("The trainer was killed (SIGKILL" in text for text in said) == 1
        assert sum(text.startswith("Step ") for text in said) == 6
        assert work.jobs.stats.crashes == 1
        counts = Counter(work.trained())
        assert max(counts.values()) <= 2  # at most checkpoint_every steps are done again
        assert sum(counts.values()) <= 6 + 2

    run(main, {"signal_at": step, "signal": "SIGKILL"})


def test_a_job_that_kills_every_trainer_fails_with_the_reason(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        failed = await work.failed(job)
        assert failed.failure.code == "trainer_crashed"
        assert f"crashed {MAX_CRASHES} times" in failed.failure.message
        assert "SIGKILL" in failed.failure.message
        other = await work.create(steps=2)  # the next job is none the worse
        await work.succeeded(other)
        assert (work.job_folder(job) / "run").exists()  # it has a checkpoint, which is kept

    run(main, {"signal_at": 3, "signal": "SIGKILL", "always": True})


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("diverged", "training_diverged", "the gradient was not finite"),
        ("another run", "checkpoint_mismatch", "do not fit it any more: its files or the"),
        ("unsupported", "unsupported_model", "cannot be trained on this server: TinyForCausalLM fails the self-test"),
    ],
)
def test_what_a_trainer_says_of_its_end_is_the_jobs_reason(run: Run, error: str, code: str, told: str) -> None:
    assert issubclass(UnsupportedModelError, NotImplementedError)  # which the scripted trainer raises

    async def main(work: Work) -> None:
        failed = await work.failed(await work.create())
        assert failed.failure.code == code
        assert told in failed.failure.message
        assert failed.crashes == 0

    run(main, {"raise_at": 3, "error": error})


NO_MESSAGES = {
    "no msgpack": frame_of(b"\xc1"),
    "no message": frame_of(msgspec.msgpack.encode({"type": "Nonsense"})),
    "a field of another type": frame_of(msgspec.msgpack.encode({"type": "Started", "device": 1})),
    "no UTF-8": frame_of(b"\x82\xa4type\xa7Started\xa6device\xa2\xff\xfe"),
    "nested without end": frame_of(b"\x82\xa4type\xa4Beat\xa1x" + b"\x91" * 100_000 + b"\x01"),
    "a long message": HEADER.pack(MAX_FRAME_BYTES + 1),
    "a number without bounds": frame(Stepped(2**63, 6, 1.0, 0.5, None, None, 1e-4, 10, 0.01, checkpoint=False)),
}
TORN = {"a header": HEADER.pack(100)[:3], "a body": HEADER.pack(100) + b"x" * 99}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sent", "then"),
    [(sent, None) for sent in NO_MESSAGES.values()]
    + [(sent, then) for sent in TORN.values() for then in ("ends", "says no more")],
    ids=[*NO_MESSAGES, *(f"half of {name}, and it {then}" for name in TORN for then in ("ends", "says no more"))],
)
def test_what_no_trainer_would_say_ends_it_and_the_job_goes_on_from_its_checkpoint(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sent: bytes, then: str | None
) -> None:
    monkeypatch.setattr("server.finetune.supervisor.FAILURE_SECONDS", math.inf)  # nobody has to wait after a failure
    unreadable = ("The trainer sent a message that cannot be read", "The server could not work on")
    # A socket that is closed with something unread is reset: what was sent last may be lost with it.
    reasons = (*unreadable, "The trainer ended without a word (exit status 0)") if then == "ends" else unreadable
    said: list[str] = []

    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=2)
        work.go_on()
        await work.succeeded(job)
        assert not is_running(pid)
        assert work.jobs.stats.crashes == 1
        (told,) = [text for text in await work.said(job) if "crash 1 of" in text]
        assert told.startswith(reasons)
        said.append(told)
        counts = Counter(work.trained())
        assert set(counts.values()) <= {1, 2}
        assert counts[f"{job.id} 1"] == counts[f"{job.id} 2"] == 1  # from the checkpoint

    run(main, {"hold_at": 3, "send_at": 4, "send": sent.hex(), "then": then})
    logged = [record for record in caplog.records if record.levelname == "ERROR" and "ftjob-" in record.getMessage()]
    assert bool(logged) == said[0].startswith(unreadable)


def test_a_job_whose_every_trainer_talks_nonsense_fails_and_the_next_one_is_none_the_worse(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        failed = await work.failed(job)
        assert failed.failure.code == "trainer_crashed"
        assert "sent a message that cannot be read" in failed.failure.message
        other = await work.create(steps=2)
        await work.succeeded(other)

    run(main, {"send_at": 3, "send": NO_MESSAGES["no msgpack"].hex(), "then": "waits", "always": True})


def test_a_trainer_that_stands_still_is_killed_and_followed_by_another(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=2)
        await work.wait(job, lambda _: stands_still(pid))
        attempt = work.jobs.supervisor.attempts["train"]

        def has_ended(_: Job) -> bool:
            attempt._heard -= 2 * SILENCE  # at every look, since what it has said before may only be read now
            return not is_running(pid)

        await work.wait(job, has_ended)
        await work.succeeded(job)
        assert any("The trainer did not answer any more" in text for text in await work.said(job))

    run(main, {"signal_at": 3, "signal": "SIGSTOP"}, silence_limit=SILENCE)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSEGV, "The trainer was killed (SIGSEGV)"),
        (signal.SIGRTMIN + 1, f"The trainer was killed (signal {signal.SIGRTMIN + 1})"),
    ],
)
def test_a_trainer_that_is_killed_by_any_signal_has_crashed(number: int, said: str) -> None:
    assert ended_by(-number) == said


def test_the_trainer_yields_to_the_server(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=1)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == OOM_SCORE
        await work.jobs.cancel(job.id, "me")

    run(main, {"hold_at": 2})
