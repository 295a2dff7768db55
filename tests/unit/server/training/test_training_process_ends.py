"""However the training process ends, every open call ends with a reason, and the next model gets another process."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from live_training import (
    SAMPLE,
    STEP,
    Run,
    Work,
    compute,
    is_running,
    load,
    save,
    script,
    until,
)

from server.errors import (
    TrainingModelLost,
)
from server.frames import HEADER, frame
from server.training import Computed, Loaded, Stepped
from server.training.messages import MAX_FRAME_BYTES, Failed, Ready

pytestmark = pytest.mark.timeout(180)


def test_a_killed_process_fails_every_open_call_and_says_where_to_go_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(work: Work) -> None:
        model, other = await work.create(), await work.create("you")
        await work.do(model, compute(), STEP, save("one"), compute(), STEP)
        script(tmp_path, monkeypatch, hold="Compute")
        open_calls = work.submit(model, compute(backward=False), STEP, save("two"))
        theirs = work.submit(other, compute(backward=False))
        pid = work.pid
        assert pid is not None
        await until(lambda: len(work.log()) == 8)  # the first of them is held
        os.kill(pid, signal.SIGKILL)
        for future in open_calls:
            lost = await work.outcome(future)
            assert isinstance(lost, TrainingModelLost)
            assert "The training process was killed (SIGKILL" in lost.message
            path = f"longwave://{model.id}/weights/one"
            assert f"Its weights after optimiser step 1 are saved: create a model with the same lora_config and " \
                f"load_weights from {path}." in lost.message  # fmt: skip
        lost = await work.outcome(theirs[0])
        assert isinstance(lost, TrainingModelLost)
        assert "Nothing of it was saved" in lost.message
        with pytest.raises(TrainingModelLost, match="weights/one"):
            work.training.submit(model, None, STEP)
        assert work.training.submit(model, 1, compute()).outcome is not None  # what has ended is still told
        assert work.training.stats.crashes == 1
        script(tmp_path, monkeypatch)
        again = await work.create()
        assert work.pid not in (None, pid)
        assert (await work.do(again, load(model), compute(), STEP))[0] == Loaded(
            f"longwave://{model.id}/weights/one", 1
        )
        assert again.steps == 2

    run(main)


@pytest.mark.parametrize(
    ("scripted", "limits", "told"),
    [
        ({"signal_at": "Compute", "signal": signal.SIGSTOP}, {"silence_limit": 0.5}, "did not answer any more"),
        ({"hold": "Compute"}, {"call_seconds": 0.3}, "did not finish a call within 0 s"),
        ({"signal_at": "Compute", "signal": signal.SIGSEGV}, {}, r"was killed \(SIGSEGV\)"),
        ({"signal_at": "Compute", "signal": 40}, {}, r"was killed \(signal 40\)"),
    ],
)
def test_nothing_hangs_when_the_process_does(
    run: Run, scripted: dict[str, Any], limits: dict[str, float], told: str
) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        pid = work.pid
        assert pid is not None
        limit(work, **limits)
        _, *open_calls = work.submit(model, STEP, compute(), STEP)  # silence is limited from the first answer on
        for future in open_calls:
            lost = await work.outcome(future)
            assert isinstance(lost, TrainingModelLost)
            assert re.search(told, lost.message), lost.message
        await until(lambda: not is_running(pid))

    run(main, scripted=scripted)


def limit(work: Work, **limits: float) -> None:
    """Of a process that is there: its start may take longer."""
    for name, seconds in limits.items():
        setattr(work.training.shared.child, f"_{name}", seconds)


def test_a_call_has_its_time_from_when_the_process_begins_with_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(work: Work) -> None:
        first, second = await work.create(), await work.create()
        child = work.training.shared.child
        assert child is not None
        (computing,) = work.submit(first, compute())
        await until(lambda: work.log()[-1].endswith("Compute"))
        limit(work, call_seconds=0.05)
        (stepping,) = work.submit(second, STEP)
        await until(lambda: len(child._replies) == 2)
        await asyncio.sleep(0.2)  # longer than it may take, behind the other one
        script(tmp_path, monkeypatch, signal_at="OptimStep", signal=signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert isinstance(await work.outcome(computing), Computed)
        lost = await work.outcome(stepping)
        assert isinstance(lost, TrainingModelLost)
        assert "did not finish a call within 0 s" in lost.message

    run(main, scripted={"hold": "Compute"})


def test_a_call_has_its_time_also_behind_one_that_nobody_waits_for_any_more(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        first, second = await work.create(), await work.create()
        work.submit(first, compute())
        await until(lambda: work.log()[-1].endswith("Compute"))
        deleting = asyncio.create_task(work.training.delete(first))
        await until(lambda: first.end is not None)
        limit(work, call_seconds=0.05)
        (stepping,) = work.submit(second, STEP)
        await asyncio.sleep(0.2)  # longer than it may take
        assert stepping.outcome is None
        limit(work, call_seconds=60.0)
        (tmp_path / "go").touch()
        assert await work.outcome(stepping) == Stepped(2.5, 1)
        await deleting

    run(main, scripted={"hold": "Compute"})


def test_a_sample_is_a_call_like_others_when_the_process_is_gone(run: Run) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        (lost,) = await work.do(model, SAMPLE)
        assert isinstance(lost, TrainingModelLost)

    run(main, scripted={"signal_at": "Save", "signal": signal.SIGKILL})


NO_MESSAGES = {
    "no msgpack": HEADER.pack(1) + b"\xc1",
    "a field of another type": frame(Failed(1, "worse", "x")),  # type: ignore[arg-type]
    "nested without end": HEADER.pack(100_012) + b"\x82\xa4type\xa4Beat\xa1x" + b"\x91" * 99_999 + b"\x01",
    "a long message": HEADER.pack(MAX_FRAME_BYTES + 1),
    "ready a second time": frame(Ready("cpu", 32, 100)),
}
TORN = {"a header": HEADER.pack(100)[:3], "a body": HEADER.pack(100) + b"x" * 99}


UNREADABLE = "sent a message that cannot be read"
ENDS = {
    "ends": r"ended without a word \(exit status 0\)",
    "is killed": r"was killed \(SIGKILL: too little memory, perhaps\)",
    "says no more": "closed its connection and did not end",
}


@pytest.mark.parametrize(
    ("sent", "then", "told"),
    [
        *(pytest.param(sent, "hangs", UNREADABLE, id=name) for name, sent in NO_MESSAGES.items()),
        *(
            pytest.param(sent, then, told, id=f"half of {name}, and it {then}")
            for name, sent in TORN.items()
            for then, told in ENDS.items()
        ),
        pytest.param(b"", "says no more", ENDS["says no more"], id="nothing, and it says no more"),
    ],
)
def test_what_no_process_would_say_ends_it(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sent: bytes,
    then: str,
    told: str,
) -> None:
    monkeypatch.setattr("server.training.child.END_SECONDS", 2.0)

    async def main(work: Work) -> None:
        model = await work.create()
        pid = work.pid
        assert pid is not None
        first, second = work.submit(model, compute(), STEP)
        for future in (first, second):
            lost = await work.outcome(future)
            assert isinstance(lost, TrainingModelLost)
            assert re.match(f"The training process {told}, and the model", lost.message), lost.message
        assert not is_running(pid)
        assert work.training.stats.crashes == 1
        script(tmp_path, monkeypatch)
        again = await work.create()
        assert isinstance((await work.do(again, compute()))[0], Computed)

    run(main, scripted={"send_at": "Compute", "send": sent.hex(), "then": then})
    logged = [record for record in caplog.records if "the training process was not understood" in record.getMessage()]
    assert len(logged) == (1 if sent else 0)
