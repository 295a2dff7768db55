"""Records what the README quotes: the benchmarks one after the other, each in a process of its own, into a file each.

    python -m benchmarks.record                                    all of them, into benchmarks/results
    python -m benchmarks.record --list                             which there are, and how long each may take
    python -m benchmarks.record attention_forward serving --peer fa3=FOLDER --peer vllm=FOLDER
    python -m benchmarks.record --seconds 540 --out FOLDER         as many as that holds; again for the rest

A file is named after its benchmark and the device, attention_forward_h200.json. One that the folder has from the same
commit is not recorded again, and one that was cut short or failed is called .partial.json. Peers that are folders of
packages (pip's --target) are put in front of PYTHONPATH where a benchmark races them; without them it races those that
it finds.

Exit code 0: everything asked for is there. 1: something failed or was cut short. 3: some did not fit --seconds.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import machine
from benchmarks.markdown import short

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHOWN_LINES = 15
GPU, CPU = frozenset({"gpu"}), frozenset({"cpu"})


@dataclass(frozen=True)
class Recording:
    """One file of results: what makes it, and the seconds on an H200 that it may take."""

    name: str
    module: str
    seconds: int
    arguments: tuple[str, ...] = ()
    peer: str = ""  # whose folder of packages it wants
    devices: frozenset[str] = GPU
    adds: bool = False  # to what its file has: that has more than this measures

    def command(self, out: Path, commit: str, peers: dict[str, Path]) -> list[str]:
        command = [sys.executable, "-m", f"benchmarks.{self.module}", *self.arguments, "--out", str(out)]
        if self.peer == "vllm" and "vllm" in peers:  # in processes of its own, so it has an option of its own
            command += ["--vllm-path", str(peers["vllm"])]
        return [*command, "--commit", commit]

    def environment(self, peers: dict[str, Path]) -> dict[str, str]:
        first = [str(peers[self.peer])] if self.peer in peers and self.peer != "vllm" else []
        return os.environ | {"PYTHONPATH": os.pathsep.join([*first, str(ROOT), *_inherited()])}


def _inherited() -> list[str]:
    paths = os.environ.get("PYTHONPATH")
    return [paths] if paths else []


_CUDNN = ("--only", "longwave,cudnn")
_OPTIONS = (
    "paged",
    "varlen",
    "padding",
    "block_sparse",
    "dropout",
)
_BLOCK_SIZES = (
    *("--peers", "ours", "--cases", "ttft_32k,tpot_b1_131072,shared_100k_x64,64x8k_256,nested_prefixes"),
    *("--ours-args", '{"block_size": 32}', "--ours-args", '{"block_size": 64}'),
)
_HTTP = ("--driver", "http", "--cases", "start_cold,start_warm,256x1k_128", "--weights")
_BESIDE_TRANSFORMERS = (
    *("--driver", "http", "--peers", "ours,transformers", "--model-shape", "bundled", "--dtype", "bfloat16"),
    *("--scale", "0.02", "--cases"),
    "ttft_32k,ttft_131k,tpot_b1_1024,tpot_b1_131072,32x32k_128,shared_100k_x64,256x1k_128,chats_under_131k_prefill",
)
_ALL_SERVERS = ("--servers", "longwave", "transformers", "transformers_batching")
_LONGEST = (  # a step of these lengths takes minutes; ours has the longest, and so comes last
    *("--longest", "--only", "torch cuDNN", "--only", "torch FA2"),
    *("--only", "longwave, attention recomputed"),
)
RECORDINGS = (
    Recording("attention_forward", "attention", 150, ("forward",), "fa3"),
    Recording("attention_forward_fa4", "attention", 150, ("forward", "--only", "longwave,fa2,fa4"), "fa4"),
    Recording("attention_backward", "attention", 400, ("backward", "--slow", "--rounds", "6"), "fa3"),
    Recording("attention_backward_64k", "attention", 60, ("backward", "--slow", "--seqlens", "65536"), "fa4"),
    Recording("attention_backward_64k_torch", "attention", 60, ("backward", "--slow", "--seqlens", "65536")),
    Recording(
        "attention_backward_128",
        "attention",
        120,
        ("backward", "--head-dims", "128", "--only", "longwave,longwave-deterministic,cudnn,fa4", "--rounds", "4"),
        "fa4",
    ),
    # Beside one peer: how fast a card is depends on what else takes turns on it.
    Recording("attention_forward_16k", "attention", 60, ("forward", "--seqlens", "16384", *_CUDNN)),
    Recording(
        "attention_backward_16k",
        "attention",
        60,
        ("backward", "--head-dims", "128", "--seqlens", "8192,16384", *_CUDNN),
    ),
    Recording("attention_forward_generic", "attention", 120, ("forward", "--only", "longwave-generic,fa2")),
    Recording("attention_decode", "attention", 90, ("decode", "fp8_kv", "latency"), "fa3"),
    Recording("attention_decode_flashinfer", "attention", 90, ("decode", "shared_prefix"), "flashinfer"),
    Recording("attention_fp8", "attention", 60, ("fp8_forward", "fp8_error"), "fa3"),
    Recording("attention_shared_prefix", "attention", 30, ("shared_prefix",), "fa3"),
    Recording("attention_options", "attention", 120, _OPTIONS, "fa3"),
    Recording("attention_chunks", "attention", 150, ("chunk",), "fa3"),
    # Turns of seconds: the run of all had no time left for them.
    Recording("attention_chunks_16k", "attention", 90, ("chunk", "--seqlens", "278528,262656", "--rounds", "3"), "fa3"),
    Recording("attention_features", "attention", 240, ("shapes", "features", "patterns", "--flex"), "fa3"),
    Recording("serving", "serving", 560, ("--vllm-args", '{"max_num_batched_tokens": 8192}'), "vllm"),
    Recording("serving_block_sizes", "serving", 300, _BLOCK_SIZES),
    Recording("serving_http", "serving", 560, _HTTP, "vllm"),
    Recording("serving_transformers", "serving", 400, _BESIDE_TRANSFORMERS, devices=CPU),
    Recording("longcontext", "longcontext", 150),
    Recording("longcontext_1m", "longcontext", 580, ("--contexts", "131072", "1000000", "--kv-cache-dtype", "fp8")),
    Recording("beside_training", "beside_training", 400, ("--shares", "0.25,1")),
    Recording("training", "training", 350),
    Recording("training_longest", "training", 500, _LONGEST),
    Recording("fine_tuning", "fine_tuning", 250, devices=GPU | CPU),
    Recording("multi_lora", "multi_lora", 120),
    Recording("kv_offload", "kv_offload", 300),
    Recording("first_call", "first_call", 120),
    Recording("step_profile", "step_profile", 150),
    Recording("drafting", "drafting", 120, ("--shape-8b",)),
    Recording("attention_forward_flex", "attention", 400, ("forward", "--flex", "--slow")),
    Recording("layers", "layers", 120),
    Recording("linears", "linears", 60),
    Recording("linears_many_rows", "linears", 30, ("--rows", "256,384,512,640,768,896,1024,2048")),
    Recording("linear_attention", "linear_attention", 120),
    Recording("few_rows", "few_rows", 120),
    Recording("shared_keys", "shared_keys", 150),
    Recording("chunks", "chunks", 90),
    Recording("beside", "beside", 120),
    Recording("power", "power", 120, ("backward", "--head-dims", "128")),
    Recording("roofline", "roofline", 300),
    Recording("ladder", "ladder", 60),
    Recording("quick_start", "cpu_decode", 300, devices=CPU),
    Recording("faults", "faults", 900, _ALL_SERVERS, devices=CPU, adds=True),
    Recording("serving_client", "serving_client", 60, devices=CPU),
    Recording("stream_path", "stream_path", 240, devices=CPU),
)


def device_name() -> str:
    """Of the GPU, as files are named after it: "h200"; without one "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower().removeprefix("nvidia ")).strip("_")


def recorded(path: Path, commit: str) -> bool:
    return path.exists() and json.loads(path.read_text())["machine"]["commit"] == commit


def record(one: Recording, path: Path, commit: str, peers: dict[str, Path], log: Path) -> str | None:
    """Runs a benchmark until it ends or its time is over; nothing that it started outlives it. Says what went wrong."""
    partial = path.with_suffix(".partial.json")
    partial.unlink(missing_ok=True)  # of an earlier one, which is no result of this
    if one.adds and path.exists():
        shutil.copyfile(path, partial)
    command = one.command(partial, commit, peers)
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=one.environment(peers),
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(one.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    if code is None:
        return f"cut short after {one.seconds} s"
    if code or not partial.exists():
        return f"ended with code {code}" + ("" if partial.exists() else " and wrote nothing")
    partial.replace(path)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """All processes of its session that are left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def record_all(
    asked: Sequence[Recording], out: Path, logs: Path, commit: str, peers: dict[str, Path], seconds: float
) -> tuple[list[str], list[str]]:
    """Names of those that failed, and of those for which no time was left."""
    begin, failed, left = time.monotonic(), [], []
    for one in asked:
        path, log = out / f"{one.name}_{device_name()}.json", logs / f"{one.name}.log"
        started = time.monotonic()
        if recorded(path, commit):
            typer.echo(f"{one.name}: already there")
        elif started - begin + one.seconds > seconds:
            left.append(one.name)
        elif wrong := record(one, path, commit, peers, log):
            failed.append(one.name)
            typer.echo(f"{one.name}: {wrong}; the end of what it printed:")
            typer.echo("\n".join(f"    {line}" for line in log.read_text().splitlines()[-SHOWN_LINES:]))
        else:
            typer.echo(f"{one.name}: recorded in {time.monotonic() - started:.0f} s")
    return failed, left


def folders(peers: Sequence[str]) -> dict[str, Path]:
    found = {}
    for text in peers:
        name, _, folder = text.partition("=")
        if name not in {one.peer for one in RECORDINGS} - {""} or not Path(folder).is_dir():
            raise typer.BadParameter(f"{text!r} is not NAME=FOLDER with an existing folder and a name of a peer")
        found[name] = Path(folder).resolve()
    return found


app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which; all that this machine can run by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = RESULTS,
    logs: Annotated[Path | None, typer.Option(help="Folder of what they print; default: a temporary one.")] = None,
    seconds: Annotated[float, typer.Option(help="Begin none that might not end within that.")] = float("inf"),
    peer: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of fa3, fa4, flashinfer or vllm.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit, where there is no git checkout.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say which there are.")] = False,
) -> None:
    """Records the benchmarks of the README."""
    known = {one.name: one for one in RECORDINGS}
    if unknown := set(names or ()) - known.keys():
        raise typer.BadParameter(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    asked = [known[name] for name in dict.fromkeys(names or known)]
    if listed:
        for one in asked:
            typer.echo(f"{one.name:28} {one.seconds:4} s  {' or '.join(sorted(one.devices)):10}  {one.peer}".rstrip())
        return
    peers, device = folders(peer or ()), device_name()
    commit = commit or machine.git_commit()
    if commit is None:
        raise typer.BadParameter("no git checkout here: name the commit with --commit")
    kind = "cpu" if device == "cpu" else "gpu"
    if names and (wrong := [one.name for one in asked if kind not in one.devices]):
        raise typer.BadParameter(f"not to be recorded on a {kind.upper()}: {', '.join(wrong)}")
    asked = [one for one in asked if kind in one.devices]
    logs = logs or Path(tempfile.mkdtemp(prefix="longwave-record-"))
    for folder in (out, logs):
        folder.mkdir(parents=True, exist_ok=True)
    typer.echo(f"{len(asked)} on {device} at {short(commit)}; what they print is in {logs}")
    failed, left = record_all(asked, out, logs, commit, peers, seconds)
    if failed:
        typer.echo(f"failed: {' '.join(failed)}")
    if left:
        typer.echo(f"no time left for: {' '.join(left)}")
    if failed or left:
        raise typer.Exit(1 if failed else 3)


if __name__ == "__main__":
    app()
