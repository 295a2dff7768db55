"""Where and from what a benchmark ran: commit, GPU, CPU, driver, versions, date. What cannot be found becomes null."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def facts(commit: str | None = None) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "gpu": gpu.name if gpu else None,
        "multiprocessors": gpu.multi_processor_count if gpu else None,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "cupy": installed("cupy-cuda13x") or installed("cupy-cuda12x") or installed("cupy"),
        "transformers": installed("transformers"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else []
    return names[0] if names else platform.machine()


def git_commit() -> str | None:
    """The commit of this checkout, marked when tracked files differ from it; None outside a checkout."""
    commit = output("git", "rev-parse", "HEAD")
    if commit and output("git", "status", "--porcelain", "--untracked-files=no"):
        return f"{commit} with changes"
    return commit


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def output(*command: str) -> str | None:
    """The first line that a command writes, or None when it is missing, fails or writes nothing."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
