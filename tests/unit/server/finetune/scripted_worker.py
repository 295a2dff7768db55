"""A trainer process whose trainer does what a script says: small, deterministic, with checkpoints as the real one's.
The process around it (link, lease, messages, ends) is the real one.

The script is the JSON file that the variable FINE_TUNING_SCRIPT names; its folder gets a line for every step trained.
"""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from models.training import (
    DiskFullError,
    DivergedError,
    Example,
    ModelTooLargeError,
    OtherRunError,
    Outcome,
    OutOfMemoryError,
    Pacer,
    PlanError,
    StepReport,
    TrainingPlan,
    Verdict,
)
from server.finetune import worker
from server.finetune.dataset import Dataset, DatasetError
from server.finetune.folders import TRAINING, JobFolder
from server.finetune.hyperparameters import total_steps
from server.finetune.messages import Arguments


def out_of_memory() -> Exception:
    error = OutOfMemoryError("cpu has too little memory for this plan")
    error.what = "9 tokens did not fit"
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "diverged": lambda: DivergedError("the gradient was not finite"),
    "full": lambda: OSError(28, "No space left on device"),
    "full for a checkpoint": lambda: DiskFullError("checkpoints/3 cannot be written"),
    "another run": lambda: OtherRunError("/srv/run/checkpoints belongs to another plan"),
    # UnsupportedModelError is one, and takes seconds to import: a minute on a busy machine, to which trainers yield.
    "unsupported": lambda: NotImplementedError("TinyForCausalLM fails the self-test"),
    "out of memory": out_of_memory,
    "too large": lambda: ModelTooLargeError("Full fine-tuning keeps 9 GiB; cpu has 1 GiB free"),
}


class ScriptedTrainer:
    def __init__(
        self,
        plan: TrainingPlan,
        examples: Sequence[Example],
        *_: Any,
        source: None,
        pacer: Pacer | None,
        spare_bytes: int,
        chat_template: str | None,
    ) -> None:
        self.plan, self.examples, self.folder, self.pacer = plan, examples, _[1], pacer
        path = Path(os.environ["FINE_TUNING_SCRIPT"])
        self.script: dict[str, Any] = json.loads(path.read_text())
        self.script_folder = path.parent
        (self.script_folder / "plan").write_text(plan.to_json())
        self._act(0)

    def run(self, on_step: Callable[[StepReport], Verdict]) -> Outcome:
        total = total_steps(len(self.examples), self.plan.n_epochs, self.plan.batch_size)
        state = self._newest() or {"step": 0, "weights": str(self.plan.seed)}
        if state["step"] and on_step(self._report(state, total, saved=True)) is Verdict.PAUSE:
            return Outcome(False, state["step"], 0, None)
        while state["step"] < total:
            number = state["step"] + 1
            self._act(number)
            state = {"step": number, "weights": sha256(f"{state['weights']} {number}".encode()).hexdigest()}
            with (self.script_folder / "trained").open("a") as log:
                log.write(f"{self.folder.parent.name} {number}\n")
            due = number % self.plan.checkpoint_every == 0 or number == total
            if due:
                self._save(state)
            verdict = on_step(self._report(state, total, saved=due))
            if verdict is Verdict.PAUSE:
                if not due:
                    self._save(state)
                    on_step(self._report(state, total, saved=True))
                return Outcome(False, number, 0, None)
        names = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "GOMP_SPINCOUNT")  # for torch: a GPU's two, a CPU's
        (self.script_folder / "environment").write_text(" ".join(os.environ.get(name, "unset") for name in names))
        result = self.folder / "result"
        result.mkdir(exist_ok=True)
        (result / "weights").write_text(state["weights"])
        return Outcome(True, total, total * 10, result)

    def _act(self, step: int) -> None:
        script = self.script
        if step == script.get("hold_at"):
            never = threading.Event()
            (self.script_folder / "holds").touch()
            while not (self.script_folder / "go").exists():
                never.wait(0.01)
        if step == script.get("rest_at") and self.pacer is not None:
            self._rest(self.pacer)
        if step == script.get("raise_at"):
            raise ERRORS[script["error"]]()
        if step == script.get("send_at") and (script.get("always") or self._first_time()):
            self._send(bytes.fromhex(script["send"]))
        if step == script.get("signal_at") and (script.get("always") or self._first_time()):
            os.kill(os.getpid(), getattr(signal, script["signal"]))

    def _rest(self, pacer: Pacer) -> None:
        """After a second of work, once somebody is answering."""
        never = threading.Event()
        while not pacer.is_answering():
            never.wait(0.01)
        (self.script_folder / "rests").touch()
        pacer.boundary(lambda: never.wait(1.0))

    def _send(self, data: bytes) -> None:
        """Past the link, on its socket; then it ends at once, says no more, waits, or goes on."""
        connected = socket.socket(fileno=os.dup(int(sys.argv[1])))
        connected.sendall(data)
        match self.script.get("then"):
            case "ends":
                os._exit(0)
            case "says no more":
                connected.shutdown(socket.SHUT_WR)
                threading.Event().wait()
            case "waits":
                threading.Event().wait()

    def _first_time(self) -> bool:
        mark = self.script_folder / "signalled"
        first = not mark.exists()
        mark.touch()
        return first

    def _report(self, state: dict[str, Any], total: int, *, saved: bool) -> StepReport:
        number = state["step"]
        place = self.folder / "checkpoint.json" if saved else None
        return StepReport(number, total, 2.0 / number, 0.5, None, None, 1e-4, 10, 0.01, place)

    def _newest(self) -> dict[str, Any] | None:
        path = self.folder / "checkpoint.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _save(self, state: dict[str, Any]) -> None:
        unfinished = self.folder / "checkpoint.part"
        unfinished.write_text(json.dumps(state))
        unfinished.rename(self.folder / "checkpoint.json")


def read(_: Arguments, folder: JobFolder, __: int | None) -> tuple[Dataset, None]:
    """Every line an example of two tokens: no tokenizer, which takes seconds to import."""
    lines = folder.dataset(TRAINING).read_bytes().splitlines()
    if b"bad" in lines[-1]:
        raise DatasetError(f"Line {len(lines)}: it is bad.", TRAINING)
    examples = tuple(Example((1, 2), (False, True)) for _ in lines)
    return Dataset(examples, 2 * len(lines), 2, range(1, len(lines) + 1)), None


def check_size(_: None, most: int) -> None:
    parameters = json.loads(Path(os.environ["FINE_TUNING_SCRIPT"]).read_text()).get("parameters", 1)
    if parameters > most:
        raise PlanError(f"the base model has {parameters} parameters")


if __name__ == "__main__":
    worker.check_size = check_size
    worker.read_datasets = read
    worker.model_source = lambda _: None  # there is no such model
    worker.leave_out_torch = lambda: None  # nobody imports transformers, which takes a second
    worker.main(ScriptedTrainer)
