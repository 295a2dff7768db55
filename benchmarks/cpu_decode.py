"""The quick start's speed on a CPU: our runner, without scheduler and server, against transformers' generate with eager
attention and with its default, SDPA; the bundled model, in float32 and in bfloat16, as which it is stored.

They take turns in one process, best round each. Prints and writes tokens per second of one request and of several
at once, a 512-token prompt's time, and the paged attention of one layer; and which dtype the server chooses here.

    python benchmarks/cpu_decode.py --out benchmarks/results/quick_start_cpu.json
    python benchmarks/cpu_decode.py --threads 1 --clock cpu      # on a machine with other work to do
    python benchmarks/cpu_decode.py --beside 1                   # beside a process that keeps a core busy
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import attention_backend  # noqa: E402
from attention_backend.metadata import PagedMetadata  # noqa: E402
from benchmarks import machine  # noqa: E402
from benchmarks.arguments import positive  # noqa: E402
from models import loader, registry  # noqa: E402
from models.batch import SamplingParams, ScheduledSeq, StepBatch  # noqa: E402
from models.descriptions import read_config  # noqa: E402
from models.errors import ModelNotFoundError  # noqa: E402
from models.progress_bars import without_progress_bars  # noqa: E402
from models.runner import ModelRunner  # noqa: E402

BLOCK_SIZE = 64
TOGETHER = 8
DTYPES = ("float32", "bfloat16")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Ours:
    """The runner, driven as the engine drives it: the prompts in one step, then a token of each at a time."""

    def __init__(self, model: str, longest: int, dtype: loader.DTypeName = "float32") -> None:
        loaded = loader.load(registry.resolve(model), dtype=dtype, device="cpu")
        self.config = loaded.config
        self._blocks = -(-longest // BLOCK_SIZE)
        self._runner = ModelRunner(
            loaded,
            block_size=BLOCK_SIZE,
            max_num_seqs=TOGETHER,
            max_num_batched_tokens=TOGETHER * longest,
            max_model_len=longest,
            num_blocks=TOGETHER * self._blocks + 1,
        )
        self._runner.warm_up()

    def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        # Pages of the sequences alternate, as they do when sequences grow side by side.
        tables = [[1 + slot + j * len(prompts) for j in range(self._blocks)] for slot in range(len(prompts))]
        for slot, prompt in enumerate(prompts):
            self._runner.add_request(slot, GREEDY, prompt)
        tokens: list[list[int]] = [[] for _ in prompts]
        new, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for _ in range(count):
            seqs = (ScheduledSeq(slot, new[slot], computed[slot], tables[slot], True) for slot in range(len(prompts)))
            output = self._runner.execute(StepBatch(tuple(seqs)))
            for slot, token in enumerate(output.token_ids):
                computed[slot] += len(new[slot])
                new[slot] = [token]
                tokens[slot].append(token)
        for slot in range(len(prompts)):
            self._runner.remove_request(slot)
        return tokens


class Theirs:
    """transformers' own generate over the same folder."""

    def __init__(self, model: str, attention: str, dtype: torch.dtype) -> None:
        folder = registry.resolve(model).fetch()
        with without_progress_bars():
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        self._model.eval()

    def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens


@torch.inference_mode()
def attention_ms(config: Any, batch: int, context: int, clock: Callable[[], float]) -> float:
    """One layer's store and attention in a decode step. Every "step" has metadata of its own, 30 layers share it."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim, width = config.hidden_size // heads, -(-context // BLOCK_SIZE)
    k_cache, v_cache = (torch.randn(batch * width, kv_heads, BLOCK_SIZE, dim) for _ in range(2))
    q, k, v = (torch.randn(batch, h, dim) for h in (heads, kv_heads, kv_heads))
    best = float("inf")
    for step in range(12):
        length = context - step % BLOCK_SIZE
        table = torch.arange(batch * width, dtype=torch.int32).view(width, batch).T.contiguous()
        last = table[:, (length - 1) // BLOCK_SIZE].long()
        metadata = PagedMetadata(
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32),
            seq_lens=torch.full((batch,), length, dtype=torch.int32),
            block_table=table,
            slot_mapping=last * BLOCK_SIZE + (length - 1) % BLOCK_SIZE,
            num_decodes=batch,
            max_seqlen_q=1,
            max_seqlen_k=length,
        )
        begin = clock()
        for _ in range(config.num_hidden_layers):
            attention_backend.paged_attention(q, k, v, k_cache, v_cache, metadata, softmax_scale=dim**-0.5)
        best = min(best, (clock() - begin) / config.num_hidden_layers)
    return 1e3 * best


def measure(options: argparse.Namespace) -> dict[str, Any]:
    clock = CLOCKS[options.clock]
    if options.threads:
        torch.set_num_threads(options.threads)
    dtypes = {name: race(options, name, clock) for name in options.dtypes}
    config = read_config(registry.resolve(options.model).fetch())
    return {
        "auto": str(loader.choose_dtype("auto", config, torch.device("cpu"))).removeprefix("torch."),
        "dtypes": dtypes,
        "paged_attention_ms_per_layer": {
            f"batch {batch}, context {context}": round(attention_ms(config, batch, context, clock), 4)
            for batch, context in ((1, 192), (TOGETHER, 192), (1, 2048), (TOGETHER, 2048))
        },
    }


def race(options: argparse.Namespace, name: loader.DTypeName, clock: Callable[[], float]) -> dict[str, Any]:
    """All contenders in one dtype."""
    longest = max(512 + 1, options.prompt + options.tokens)
    ours = Ours(options.model, longest, name)
    contenders: dict[str, Ours | Theirs] = {"ours": ours}
    contenders |= {
        f"transformers_{attention}": Theirs(options.model, attention, getattr(torch, name))
        for attention in ("eager", "sdpa")
    }
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(100, ours.config.vocab_size, (count, length), generator=generator).tolist()
        return ids

    one, several, long = prompts(1, options.prompt), prompts(TOGETHER, options.prompt), prompts(1, 512)
    races: dict[str, tuple[Sequence[list[int]], int]] = {
        "one_request": (one, options.tokens),
        f"{TOGETHER}_requests": (several, options.tokens),
        "prompt_of_512": (long, 1),
    }
    answers = [contender.generate(one, options.tokens) for contender in contenders.values()]
    best = {(race, who): float("inf") for race in races for who in contenders}
    for _ in range(options.rounds):
        for race, (ids, count) in races.items():
            for who, contender in contenders.items():
                begin = clock()
                contender.generate(ids, count)
                best[race, who] = min(best[race, who], clock() - begin)

    def rate(race: str, who: str) -> float:
        ids, count = races[race]
        return len(ids) * count / best[race, who]

    return {
        "same_greedy_tokens": all(answer == answers[0] for answer in answers),
        "tokens_per_s": {
            race: {who: round(rate(race, who), 2) for who in contenders} for race in races if races[race][1] > 1
        },
        "prompt_of_512_ms": {who: round(1e3 * best["prompt_of_512", who], 1) for who in contenders},
    }


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many other processes that want a core each, all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens generated per request")
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the runner takes by itself")
    parser.add_argument("--beside", type=int, default=0, help="processes that do nothing but keep a core busy each")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: this process's CPU time")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--commit", help="recorded where there is no git")
    options = parser.parse_args()
    try:
        registry.resolve(options.model)
    except ModelNotFoundError as error:
        parser.error(str(error))
    with busy(options.beside):
        result = measure(options)
    report = {
        "machine": machine.facts(options.commit)
        | {"threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]},
        "options": {name: value for name, value in vars(options).items() if name not in {"out", "commit"}},
        **result,
    }
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
