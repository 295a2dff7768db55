"""Torch stays on the trainer's side of the border, and frames cross it whole."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from server.finetune.messages import (
    MAX_FRAME_BYTES,
    Arguments,
    Beat,
    Finished,
    Recorded,
    from_trainer,
    to_trainer,
)
from server.finetune.process import TrainerProcess
from server.frames import HEADER, body_size, frame

HEAVY = "import sys, {}; print(sorted({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"


@pytest.mark.parametrize("rooms", ["server.finetune, server.api.fine_tuning", "server.finetune.worker"])
def test_neither_the_api_process_nor_a_trainer_that_starts_gets_torch_from_fine_tuning(rooms: str) -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY.format(rooms)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_messages_cross_in_both_directions() -> None:
    for message, read in ((Finished(7, "/x"), from_trainer), (Beat(), from_trainer), (Recorded(), to_trainer)):
        sent = frame(message)
        assert body_size(sent[: HEADER.size], MAX_FRAME_BYTES) == len(sent) - HEADER.size
        assert read(sent[HEADER.size :]) == message


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        body_size(HEADER.pack(MAX_FRAME_BYTES + 1), MAX_FRAME_BYTES)
    with pytest.raises(msgspec.DecodeError):
        from_trainer(frame(Recorded())[HEADER.size :])


WAITS = """
import socket, sys
from server.finetune.link import TrainerLink
from server.finetune.messages import Stepped
link = TrainerLink(socket.socket(fileno=int(sys.argv[1])))
for number in (1, 2):  # the second waits for the answer to the first
    link.step(Stepped(number, 2, 1.0, 0.5, None, None, 1e-4, 10, 0.01, checkpoint=False))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sent", [HEADER.pack(1) + b"\xc1", HEADER.pack(MAX_FRAME_BYTES + 1)])
def test_a_trainer_that_cannot_read_what_it_is_told_ends(sent: bytes) -> None:
    """It would beat, and wait, for ever."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", WAITS, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        ours.sendall(sent)
        _, said = process.communicate()
    assert process.returncode == 1
    assert "the API process was not understood" in said


def children() -> set[str]:
    """Of this thread, the dead that nobody has waited for included."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    arguments = Arguments(
        "train", "base", "supervised", str(tmp_path), "cpu", None, None, None, None, False, os.getpid(), 20
    )
    before = children()

    async def main() -> set[str]:
        starting = asyncio.create_task(TrainerProcess.start(arguments, "server.finetune.worker"))
        while children() == before:
            await asyncio.sleep(0)
        assert not starting.done()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return children()

    assert asyncio.run(main()) == before
