"""LoRA training steps on one long sequence: ours beside the usual peft + transformers loop, in one run, in turn.

One model of random weights (Llama-3.1-8B's shape), one adapter; only attention and loss change between contenders.
"torch *": transformers' sdpa attention on one backend, and the model's own loss, whose logits are [tokens, vocab].
"torch * + chunks": the same attention with our loss in chunks, so that attention alone is compared.

    python -m benchmarks.training --out benchmarks/results/training_h200.json
    python -m benchmarks.training --longest --out benchmarks/results/training_longest_h200.json
    python -m benchmarks.training --tiny          # a CPU-sized shape, to try the script itself
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine, model_folder
from benchmarks.training_longest import longest
from benchmarks.training_steps import Contender, contenders, step_times
from models import registry
from models.training import LoraSettings, TrainingPlan
from models.training.trainable import TrainableModel

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
#: Contenders compute the same function: their first losses differ by rounding only.
LOSS_TOLERANCE = 0.02
_MOST_POSITIONS = 2**21


def load(folder: Path, tokens: int, rank: int, device: torch.device) -> TrainableModel:
    plan = TrainingPlan(
        model=str(folder),
        lora=LoraSettings(rank=rank, alpha=2 * rank),
        max_length=tokens,
        micro_batch_tokens=tokens,
    )
    return TrainableModel(plan, registry.resolve(plan.model), device, "dummy")


def compare(model: TrainableModel, racers: dict[str, Contender], tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Per contender: tokens/s, seconds a step, peak memory in GiB and the first loss; or the reason why it has none."""
    results = step_times(model, racers, tokens, rounds)
    losses = [row["first_loss"] for row in results.values() if "first_loss" in row]
    if losses and max(losses) - min(losses) > LOSS_TOLERANCE * max(losses):
        raise SystemExit(f"the contenders do not compute the same loss: {results}")
    return results


def main(
    tokens: Annotated[int, typer.Option(help="Of the one sequence of a step.")] = 32768,
    rank: int = 16,
    rounds: Annotated[int, typer.Option(help="Timed steps of each contender, in turn.")] = 5,
    only: Annotated[str, typer.Option(help="Contenders whose names contain this.")] = "",
    find_longest: Annotated[bool, typer.Option("--longest", help="Find the longest sequence instead.")] = False,
    tiny: Annotated[bool, typer.Option(help="A shape that a CPU runs in seconds.")] = False,
    out: Path | None = None,
    commit: Annotated[str | None, typer.Option(help="Recorded as the commit where there is no git.")] = None,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if tiny:
        tokens = min(tokens, 128)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder.write(
            Path(scratch) / "llama", max_position_embeddings=_MOST_POSITIONS, **(TINY if tiny else {})
        )
        model = load(folder, tokens, rank, device)
        shape = json.loads((folder / "config.json").read_text())
    racers = {name: racer for name, racer in contenders(model).items() if only in name}
    if not racers:
        raise typer.BadParameter(f"no contender's name contains {only!r}", param_hint="--only")
    kind = "training_longest" if find_longest else "training"
    result = {
        "benchmark": kind,
        "machine": machine.facts(commit),
        "packages": {name: machine.installed(name) for name in ("transformers", "peft")},
        "model": shape,
        "lora_rank": rank,
        "tokens": tokens,
        "rounds": rounds,
        "contenders": longest(model, racers, tokens) if find_longest else compare(model, racers, tokens, rounds),
    }
    text = json.dumps(result, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
