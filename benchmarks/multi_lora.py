"""What LoRA adapters cost a step: the engine's runner without slots, with slots that no row uses, with one adapter and
with as many as there are slots, on random weights of a real shape.

Prints and writes milliseconds of a decode step and of a prefill step, and of reading an adapter and filling a slot.

    python -m benchmarks.multi_lora --out benchmarks/results/multi_lora.json                  # 8B on a GPU
    python -m benchmarks.multi_lora --device cpu --small --rows 8 --context 64 --prompt 64    # to try it
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import machine, model_folder
from benchmarks.arguments import write_out
from models import loader, registry
from models.adapters import LoraLimits, find_linears
from models.batch import NO_ADAPTER, SamplingParams, ScheduledSeq, StepBatch
from models.loader import LoadedModel
from models.runner import ModelRunner

BLOCK_SIZE = 64
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 32}


def write_adapter(loaded: LoadedModel, folder: Path, rank: int, seed: int) -> str:
    """A random adapter of every linear layer, as PEFT saves one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in find_linears(loaded.model).items():
        key = f"base_model.model.{name}.lora_"
        tensors[f"{key}A.weight"] = torch.randn(rank, layer.in_features, generator=generator).mul_(0.02).bfloat16()
        tensors[f"{key}B.weight"] = torch.randn(layer.out_features, rank, generator=generator).mul_(0.02).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return str(folder)


def make_runner(loaded: LoadedModel, options: argparse.Namespace, lora: LoraLimits | None) -> ModelRunner:
    longest = options.context + 1
    runner = ModelRunner(
        loaded,
        block_size=BLOCK_SIZE,
        max_num_seqs=options.rows,
        max_num_batched_tokens=max(options.prompt, options.rows),
        max_model_len=max(longest, options.prompt + 1),
        num_blocks=options.rows * -(-longest // BLOCK_SIZE) + -(-options.prompt // BLOCK_SIZE) + 1,
        lora=lora,
    )
    runner.warm_up()
    for slot in range(options.rows):
        runner.add_request(slot, GREEDY, [1])
    return runner


def decode(options: argparse.Namespace, adapters: Sequence[int]) -> StepBatch:
    """One token of `rows` sequences at the end of `context` tokens, which name the adapters in turn."""
    width = -(-(options.context + 1) // BLOCK_SIZE)
    return StepBatch(
        tuple(
            ScheduledSeq(
                slot,
                [5],
                options.context,
                range(1 + slot * width, 1 + (slot + 1) * width),
                True,
                adapters[slot % len(adapters)],
            )
            for slot in range(options.rows)
        )
    )


def prefill(options: argparse.Namespace, adapters: Sequence[int]) -> StepBatch:
    """One prompt in one step, with the last of the adapters."""
    blocks = range(1, 1 + -(-options.prompt // BLOCK_SIZE))
    return StepBatch((ScheduledSeq(0, [5] * options.prompt, 0, blocks, True, adapters[-1]),))


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """The median, up to when the device has done it."""
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(sorted(times[3:])[rounds // 2], 3)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = SMALL if options.small else {}
    source = registry.resolve(str(model_folder.write(folder / "model", **shape)))
    loaded = loader.load(source, device=options.device, load_format="dummy")
    steps: dict[str, dict[str, float]] = {}

    def take(name: str, runner: ModelRunner, adapters: Sequence[int]) -> None:
        batches = {"decode": decode(options, adapters), "prefill": prefill(options, adapters)}
        steps[name] = {
            kind: milliseconds(partial(runner.execute, batch), options.rounds) for kind, batch in batches.items()
        }
        columns = "".join(f"{kind} {value:9.3f} ms   " for kind, value in steps[name].items())
        print(f"{name:32}{columns}", flush=True)  # noqa: T201

    take("no slots", make_runner(loaded, options, None), [NO_ADAPTER])
    runner = make_runner(loaded, options, LoraLimits(options.max_loras, options.rank))
    slots = runner.adapters
    assert slots is not None
    take("slots, base model only", runner, [NO_ADAPTER])
    read, placed = [], []
    for number in range(options.max_loras):
        path = write_adapter(loaded, folder / f"adapter-{number}", options.rank, number)
        begin = time.perf_counter()
        slots.read(number, path)
        read.append(1e3 * (time.perf_counter() - begin))
        placed.append(milliseconds(partial(slots.place, number, number), 3))
    take("one adapter", runner, [0])
    everything = list(range(options.max_loras))
    take(f"{options.max_loras} adapters and the base model", runner, [NO_ADAPTER, *everything])
    slots.remove()
    other = {"read_ms": round(max(read), 1), "place_ms": round(max(placed), 2)}
    print(other)  # noqa: T201
    return {"steps_ms": steps, **other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small shape instead of Llama-3.1-8B's")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="sequences of the decode step")
    parser.add_argument("--context", type=int, default=1024, help="tokens before each of them")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--commit", help="recorded where there is no git")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    arguments = {name: value for name, value in vars(options).items() if name not in ("out", "commit")}
    if options.out is not None:
        write_out(
            options.out,
            json.dumps({"machine": machine.facts(options.commit), "arguments": arguments, **result}, indent=1) + "\n",
        )


if __name__ == "__main__":
    main()
