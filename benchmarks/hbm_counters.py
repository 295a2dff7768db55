"""HBM bytes of calls by the GPU's own counters: Nsight Compute (ncu) runs hbm_probe.py and its CSV is read here.

One ncu process measures all probes, since starting Python under it costs seconds. The probe brackets every call with
marker kernels, which is how launches are assigned to calls; what the call left in the L2 unwritten is written back, and
counted, by the read of a large buffer after it.
"""

import csv
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Part of the name of the kernel behind `torch.cuda._sleep`, which nothing else launches.
MARKER = "spin_kernel"
_READ, _WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNIT = re.compile(r"([kmgt]?)(?:bytes?|b)", re.IGNORECASE)
_COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
_TAIL = 600  # characters of a failed ncu's output that are kept


class CountersUnavailableError(Exception):
    """The counters could not be read; the text says why."""


@dataclass(frozen=True, slots=True)
class HbmBytes:
    read: int
    write: int
    kernels: int  # launches of the call

    @property
    def total(self) -> int:
        return self.read + self.write


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch as ncu lists it."""

    kernel: str
    read: float
    write: float


def command(ncu: str, probes: Sequence[str]) -> list[str]:
    """Clocks stay as they are; caches are not flushed between the kernels of a call, as in an ordinary run."""
    return [
        *(ncu, "--csv", "--print-units", "base", "--metrics", f"{_READ},{_WRITE}"),
        *("--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"),
        *(sys.executable, str(Path(__file__).with_name("hbm_probe.py")), *probes),
    ]


def measure(probes: Sequence[str], ncu: str = "ncu", timeout_s: float = 60.0) -> dict[str, HbmBytes]:
    """Bytes of each probe (see hbm_probe.py for their form). Raises CountersUnavailableError."""
    found = shutil.which(ncu)
    if found is None:
        raise CountersUnavailableError(f"{ncu} is not there")
    code, said = _run(command(found, probes), timeout_s)
    if code != 0:
        raise CountersUnavailableError(f"ncu ended with {code}: {said.strip()[-_TAIL:]}")
    return dict(zip(probes, assign(launches(said), len(probes)), strict=True))


def _run(words: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output; at a timeout ncu and the program under it are ended."""
    try:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise CountersUnavailableError(f"ncu: {error}") from error
    with process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise CountersUnavailableError(f"ncu: not done in {timeout_s:.0f} s") from error
    return process.returncode, said


def launches(text: str) -> list[Launch]:
    """The launches in ncu's output (`--csv`, a row per launch and metric), in order.

    Lines before the table, and ncu's own (==PROF==) within, are skipped. Raises CountersUnavailableError for output
    without the table, or with a metric that was not counted.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise CountersUnavailableError(f"no table in ncu's output: {text.strip()[-_TAIL:]}")
    table = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise CountersUnavailableError(f"ncu's table has no column {', '.join(missing)}")
    kernels: dict[int, str] = {}
    metrics: dict[int, dict[str, float]] = {}
    for row in table:
        if not row["ID"].isdecimal():
            continue  # a row of units
        launch = int(row["ID"])
        kernels[launch] = row["Kernel Name"]
        metrics.setdefault(launch, {})[row["Metric Name"]] = in_bytes(row["Metric Value"], row["Metric Unit"])
    for launch, counted in metrics.items():
        if not {_READ, _WRITE} <= counted.keys():
            raise CountersUnavailableError(f"ncu counted only {sorted(counted)} of {kernels[launch]}")
    return [Launch(kernels[i], metrics[i][_READ], metrics[i][_WRITE]) for i in sorted(metrics)]


def in_bytes(value: str, unit: str) -> float:
    """`("1,234.5", "Kbyte")` -> 1234500.0; ncu's prefixes are decimal. Raises CountersUnavailableError."""
    parsed = _UNIT.fullmatch(unit.strip())
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if parsed is None or not math.isfinite(number):
        raise CountersUnavailableError(f"ncu says {value!r} {unit!r}, which is no number of bytes")
    return number * _PREFIXES[parsed[1].lower()]


def assign(found: Iterable[Launch], probes: int) -> list[HbmBytes]:
    """Bytes of each of the probes. A probe is: marker, the launches of the call, marker, the launches that flush.

    Raises CountersUnavailableError when there are not two markers a probe, or a call launched nothing.
    """
    sections = list(_sections(found))
    if len(sections) != 2 * probes:
        raise CountersUnavailableError(f"{len(sections)} markers for {probes} probes")
    totals = []
    for call, flush in zip(sections[::2], sections[1::2], strict=True):
        if not call or not flush:
            raise CountersUnavailableError("a probe without kernels")
        write = sum(launch.write for launch in (*call, *flush))
        totals.append(HbmBytes(round(sum(launch.read for launch in call)), round(write), len(call)))
    return totals


def _sections(found: Iterable[Launch]) -> Iterator[list[Launch]]:
    """The launches after each marker."""
    section: list[Launch] | None = None
    for launch in found:
        if MARKER in launch.kernel:
            if section is not None:
                yield section
            section = []
        elif section is not None:
            section.append(launch)
    if section is not None:
        yield section
