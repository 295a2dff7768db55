"""Serving at long context: our engine and the peers that are installed, the same cases one engine after the other.

Each engine has processes of its own. Rows are printed as they come, and the results are written after every case, so
that a run that is cut short keeps what it has. With --merge a later run adds to the file of an earlier one.

    python -m benchmarks.serving --vllm-path /path/to/site-packages --out benchmarks/results/serving_h200.json
    python -m benchmarks.serving --peers ours --cases ttft_32k,tpot_b1_1024
    python -m benchmarks.serving --driver http --cases start_cold,start_warm --weights   # starts that read 16 GB
    python -m benchmarks.serving --driver http --merge --out benchmarks/results/serving_h200.json
    python -m benchmarks.serving --cases nested_prefixes --vllm-args '{"max_num_batched_tokens": 8192}' --merge \\
        --out benchmarks/results/serving_h200.json                                       # one case more
    python -m benchmarks.serving --model-shape small --scale 0.01 --device cpu          # to try it
    python -m benchmarks.serving --report benchmarks/results/serving_h200.json          # the table again
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine, model_folder
from benchmarks.serving_cases import CASES, Row, Size
from benchmarks.serving_child import Plan
from benchmarks.serving_goals import HTTP, OFFLINE, OURS, are_goals, table
from benchmarks.serving_peers import ENGINES, TRANSFORMERS, VLLM, Peer, why_not
from benchmarks.serving_results import Results, read

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
}
STARTS = ("start_cold", "start_warm")
VLLM_VARIANTS = ('{"max_num_batched_tokens": 2048}', '{"max_num_batched_tokens": 8192}')
END_GRACE = 30.0  # seconds an engine gets to end after its last row
Flag = typer.Option


def rows_of(command: list[str], environment: dict[str, str]) -> Iterator[Row]:
    """What the process writes, row by row. A last row {"case": "exit"} says when it did not end well."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield json.loads(line)
        if code := process.wait(END_GRACE):
            yield {"case": "exit", "error": f"the process ended with code {code}"}
    except subprocess.TimeoutExpired:
        yield {"case": "exit", "error": f"the process had not ended {END_GRACE:.0f} s after its last row"}
    finally:
        with suppress(ProcessLookupError):  # everybody has ended
            os.killpg(process.pid, signal.SIGKILL)  # the group is its own
        process.communicate()


def measure(peer: Peer, driver: str, plan: Plan, caches: Path) -> Iterator[Row]:
    """A cold start first and the cases after a warm one, where starts are asked for."""
    starts = any(name in plan.cases for name in STARTS)
    cases = tuple(name for name in plan.cases if name in CASES)
    phases: list[tuple[str, tuple[str, ...]]] = [("start", cases)]
    if starts:
        phases = [("start_cold", ()), ("start_warm", cases)]
    environment = peer.environment(caches if starts else None)
    if starts and sys.dont_write_bytecode:
        environment = compiled(peer, plan, caches)
    for start, chosen in phases:
        mine = replace(peer.prepared(plan), cases=chosen)
        own = environment
        if driver == HTTP:  # the client is ours, whatever it asks, and its imports are never mixed with a peer's
            mine = replace(mine, command=tuple(peer.server_command(mine)), environment=environment)
            own = Peer(OURS).environment(None)
        mine = replace(mine, spawned=time.monotonic())
        for row in rows_of(peer.command(driver, mine), own):
            yield {**row, "case": start} if row["case"] == "start" else row


def compiled(peer: Peer, plan: Plan, caches: Path) -> dict[str, str]:
    """The peer's environment where Python may write no bytecode and finds little: a start compiled all modules then,
    which pip does where it installs. So an engine that is not measured has written what it imported, kernels apart."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(caches.with_name(f"{caches.name}-bytecode"))}
    before = peer.environment(caches.with_name(f"{caches.name}-before")) | bytecode
    mine = replace(peer.prepared(plan), cases=(), spawned=time.monotonic())
    command = replace(mine, command=tuple(peer.server_command(mine)), environment=before)
    list(rows_of(peer.command(HTTP, command), before))
    return peer.environment(caches) | bytecode


def peers(
    engines: list[str], ours: list[dict[str, Any]], vllm: list[dict[str, Any]], vllm_path: str | None
) -> list[Peer]:
    """An engine once for each set of arguments."""
    arguments = {OURS: ours, VLLM: vllm, TRANSFORMERS: [{}, {"continuous_batching": False}]}
    paths = {VLLM: vllm_path}
    return [
        Peer(engine, " ".join(f"{name}={value}" for name, value in chosen.items()), chosen, paths.get(engine))
        for engine in engines
        for chosen in arguments.get(engine, [{}])
    ]


def model_folder_of(
    shape: str, model: Path | None, size: Size, scratch: Path, *, weights: bool = False, device: str = "cpu"
) -> tuple[Path, str]:
    """The folder, and how engines load it. `weights`: random ones are written to files, drawn on `device`."""
    if model is not None:
        return model, "auto" if any(model.glob("*.safetensors")) else "dummy"
    if shape == "bundled":
        from models import registry
        from server.settings import BUNDLED_MODEL

        return registry.resolve(BUNDLED_MODEL).fetch(), "auto"
    length = max(131_072, size.max_model_len)
    changes = SMALL if shape == "small" else {}
    folder = model_folder.write(scratch / "model", **changes, max_position_embeddings=length)
    if not weights:
        return folder, "dummy"
    model_folder.write_weights(folder, device=device)
    return folder, "auto"


def chosen(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Of an option such as "a,b" (or "all"), in the order of `known`. Raises typer.BadParameter."""
    names = known if text == "all" else tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def json_objects(texts: list[str]) -> list[dict[str, Any]]:
    try:
        found = [json.loads(text) for text in texts]
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}") from error
    if not all(isinstance(one, dict) for one in found):
        raise typer.BadParameter("arguments are a JSON object")
    return found


@contextmanager
def told_as_usage() -> Iterator[None]:
    """A file that is not there, or holds something else, is a wrong option and no bug."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def main(
    names: Annotated[str, Flag("--peers", help=f"Some of {','.join(ENGINES)}; all: those that are found.")] = "all",
    cases: Annotated[str, Flag(help=f"Some of {','.join((*STARTS, *CASES))}.")] = "all",
    driver: Annotated[str, Flag(help="offline: the engine in process; http: through its server.")] = OFFLINE,
    model_shape: Annotated[str, Flag(help="8b, small or bundled.")] = "8b",
    model: Annotated[Path | None, Flag(help="A folder instead; without weights: random ones.")] = None,
    weights: Annotated[bool, Flag("--weights", help="Write random weights to files, which starts read.")] = False,
    scale: Annotated[float, Flag(min=1e-4, max=1, help="Cuts lengths and numbers of the cases down.")] = 1.0,
    device: Annotated[str, Flag(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[str | None, Flag(help="Default: bfloat16 on a GPU, float32 on a CPU.")] = None,
    ours_args: Annotated[list[str], Flag(help="EngineConfig's fields as JSON; several: several variants.")] = ["{}"],  # noqa: B006
    vllm_args: Annotated[list[str], Flag(help="The same for vLLM.")] = list(VLLM_VARIANTS),  # noqa: B006
    vllm_path: Annotated[str | None, Flag(help="Where vLLM is installed, instead of PYTHONPATH.")] = None,
    out: Annotated[Path | None, Flag(help="Where the results go.")] = None,
    merge: Annotated[bool, Flag("--merge", help="Add to what --out has.")] = False,
    commit: Annotated[str | None, Flag(help="Recorded where there is no git.")] = None,
    report: Annotated[Path | None, Flag(help="Measure nothing: print the table of these results.")] = None,
) -> None:
    """Exit code 1 when a case failed; goals that are missed are said and are no failure."""
    if report is not None:
        kept = Results({}, {}, None)
        with told_as_usage():
            kept.content = read(report)
        typer.echo("\n".join(table(kept.runs, judged=are_goals(kept.content["options"]))))
        return
    if driver not in (OFFLINE, HTTP):
        raise typer.BadParameter(f"--driver is {OFFLINE} or {HTTP}")
    if model_shape not in ("8b", "small", "bundled"):
        raise typer.BadParameter("--model-shape is 8b, small or bundled")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    wanted = chosen(cases, (*STARTS, *CASES), "case")
    options = {"model": str(model or model_shape), "scale": scale, "dtype": dtype, "device": device}
    results = Results(machine.facts(commit), options, out)
    if merge and out is not None and out.exists():
        with told_as_usage():
            results.merge(out)
    with tempfile.TemporaryDirectory(prefix="serving-") as scratch:
        folder, load_format = model_folder_of(
            model_shape, model, Size(scale), Path(scratch), weights=weights, device=device
        )
        with told_as_usage():
            config = json.loads((folder / "config.json").read_text())
        if config["max_position_embeddings"] < Size(scale).max_model_len:
            raise typer.BadParameter(f"the model has {config['max_position_embeddings']} positions: give a --scale")
        plan = Plan(
            model=str(folder),
            vocab_size=config["vocab_size"],
            load_format=load_format,
            dtype=dtype,
            device=device,
            cases=wanted,
            scale=scale,
            spawned=0.0,
        )
        engines = list(chosen(names, ENGINES, "peer"))
        asked = peers(engines, json_objects(ours_args), json_objects(vllm_args), vllm_path)
        reasons = {peer.engine: why_not(peer, driver, plan) for peer in asked}
        absent = [f"{engine} ({reason})" for engine, reason in reasons.items() if reason is not None]
        if absent and names != "all":
            raise typer.BadParameter(f"what was named cannot be measured: {', '.join(absent)}")
        for number, peer in enumerate(asked):
            label = f"{peer.engine} {peer.variant} {driver}".replace("  ", " ")
            if (reason := reasons[peer.engine]) is not None:
                typer.echo(f"{label}: not measured, {reason}", err=True)
                continue
            for row in measure(peer, driver, plan, Path(scratch) / f"caches-{number}"):
                typer.echo(f"{label}: {json.dumps(row)}")
                results.add(peer.engine, peer.variant, driver, row)
    typer.echo("\n".join(table(results.runs, judged=are_goals(options))))
    for error in results.errors:
        typer.echo(f"FAILED {error}", err=True)
    raise typer.Exit(1 if results.errors else 0)


if __name__ == "__main__":
    typer.run(main)
