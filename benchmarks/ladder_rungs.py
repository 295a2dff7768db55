"""The rungs of docs/ladder: which file, which GPU, how it is compiled and launched. Knows no clock.

A rung is compiled as the product's kernels are, but into memory: the cache on disk is the product's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention_backend.jit import KERNELS_DIR, KernelVariant, arch_for, compiler, runs_on
from attention_backend.jit.artefact import Artefact
from attention_backend.jit.launch import Argument, place
from attention_backend.jit.sources import SourceSnapshot
from attention_backend.jit.spec import capability_of

LADDER = Path(__file__).resolve().parents[1] / "docs" / "ladder"
HEAD_DIM = 128
TILE = 128  # sequence lengths are multiples of this

_TMA_TILES = 2 * 2 * TILE * HEAD_DIM * 2  # bytes: two stages of keys and values
_TMA_REST = 1024 + 9 * 8  # tiles start at a multiple of 1,024; barriers
_FLOAT_TILES = 4 * (2 * 64 * (HEAD_DIM + 4) + 64 * (64 + 4))
_LOCAL_INCLUDE = re.compile(r'^\s*#\s*include\s+"(parts/[^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Rung:
    """One kernel of the ladder: docs/ladder/<name>.cu.

    * idea: what it adds to the rung before
    * arch: the oldest GPU that it runs on, as NVRTC names it; with an `a` the only one
    * rows: query rows of a thread block
    * scores: it keeps the scores in global memory, float32 [heads, n, n]
    * maps: it reads q, k and v through tensor maps
    """

    name: str
    idea: str
    arch: str
    rows: int
    threads: int
    smem_bytes: int
    scores: bool = False
    maps: bool = False

    @property
    def path(self) -> Path:
        return LADDER / f"{self.name}.cu"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return runs_on(self.arch, capability) if self.arch.endswith("a") else capability >= capability_of(self.arch)


RUNGS = (
    Rung("rung1_naive", "one thread a row, scores in global memory", "sm_75", 128, 128, 0, scores=True),
    Rung("rung2_tiled", "tiles in shared memory", "sm_80", 64, 256, _FLOAT_TILES, scores=True),
    Rung("rung3_online", "online softmax: no scores in global memory", "sm_80", 64, 256, _FLOAT_TILES),
    Rung("rung4_mma", "tensor cores by mma.sync", "sm_80", 64, 128, 3 * 64 * (HEAD_DIM * 2 + 16)),
    Rung(
        "rung5_tma_wgmma",
        "TMA, wgmma, warp specialisation",
        "sm_90a",
        64,
        160,
        _TMA_TILES + 64 * HEAD_DIM * 2 + _TMA_REST,
        maps=True,
    ),
    Rung(
        "rung6_overlap",
        "softmax and tensor cores at the same time",
        "sm_90a",
        128,
        384,
        _TMA_TILES + 128 * HEAD_DIM * 2 + _TMA_REST,
        maps=True,
    ),
)


def source(rung: Rung) -> SourceSnapshot:
    """The rung with the headers of attention_backend/kernels/parts that it includes, directly or through others."""
    text = rung.path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    waiting = _LOCAL_INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in headers:
            headers[name] = (KERNELS_DIR / name).read_text(encoding="utf-8")
            waiting += _LOCAL_INCLUDE.findall(headers[name])
    return SourceSnapshot(rung.path.name, text, tuple(sorted(headers.items())))


def compile_rung(rung: Rung, arch: str) -> Artefact:
    """The rung as a cubin for `arch`; no GPU needed. Raises CompileError."""
    variant, snapshot = KernelVariant(rung.name, arch), source(rung)
    compiled = compiler.compile_variant(variant, snapshot)
    key = compiler.key(variant, snapshot)
    return Artefact(key, str(variant), compiled.cubin, compiled.report, compiled.seconds)


def make(rung: Rung, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Callable[[], Tensor]:
    """A call that computes softmax(q k^T / sqrt(128)) v into `out`. All are bfloat16 `[heads, n, 128]`, contiguous."""
    heads, n, _ = q.shape
    if q.shape[2] != HEAD_DIM or n % TILE or not all(x.is_contiguous() and x.shape == q.shape for x in (k, v, out)):
        raise ValueError(f"a rung takes contiguous [heads, n, {HEAD_DIM}] with n a multiple of {TILE}, not {q.shape}")
    device = q.device.index
    arch = arch_for(torch.cuda.get_device_capability(device))
    kernel = place(KernelVariant(rung.name, arch), compile_rung(rung, arch), device)
    arguments: list[Argument] = [q, k, v, out]
    if rung.maps:
        from attention_backend.kernels.tensor_map import tensor_map

        # Rows are the second dimension of a map's tensor, heads the third.
        box_rows = (rung.rows, TILE, TILE)
        arguments[:3] = [tensor_map(x.transpose(0, 1), rows) for x, rows in zip((q, k, v), box_rows, strict=True)]
    if rung.scores:
        arguments.append(torch.empty(heads, n, n, dtype=torch.float32, device=q.device))
    arguments.append(np.int32(n))
    parameters = tuple(arguments)
    grid, block = (n // rung.rows, heads, 1), (rung.threads, 1, 1)

    def call() -> Tensor:
        kernel(grid, block, parameters, rung.smem_bytes)
        return out

    return call
