"""How servers fail: the same faults sent to OpenAI-compatible servers over HTTP, one after the other.

    python -m benchmarks.faults --servers longwave transformers transformers_batching --out results.json
    python -m benchmarks.faults --url http://127.0.0.1:8000 --model NAME --context 32768    any running server
    python -m benchmarks.faults --trials overload kills --out results.json    minutes of trouble, for ours alone

Of each fault it says the status, whether the error has OpenAI's shape and names the field, and how long the answer
took; after each a small good request must be answered within 30 s. A server that was started here and does not answer
one in five minutes is started again; one that runs already is left alone, and gets no SIGTERM. Trials (trial_list.py)
each have servers of their own, on a CPU. What the file has from before and is not measured again is kept.

Exit code 0: everything was sent (what went wrong is in the table, and goals may be missed). 1: a trial failed, or a
server did not answer. 2: an option that makes no sense.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import fault_clients, machine, trial_list
from benchmarks.arguments import positive, write_out
from benchmarks.fault_clients import RECOVERY, Target
from benchmarks.fault_list import Fault, faults
from benchmarks.fault_outcomes import PATIENCE, Outcome, classify, error_of, in_openai_shape, names
from benchmarks.markdown import table
from benchmarks.started_server import started
from benchmarks.trial import Scale
from models import registry
from models.descriptions import read_config

SERVERS = ("longwave", "transformers", "transformers_batching")
SAID = 200  # characters of an error that are recorded
SOON_MS = 5000.0  # that a good request may take longer beside a misbehaving client than alone
IDLE_ROUNDS = 5

Row = dict[str, Any]


def command(name: str, model: str, device: str, data: str) -> tuple[list[str], str]:
    """How a server is started, with what it does by default (but for batching, where that is asked for), and the path
    that says that it is ready."""
    if name == "longwave":
        flags = ["--model", model, "--device", device, "--data-dir", data, "--log-level", "warning"]
        return [sys.executable, "-m", "server", "serve", *flags], "/health/ready"
    flags = [model, "--device", device, *(["--continuous-batching"] if name == "transformers_batching" else [])]
    return [sys.executable, "-m", "transformers.cli.transformers", "serve", *flags], "/health"


@contextmanager
def server(name: str, model: str, device: str) -> Iterator[Target]:
    """One of SERVERS, started."""
    folder = registry.resolve(model).fetch()
    context = read_config(folder).max_position_embeddings
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as data, ExitStack() as running:
        wanted, ready = command(name, str(folder), device, data)
        url, process = running.enter_context(started(wanted, ready, environment))
        yield Target(url, str(folder), context, process)


def idle_ms(target: Target, limit: float = RECOVERY) -> float:
    """What the small good request takes when nothing else is asked: the median, after a first one. Raises SystemExit
    when that is not answered in `limit` seconds."""
    if fault_clients.answers_after(target, limit) is None:
        raise SystemExit(f"{target.url} does not answer a good request")
    return sorted(fault_clients.good(target).ms for _ in range(IDLE_ROUNDS))[IDLE_ROUNDS // 2]


def send(fault: Fault, target: Target) -> Row:
    """One fault and what became of it."""
    reply = fault.act(target)
    after = 0.0 if fault.ends_server else fault_clients.answers_after(target)
    outcome = classify(reply, fault.expected, after)
    error = error_of(reply.body)
    said = None if error is None else json.dumps(error).replace(target.model, "MODEL")[:SAID]
    return {
        "fault": fault.name,
        "expected": str(fault.expected),
        "outcome": outcome.value,
        "status": reply.status,
        "in_openai_shape": in_openai_shape(reply) if fault.is_request else None,
        "names_field": names(reply, fault.param) if fault.param and error is not None else None,
        "ms": round(reply.ms, 1),
        "answers_after_s": None if after is None or fault.ends_server else round(after, 2),
        "exit_code": reply.exit_code,
        "said": said,
    }


def say(name: str, row: Row) -> None:
    sys.stdout.write(f"{name}: {row['fault']}: {row['outcome']}, {row['status']}, {row['ms']} ms {row['said'] or ''}\n")
    sys.stdout.flush()


def measure_started(name: str, model: str, device: str) -> Row:
    """All faults on a server of our own, which is started again when it is gone."""
    rows: list[Row] = []
    with ExitStack() as running:
        target = running.enter_context(server(name, model, device))
        idle = idle_ms(target)
        for fault in faults(idle + SOON_MS):
            rows.append(send(fault, target))
            say(name, rows[-1])
            if rows[-1]["outcome"] == Outcome.GONE and not fault.ends_server:
                assert target.process is not None
                target.process.kill()  # it may be too busy to hear anything else
                running.close()
                target = running.enter_context(server(name, model, device))
    return {"idle_ms": round(idle, 1), "context": target.context, "faults": rows}


def measure_running(target: Target) -> Row:
    """The faults that a server of somebody else's may be sent, until it does not answer any more."""
    rows: list[Row] = []
    idle = idle_ms(target, PATIENCE)
    for fault in faults(idle + SOON_MS):
        if fault.ends_server:
            continue
        rows.append(send(fault, target))
        say(target.url, rows[-1])
        if rows[-1]["outcome"] == Outcome.GONE:
            break
    return {"idle_ms": round(idle, 1), "context": target.context, "faults": rows}


def counts(run: Row) -> Row:
    """Of one server: how many faults had each outcome, and how many requests' replies were right in OpenAI's shape,
    and how many of the right refusals of a field named it."""
    rows = run["faults"]
    right = [row for row in rows if row["outcome"] == Outcome.RIGHT]
    return {
        "faults": len(rows),
        **{outcome.value: sum(row["outcome"] == outcome for row in rows) for outcome in Outcome},
        "in_openai_shape": sum(row["in_openai_shape"] is True for row in right),
        "requests": sum(row["in_openai_shape"] is not None for row in rows),
        "names_field": sum(row["names_field"] is True for row in right),
        "refused_fields": sum(row["names_field"] is not None for row in right),
    }


def report(runs: dict[str, Row]) -> str:
    header = ["fault", "right is", *runs]
    by_name = {name: {row["fault"]: row for row in run["faults"]} for name, run in runs.items()}
    first: Sequence[Row] = next(iter(runs.values()))["faults"]

    def cell(row: Row | None) -> str:
        if row is None:
            return "not sent"
        shape = ", not in OpenAI's shape" if row["in_openai_shape"] is False and row["outcome"] == Outcome.RIGHT else ""
        return f"{row['outcome']} ({row['status']}, {row['ms']:.0f} ms{shape})"

    rows = [[row["fault"], row["expected"], *(cell(by_name[name].get(row["fault"])) for name in runs)] for row in first]
    return table(header, rows) + "\n"


def keep(out: Path | None, content: Row) -> None:
    """Writes it to the file, beside the trials, or the servers, that are there already."""
    if out is None:
        return
    before = json.loads(out.read_text()) if out.is_file() else {}
    trials = {**before.get("trials", {}), **content.get("trials", {})}
    in_order = {name: trials[name] for name in trial_list.TRIALS if name in trials}
    write_out(out, json.dumps(before | content | ({"trials": in_order} if in_order else {}), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=[], help="started here, one after the other")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--model", default="bundled", help="started servers: its folder; else its name in requests")
    parser.add_argument("--context", type=positive, default=8192, help="tokens that the model behind --url takes")
    parser.add_argument("--device", default="cpu", help="of the servers that are started")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--commit", help="recorded where there is no git")
    trials, usual = parser.add_argument_group("trials"), Scale()
    trials.add_argument("--trials", nargs="*", choices=trial_list.TRIALS, default=[])
    trials.add_argument("--soak-minutes", type=float, default=usual.soak_seconds / 60)
    trials.add_argument("--chaos-minutes", type=float, default=usual.chaos_seconds / 60)
    trials.add_argument("--overload-seconds", type=float, default=usual.seconds)
    trials.add_argument("--disconnects", type=positive, default=usual.disconnects)
    trials.add_argument("--kills", type=positive, default=usual.kills)
    trials.add_argument("--drains", type=positive, default=usual.drains)
    trials.add_argument("--raw-requests", type=positive, default=usual.raw_requests)
    trials.add_argument("--slow", type=positive, default=usual.slow)
    trials.add_argument("--stalled", type=positive, default=usual.stalled)
    trials.add_argument("--prompts", type=positive, default=usual.prompts)
    trials.add_argument("--prompts-at-once", type=positive, default=usual.prompts_at_once)
    trials.add_argument("--pairs", type=positive, default=usual.pairs)
    options = parser.parse_args()
    if bool(options.servers or options.trials) == bool(options.url):
        parser.error("give --servers and --trials, or --url")
    facts = machine.facts(options.commit) | {"threads": torch.get_num_threads()}
    if options.url:
        runs = {options.url: measure_running(Target(options.url.rstrip("/"), options.model, options.context))}
    else:
        runs = {name: measure_started(name, options.model, options.device) for name in options.servers}
    for run in runs.values():
        run["counts"] = counts(run)
    if runs:
        sys.stdout.write(report(runs))
        keep(options.out, {"machine": facts, "device": options.device, "soon_ms": SOON_MS, "servers": runs})
    scale = Scale(
        seconds=options.overload_seconds,
        soak_seconds=60 * options.soak_minutes,
        chaos_seconds=60 * options.chaos_minutes,
        disconnects=options.disconnects,
        kills=options.kills,
        drains=options.drains,
        raw_requests=options.raw_requests,
        slow=options.slow,
        stalled=options.stalled,
        prompts=options.prompts,
        prompts_at_once=options.prompts_at_once,
        pairs=options.pairs,
    )
    failed = False
    for name in options.trials:
        row = trial_list.run(name, scale) | {"machine": facts}
        failed |= row["failure"] is not None
        sys.stdout.write(trial_list.report(row))
        sys.stdout.flush()
        keep(options.out, {"trials": {name: row}})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
