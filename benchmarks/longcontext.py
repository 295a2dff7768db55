"""One long prompt through the HTTP server: TTFT, TPOT and GPU memory at growing context, on random weights.

Starts `python -m server serve` on a Llama-3.1-8B-shaped folder (or on --model), streams one completion per context
length, each of fresh random token ids so that no prefix is cached, and writes JSON. On an H200 the default run takes
about three minutes.

    python benchmarks/longcontext.py --out benchmarks/results/longcontext_h200.json
    python benchmarks/longcontext.py --tiny          # a CPU-sized shape, to try the script itself
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine, model_folder  # noqa: E402
from benchmarks.arguments import write_out  # noqa: E402
from benchmarks.started_server import started_server  # noqa: E402


class GpuMemory:
    """The largest memory use of the GPU, in MiB, read from nvidia-smi twice a second; None without one."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            used = machine.output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
            if used is None:
                return
            self.peak = max(self.peak or 0, int(used))
            self._stop.wait(0.5)


class Progress:
    """Says every half minute how full the KV cache is and what the GPU does: a million tokens take minutes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._say, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _say(self) -> None:
        begin = time.perf_counter()
        while not self._stop.wait(30):
            lines = httpx.get(f"{self._url}/metrics", timeout=30).text.splitlines()
            full = next(line for line in lines if line.startswith("longwave:kv_cache_usage_perc"))
            gpu = machine.output("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader")
            seconds = time.perf_counter() - begin
            print(f"{seconds:.0f} s: {float(full.rsplit(' ', 1)[1]):.1%} of the KV cache; {gpu}", flush=True)  # noqa: T201


def completion(url: str, model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Streams one greedy completion of token ids; times in milliseconds."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    begin = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=1800) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(f"the stream failed: {chunk['error']}")
            if chunk.get("usage"):
                usage = chunk["usage"]
            if chunk["choices"] and chunk["choices"][0]["text"]:
                arrivals.append(time.perf_counter())
    produced = usage["completion_tokens"]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": produced,
        "ttft_ms": round(1e3 * (arrivals[0] - begin), 1),
        "tpot_ms": round(1e3 * (arrivals[-1] - arrivals[0]) / (produced - 1), 3),
        "prefill_tokens_per_s": round(usage["prompt_tokens"] / (arrivals[0] - begin)),
    }


def kernel_calls(url: str) -> dict[str, float]:
    """Calls of each attention kernel, from /metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    rows = [line for line in lines if line.startswith("longwave:attention_kernel_calls_total{")]
    return {row.split('kernel="')[1].split('"')[0]: float(row.rsplit(" ", 1)[1]) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768, 131072])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", type=Path, help="a folder with config.json and tokenizer; default: Llama-3.1-8B's")
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU runs in seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="recorded as the commit where there is no git")
    args, extra = parser.parse_known_args()

    longest = max(args.contexts) + args.max_tokens
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or model_folder.write(
            Path(scratch) / "llama", max_position_embeddings=longest, **(model_folder.TINY if args.tiny else {})
        )
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        words = random.Random(0)
        flags = ["--load-format", "dummy", "--max-model-len", str(longest), *extra]
        with GpuMemory() as memory, started_server(folder, flags) as (url, ready_s), Progress(url):
            name = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
            cases = []
            for context in (64, *args.contexts):  # the first one warms up
                prompt = [words.randrange(3, vocabulary) for _ in range(context)]
                cases.append(completion(url, name, prompt, args.max_tokens))
                print(json.dumps(cases[-1]), flush=True)  # noqa: T201
            result = {
                "benchmark": "longcontext",
                "machine": machine.facts(args.commit),
                "model": json.loads((folder / "config.json").read_text()),
                "server_flags": extra,
                "ready_s": round(ready_s, 1),
                "cases": cases[1:],
                "kernel_calls": kernel_calls(url),
                "gpu_memory_peak_mib": memory.peak,
            }
    text = json.dumps(result, indent=1)
    if args.out:
        write_out(args.out, text + "\n")
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()
