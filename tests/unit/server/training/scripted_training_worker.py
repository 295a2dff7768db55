"""A training process whose session does what a script says, without torch. Its socket, beats and end are the real ones.

The script is the JSON file that the variable TRAINING_SCRIPT names; its folder gets a line for every command.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from models.training.folder import write_folder
from server.answering import SignReader
from server.engine.parent import die_with_parent
from server.training.calls import Compute, OptimStep
from server.training.link import WorkerLink
from server.training.messages import Arguments, Command, Done, Failed, Load, Ready, Save, Unable
from server.training.turns import take_turns

VOCABULARY, MAX_LENGTH = 100, 32


class ScriptedSession:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: Counter[str] = Counter()

    @property
    def script(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def answer(self, command: Command) -> Done | Failed:
        kind = type(command.work).__name__
        with (self.path.parent / "log").open("a") as log:
            log.write(f"{command.model_id} {kind}\n")
        script = self.script
        if script.get("hold") == kind:
            never = threading.Event()
            while not (self.path.parent / "go").exists():
                never.wait(0.01)
        if script.get("send_at") == kind:
            self.send(bytes.fromhex(script["send"]), script.get("then"))
        if script.get("signal_at") == kind:
            os.kill(os.getpid(), script["signal"])
        if script.get("fail") == kind:
            return Failed(command.command_id, script["kind"], script.get("said", "it is so"))
        return self.done(command)

    def send(self, data: bytes, then: str | None) -> None:
        """Past the link, on its socket; then it ends at once, says no more, or goes on."""
        connected = socket.socket(fileno=os.dup(int(sys.argv[1])))
        connected.sendall(data)
        match then:
            case "ends":
                os._exit(0)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "says no more":
                connected.shutdown(socket.SHUT_WR)
                threading.Event().wait()
            case "hangs":
                threading.Event().wait()

    def save(self, folder: Path, files: dict[str, str]) -> None:
        """As the real session does it; at the script's instant the process kills itself."""
        rename, instant = Path.rename, self.script.get("die_at")

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def rename_and_die(path: Path, target: Path) -> None:
            rename(path, target)
            die()

        match instant:
            case "written":
                Path.rename = die  # type: ignore[method-assign,assignment]
            case "out of the way":
                Path.rename = rename_and_die  # type: ignore[method-assign,assignment]
            case "replaced":
                shutil.rmtree = die  # type: ignore[assignment]

        def fill(place: Path) -> None:
            for name, text in files.items():
                (place / name).write_text(text)

        write_folder(folder, fill)

    def done(self, command: Command) -> Done:
        number, model, work = command.command_id, command.model_id, command.work
        match work:
            case Compute():
                zeros = tuple(bytes(len(datum.tokens)) for datum in work.data)
                return Done(number, loss=1.5, tokens=work.num_tokens, logprobs=zeros, steps=self.steps[model])
            case OptimStep():
                self.steps[model] += 1
                return Done(number, grad_norm=2.5, steps=self.steps[model])
            case Save():
                self.save(Path(work.folder), {**work.files, "steps": str(self.steps[model])})
            case Load():
                self.steps[model] = int((Path(work.folder) / "steps").read_text()) if work.optimizer else 0
        return Done(number, parameters=10, steps=self.steps[model])


def main() -> None:
    link = WorkerLink(socket.socket(fileno=int(sys.argv[1])))
    arguments = msgspec.json.decode(sys.argv[2], type=Arguments)
    die_with_parent(arguments.parent_pid)
    session = ScriptedSession(Path(os.environ["TRAINING_SCRIPT"]))
    (session.path.parent / "arguments").write_text(sys.argv[2])
    if session.script.get("await_sign"):
        assert arguments.answering_fd is not None
        sign, never = SignReader(arguments.answering_fd), threading.Event()
        while not sign.is_up():
            never.wait(0.01)
    if session.script.get("unable"):
        link.send(Unable("The base model cannot be trained on this server: no linear head"))
    else:
        link.send(Ready("cpu", MAX_LENGTH, VOCABULARY))
        take_turns(link, session.answer)
    link.close()
    os._exit(0)


if __name__ == "__main__":
    main()
