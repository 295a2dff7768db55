"""kill -9 at any instant: the run goes on from its last whole checkpoint and ends with the bits of a run left alone."""

import multiprocessing
import random
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from killed_runs import train
from training_runs import tiny_plan

from models.training import LoraSettings, TrainingPlan

#: Children are forked from a process that has imported everything: a second each instead of several.
FORKS = multiprocessing.get_context("forkserver")
EVERY = 2  # steps
SYNCS = 7  # of a checkpoint
STEPS = 6
STRIDE = 6  # of the syncs that a session kills at; 1 takes minutes

PLANS: dict[str, dict[str, Any]] = {
    "lora with dropout": {"lora": LoraSettings(4, 8, dropout=0.2)},
    "full": {"lora": None, "learning_rate": 1e-3},
    "dpo full": {"lora": None, "method": "dpo", "learning_rate": 1e-3},
}


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    FORKS.set_forkserver_preload(["models.training.trainer", "transformers.models.llama.modeling_llama"])


class Run:
    """A plan in a folder, carried out by one process after another."""

    def __init__(self, plan: TrainingPlan, folder: Path) -> None:
        self._plan, self.folder = plan, folder

    def start(self, die_at_sync: int | None = None) -> tuple[ForkServerProcess, Any]:
        hear, tell = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=train, args=(self._plan.to_json(), self.folder, die_at_sync, tell))
        process.start()
        tell.close()
        return process, hear

    def finish(self) -> list[int]:
        """Runs to the end; the steps that were reported."""
        process, hear = self.start()
        steps = list(heard(hear))
        process.join()
        assert process.exitcode == 0
        return steps

    def result(self) -> bytes:
        return next((self.folder / "result").glob("*.safetensors")).read_bytes()


def heard(pipe: Any) -> Iterator[int]:
    """The steps that a process reports, until it ends."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


@pytest.fixture(scope="module")
def uninterrupted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The results of runs that nobody killed."""
    results = {}
    for name, changes in PLANS.items():
        run = Run(tiny_plan(tiny_folder, checkpoint_every=EVERY, **changes), tmp_path_factory.mktemp("whole"))
        assert run.finish() == list(range(1, STEPS + 1))
        results[name] = run.result()
    return results


def survives(tiny_folder: Path, folder: Path, name: str, sync: int, expected: bytes) -> bool:
    """Whether there was such a sync to be killed at; if so, the run that was killed ends with the expected bits."""
    run = Run(tiny_plan(tiny_folder, checkpoint_every=EVERY, **PLANS[name]), folder)
    process, hear = run.start(die_at_sync=sync)
    before = list(heard(hear))
    process.join()
    if process.exitcode == 0:
        return False
    assert process.exitcode == -signal.SIGKILL
    after = run.finish()
    assert run.result() == expected
    assert after[-1] == STEPS
    # At most the steps since the last checkpoint are done again; its own step is reported once more.
    assert after[0] > max(before, default=0) - EVERY
    return True


@pytest.mark.parametrize("sync", [1, SYNCS, 2 * SYNCS, 4 * SYNCS - 2, 6 * SYNCS + 5])
def test_killed_while_writing_a_checkpoint_or_the_result(
    sync: int, tiny_folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    name = "lora with dropout"
    assert survives(tiny_folder, tmp_path, name, sync, uninterrupted[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # about 100 processes with STRIDE = 1
@pytest.mark.parametrize("name", PLANS)
def test_killed_before_and_after_syncs(
    name: str, tiny_folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    """Of all checkpoints, of the result, and with "dpo full" of the reference before them: every STRIDE-th one, from a
    first one that differs from session to session."""
    first, kills = random.randint(1, STRIDE), 0
    while survives(tiny_folder, tmp_path / str(kills), name, first + kills * STRIDE, uninterrupted[name]):
        kills += 1
    assert kills >= 40 // STRIDE, f"from sync {first} on"


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANS)
def test_killed_again_and_again_at_random(
    name: str, tiny_folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    chance = random.Random(3)
    run = Run(tiny_plan(tiny_folder, checkpoint_every=EVERY, **PLANS[name]), tmp_path)
    kills = 0
    while kills < 8:
        process, hear = run.start()
        hear.poll(None)  # it has reported a step, or ended
        process.join(chance.random() * 0.1 if kills else 0)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills
    run.finish()
    assert run.result() == uninterrupted[name]
