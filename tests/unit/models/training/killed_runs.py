"""Runs in processes of their own, which die by SIGKILL where they are told to."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from training_runs import random_examples, random_preferences

from models.training import Trainer, TrainingPlan, Verdict


def train(plan: str, folder: Path, die_at_sync: int | None, steps: Any) -> None:
    """Runs to the end, or to the n-th fsync of the process (from 1), before or after which it is killed.

    A checkpoint syncs its four files, its manifest, its folder, and after the rename the folder above. An odd number
    dies before the sync, an even one after it. `steps`: a pipe that hears of every step.
    """
    torch.set_num_threads(1)
    if die_at_sync is not None:
        _die_at_sync(die_at_sync)
    whole = TrainingPlan.from_json(plan)
    preferences = whole.method == "dpo"
    examples: Any = random_preferences(10) if preferences else random_examples(10)

    def told(report: Any) -> Verdict:
        steps.send(report.step)
        return Verdict.CONTINUE

    Trainer(whole, examples, None, folder, "cpu").run(told)


def _die_at_sync(which: int) -> None:
    fsync, calls = os.fsync, [0]

    def counted(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == (which + 1) // 2 and which % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)
        if calls[0] == which // 2 and not which % 2:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = counted
