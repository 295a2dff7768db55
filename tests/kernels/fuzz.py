"""Random problems for the attention kernels through the public functions, each held to FlashAttention's rule.

    python -m tests.kernels.fuzz --seconds 120 --seed 1                on a GPU, from the checkout
    python -m tests.kernels.fuzz --only forward,chunks --processes 8   eight of them, of seeds 1 to 8
    python -m tests.kernels.fuzz --problem forward-123-4               one again; forward-123: its whole set, in order
    python -m tests.kernels.fuzz --device cpu                          the library's CPU reference
    python -m tests.kernels.fuzz --device emulated --only decode       the kernels in tests/emulator, tiny problems

A set is what is compiled: a dtype, head dims, options. Of each a dozen shapes are drawn. Exit code 0: all problems that
are served are right; 1: some are not, a line each. What the library refuses by its own errors is counted by reason.
A fault of a kernel ends the process: the last line of --log is its problem.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from unittest import mock

import torch

from attention_backend import dispatch
from attention_backend.heuristics import sm90_chunks

from . import fuzz_calls, fuzz_steps, problems
from .fuzz_draws import Draw, Place, RefusedError

KINDS: dict[str, Callable[[Draw, Draw, Place], None]] = {
    "forward": fuzz_calls.forward,
    "backward": fuzz_calls.backward,
    "paged": fuzz_calls.paged,
    "decode": fuzz_calls.decode,
    "cascade": fuzz_steps.cascade,
    "sparse": fuzz_calls.sparse,
    "fp8": fuzz_steps.fp8,
    "chunks": fuzz_steps.chunks,
}
SHAPES = 12  # of a set
#: Chunks are pairs of packed tiles here though their keys are few: so much faster as those are then said to be.
PAIRS_KEYS, PAIRS_GAIN = 1, 1.5
_MANY = 1 << 31
_GRACE_S = 300  # beyond --seconds, for the last problem of each of several processes; then it hangs
#: After these the context is gone.
_FAULTS = ("CUDA_ERROR", "CUDA error", "illegal memory", "misaligned address", "unspecified launch", "launch failure")


@dataclass
class Counts:
    """Of problems by kind, of kernels' calls by kind and kernel, of refusals by kind and reason."""

    ran: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        self.ran += other.ran
        self.kernels += other.kernels
        self.refused += other.refused
        self.failed += other.failed

    def lines(self) -> Iterator[str]:
        for kind in KINDS:
            if self.ran[kind]:
                served = ", ".join(
                    f"{name.split(':')[1]} {n}"
                    for name, n in sorted(self.kernels.items())
                    if name.startswith(f"{kind}:")
                )
                yield f"{kind}: {self.ran[kind]} problems; calls by kernel: {served or 'not counted'}"
        for reason, n in self.refused.most_common():
            yield f"refused {n} times, {reason}"
        yield f"{self.ran.total()} problems ran, {self.refused.total()} were refused, {len(self.failed)} FAILED"


def place_of(device: str, *, small: bool) -> Place:
    if device == "cuda":
        sizes, graphs = ((1 << 16, 300) if small else (1 << 24, 4096)), True
        return Place(torch.device("cuda", torch.cuda.current_device()), *sizes, graphs)
    if device == "emulated":
        return Place(torch.device("cpu"), 1 << 13, 150)
    return Place(torch.device("cpu"), *((1 << 14, 200) if small else (1 << 18, 800)))


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_problem(name: str, place: Place, said: list[str] | None = None) -> None:
    """`forward-123-4`: a kind, a set, a shape. Raises what is wrong, or RefusedError."""
    kind, chosen, shape = name.split("-")
    fixed, free = Draw(f"{kind} {chosen}"), Draw(f"{kind} {chosen} {shape}")
    if said is not None:
        free.said = said
    number = zlib.crc32(name.encode())
    torch.manual_seed(number)
    with mock.patch.object(problems, "SESSION_SEED", number):
        KINDS[kind](fixed, free, place)
    if place.graphs:
        torch.cuda.synchronize()


def names_of(seed: int, kinds: list[str]) -> Iterator[str]:
    """Problems without end."""
    draw = Draw(f"sets {seed}")
    while True:
        for kind in kinds:
            chosen = draw.randrange(_MANY)
            yield from (f"{kind}-{chosen}-{shape}" for shape in range(SHAPES))


def reason_of(refusal: str) -> str:
    """Without numbers; of a table of kernels only why each of them refused."""
    why = [line.strip() for line in refusal.splitlines() if line.strip().startswith("but ") and " runs on " not in line]
    text = "; ".join(dict.fromkeys(why)) or refusal.splitlines()[0]
    return re.sub(r"\d+(\.\d+)?", "N", text)[:240]


def attempt(name: str, place: Place, counts: Counts, again: str, *, alone: bool = False) -> bool:
    """Runs a problem and counts it; one `alone` says where it failed. False where nothing can run any more."""
    kind, said = name.partition("-")[0], list[str]()
    before = Counter(dispatch.calls())
    try:
        run_problem(name, place, said)
        counts.ran[kind] += 1
    except RefusedError as refusal:
        counts.refused[f"{kind}: {reason_of(str(refusal))}"] += 1
    except Exception as error:
        counts.ran[kind] += 1
        notes = " ".join([str(error), *getattr(error, "__notes__", ())])
        what = " ".join(f"{type(error).__name__}: {notes}".split())[:600]
        line = f"FAILED {what} | {' | '.join(filter(None, said))} | {again} --problem {name}"
        counts.failed.append(line)
        tell(line)
        if alone:
            traceback.print_exc()
        return not any(words in str(error) for words in _FAULTS)
    finally:
        for kernel, n in (Counter(dispatch.calls()) - before).items():
            counts.kernels[f"{kind}:{kernel}"] += n
    return True


def run(options: argparse.Namespace, place: Place, again: str) -> Counts:
    counts = Counts()
    if options.problem:
        shapes = range(SHAPES) if options.problem.count("-") == 1 else [None]
        names: Iterator[str] = (options.problem if s is None else f"{options.problem}-{s}" for s in shapes)
    else:
        names = names_of(options.seed, options.only)
    with ExitStack() as stack:
        log: TextIO | None = stack.enter_context(options.log.open("w")) if options.log else None
        end = time.monotonic() + options.seconds
        for name in names:
            if not options.problem and time.monotonic() > end:
                break
            if log is not None:
                log.write(f"{name}\n")
                log.flush()
            if not attempt(name, place, counts, again, alone=bool(options.problem)):
                tell("the device has faulted: nothing runs in this process any more")
                break
    return counts


def run_processes(options: argparse.Namespace, arguments: list[str]) -> Counts:
    """As many processes, of seeds that follow one another."""
    counts, children = Counts(), []
    for i in range(options.processes):
        seed = options.seed + i
        report = Path(f"{options.log or 'fuzz'}.{seed}.json")
        report.unlink(missing_ok=True)
        log = report.with_suffix(".log")
        given = [*arguments, "--processes", "1", "--seed", str(seed), "--log", str(log), "--report", str(report)]
        children.append((subprocess.Popen([sys.executable, "-m", "tests.kernels.fuzz", *given]), report, log))
    end = time.monotonic() + options.seconds + _GRACE_S
    for process, report, log in children:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if report.exists():
            found = json.loads(report.read_text())
            ran, kernels, refused = (Counter(found[x]) for x in ("ran", "kernels", "refused"))
            counts.add(Counts(ran, kernels, refused, found["failed"]))
            report.unlink()
        else:
            last = log.read_text().split()[-1:] if log.exists() else []
            counts.failed.append(f"FAILED a process ended with {process.returncode}, in problem {' '.join(last)}")
            tell(counts.failed[-1])
    return counts


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.kernels.fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="after which no problem begins")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=kinds_of, default=list(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--problem", help="one problem, or one set of them, as a failure's line names it")
    parser.add_argument("--device", choices=("cuda", "cpu", "emulated"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny problems")
    parser.add_argument("--log", type=Path, help="a file for each problem's name, before it runs")
    parser.add_argument("--processes", type=int, default=1, help="side by side, of seeds from --seed on")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here: --device cpu runs the CPU reference, --device emulated the kernels on a CPU")
    if options.problem and not re.fullmatch(rf"({'|'.join(KINDS)})-\d+(-\d+)?", options.problem):
        parser.error(f"a problem is a kind, a set and a shape, as in forward-123-4, not {options.problem}")
    return options


def kinds_of(names: str) -> list[str]:
    asked = names.split(",")
    if unknown := [name for name in asked if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return asked


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    if options.processes > 1 and not options.problem:
        counts = run_processes(options, arguments)
    else:
        emulated = options.device == "emulated"  # where the seed orders threads
        where = (
            f" --device {options.device}" * (options.device != "cuda")
            + " --small" * options.small
            + f" --seed {options.seed}" * emulated
        )
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(sm90_chunks, PAIRS_KEYS=PAIRS_KEYS, PAIRS_GAIN=PAIRS_GAIN))
            if emulated:
                from tests.emulator.device import Settings, emulated_device

                stack.enter_context(emulated_device(Settings(seed=options.seed)))
            place = place_of(options.device, small=options.small)
            counts = run(options, place, f"python -m tests.kernels.fuzz{where}")
    if options.report:
        options.report.write_text(json.dumps(vars(counts)))
    else:
        tell("\n".join(counts.lines()))
    return int(bool(counts.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
