"""LoRA training steps on one long sequence: ours beside the usual peft + transformers loop, in one run, in turn.

One model of random weights (Llama-3.1-8B's shape), one adapter; only attention and loss change between contenders.
"torch *": transformers' sdpa attention on one backend, and the model's own loss, whose logits are [tokens, vocab].
"torch * + chunks": the same attention with our loss in chunks, so that attention alone is compared.

    python -m benchmarks.training --out benchmarks/results/training_h200.json
    python -m benchmarks.training --longest --out benchmarks/results/training_longest_h200.json
    python -m benchmarks.training --layers 4      # fewer layers, where all take too long
    python -m benchmarks.training --tiny          # a CPU-sized shape, to try the script itself

It says on stderr how far it is, and `--out` holds after every step what is known by then. Memory is allocated as in our
trainer's process, by all contenders (PYTORCH_ALLOC_CONF).
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine, model_folder
from benchmarks.arguments import write_out
from benchmarks.training_longest import longest
from benchmarks.training_steps import Results, contenders, step_times
from models import registry
from models.training import LoraSettings, TrainingPlan
from models.training.trainable import TrainableModel
from server.child_process import TRAINING

_MOST_POSITIONS = 2**21
_ALLOCATOR = "PYTORCH_ALLOC_CONF"  # torch reads it when it first asks for memory of a GPU


def load(folder: Path, tokens: int, rank: int, device: torch.device) -> TrainableModel:
    plan = TrainingPlan(
        model=str(folder),
        lora=LoraSettings(rank=rank, alpha=2 * rank),
        max_length=tokens,
        micro_batch_tokens=tokens,
    )
    return TrainableModel(plan, registry.resolve(plan.model), device, "dummy")


class Report:
    """The JSON, written anew whenever there is more to say: a run that is killed leaves what it had found."""

    def __init__(self, facts: dict[str, Any], out: Path | None) -> None:
        self._facts = facts
        self._out = out
        self._begin = time.perf_counter()

    def __call__(self, text: str, results: Results) -> None:
        self.say(text)
        if self._out is not None:
            write_out(self._out, self.json(results) + "\n")

    def say(self, text: str) -> None:
        typer.echo(f"{time.perf_counter() - self._begin:6.1f} s  {text}", err=True)

    def json(self, results: Results) -> str:
        return json.dumps({**self._facts, "contenders": results}, indent=1)


def main(
    tokens: Annotated[int, typer.Option(help="Of the one sequence of a step.")] = 32768,
    rank: int = 16,
    rounds: Annotated[int, typer.Option(help="Timed steps of each contender, in turn: at most.")] = 3,
    seconds: Annotated[float, typer.Option(help="No further round begins that would end after that.")] = 200.0,
    layers: Annotated[int | None, typer.Option(help="Of the model, when all of them take too long.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A contender; may be repeated, in that order. All by default.")
    ] = None,
    find_longest: Annotated[bool, typer.Option("--longest", help="Find the longest sequence instead.")] = False,
    tiny: Annotated[bool, typer.Option(help="A shape that a CPU runs in seconds.")] = False,
    out: Path | None = None,
    commit: Annotated[str | None, typer.Option(help="Recorded as the commit where there is no git.")] = None,
) -> None:
    os.environ.setdefault(_ALLOCATOR, TRAINING[_ALLOCATOR])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if tiny:
        tokens = min(tokens, 128)
    changes = {**(model_folder.TINY if tiny else {}), **({} if layers is None else {"num_hidden_layers": layers})}
    facts: dict[str, Any] = {
        "benchmark": "training_longest" if find_longest else "training",
        "machine": machine.facts(commit),
        "packages": {name: machine.installed(name) for name in ("transformers", "peft")},
        "allocator": os.environ[_ALLOCATOR],
        "lora_rank": rank,
        "tokens": tokens,
        "rounds": rounds,
    }
    report = Report(facts, out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder.write(Path(scratch) / "llama", max_position_embeddings=_MOST_POSITIONS, **changes)
        facts["model"] = json.loads((folder / "config.json").read_text())
        model = load(folder, tokens, rank, device)
    report.say(f"{facts['model']['num_hidden_layers']} layers of random weights on {device}")
    racers = contenders(model)
    if unknown := set(only or ()) - racers.keys():
        raise typer.BadParameter(f"{sorted(unknown)}: there are {list(racers)}", param_hint="--only")
    racers = {name: racers[name] for name in only or racers}
    if find_longest:
        results = longest(model, racers, tokens, report)
    else:
        results = step_times(model, racers, tokens, rounds, seconds, report)
    typer.echo(report.json(results))


if __name__ == "__main__":
    typer.run(main)
