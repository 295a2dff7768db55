"""Starts a worker process of this program, which is told what it should know and inherits the rest. Knows no worker."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import socket
from typing import Protocol

import msgspec

#: How many products torch and oneDNN keep compiled on a CPU, each in a cache of its own: as many as some 25 numbers of
#: rows need. Every number of rows of every shape is one, of half a megabyte; with their own limit (1024) an engine grew
#: by 600 MB within minutes of mixed requests, and was hardly faster.
PRODUCTS = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
#: What torch reads from the environment of a process that trains, unless the operator's own says otherwise. Without the
#: first, deterministic plans are refused on a GPU (32 MiB: as much as torch gives cuBLAS on Hopper). Without the other
#: one, what a long sequence keeps lies scattered between blocks that its layers free, and less of it fits.
TRAINING = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
#: The same on a CPU, where no OMP_WAIT_POLICY says how threads wait for each other: a moment, and then they sleep. They
#: would spin for milliseconds, and where another process keeps a core busy, on the one that the awaited thread needs: a
#: step took up to 44 s in place of 0.7. Fewer threads, as the engine takes meanwhile, may round differently, and jobs
#: repeat bit for bit.
WAITING = {"GOMP_SPINCOUNT": "1000"}


class TrainerArguments(Protocol):
    """What any trainer is told; a msgspec.Struct."""

    @property
    def cache_dir(self) -> str | None: ...

    @property
    def answering_fd(self) -> int | None: ...


def spawn_trainer(worker: str, arguments: TrainerArguments, theirs: socket) -> "subprocess.Popen[bytes]":
    """Its arguments are its end of a socket pair and `arguments` as JSON. Raises OSError."""
    text = msgspec.json.encode(arguments).decode()
    sign = () if arguments.answering_fd is None else (arguments.answering_fd,)
    number = theirs.fileno()
    defaults = TRAINING if "OMP_WAIT_POLICY" in os.environ else TRAINING | WAITING
    return spawn(worker, [str(number), text], cache_dir=arguments.cache_dir, files=(number, *sign), defaults=defaults)


def spawn(
    worker: str,
    arguments: Sequence[str],
    *,
    cache_dir: str | None,
    files: Sequence[int],
    defaults: Mapping[str, str] | None = None,
    process_group: int | None = None,
) -> "subprocess.Popen[bytes]":
    """`python -m worker arguments...`, which imports what this process would and keeps `files` (descriptors) open.

    `cache_dir`: of kernels, which are cached by a room that knows no settings, only LONGWAVE_CACHE_DIR. `defaults`: of
    the environment, beside PRODUCTS. Raises OSError.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    cache = {} if cache_dir is None else {"LONGWAVE_CACHE_DIR": cache_dir}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", worker, *arguments],
        env={**PRODUCTS, **(defaults or {}), **os.environ, **cache, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=files,
        process_group=process_group,
    )
