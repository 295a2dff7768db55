"""Linear attention: problem -> tiles, segments and compiled kernels. Knows no launch and no device."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

import torch

from attention_backend.heuristics.sm80 import ROW_PAD, SHARED_MEMORY
from attention_backend.jit.spec import KernelVariant
from attention_backend.reference.linear import FeatureMap

HEAD_DIMS = tuple(range(16, 129, 16))
CHUNK = 64  # tokens of a tile of linear_causal; segments are made of them
PREFIX_THREADS = 256
_MIN_SEGMENT = 256  # tokens; below, states cost more than the tokens between them
_WAVES = 4  # more segments than this many full cards gain nothing
_REGISTERS = 65536
#: 16-wide slices of the state a warp owns. Two halve the shared memory traffic, at the price of nearly all registers.
_SLICES = {96: 2, 128: 2}


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """What of a problem is compiled in."""

    dtype: torch.dtype
    head_dim: int
    feature_map: FeatureMap = "elu"
    normalize: bool = True

    def defines(self) -> tuple[tuple[str, int], ...]:
        features = {"none": 0, "elu": 1, "relu": 2}[self.feature_map]
        return (("BF16", int(self.dtype == torch.bfloat16)), ("HEAD_DIM", self.head_dim), ("FEATURES", features))

    @property
    def pitch(self) -> int:
        """Bytes of a row in shared memory."""
        return 2 * self.head_dim + ROW_PAD

    @property
    def state_floats(self) -> int:
        return self.head_dim * (self.head_dim + 1)


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """A variant with its launch: threads and dynamic shared memory of a block, and how many blocks an SM holds."""

    variant: KernelVariant
    threads: int
    smem_bytes: int
    blocks_per_sm: int


@cache
def states_kernel(options: LinearOptions, arch: str) -> LinearKernel:
    slices = _SLICES.get(options.head_dim, 1)
    threads = 2 * options.head_dim // slices
    for tile, stages in ((64, 3), (64, 2), (32, 2)):
        smem = stages * 2 * tile * options.pitch
        if smem <= SHARED_MEMORY[arch]:
            break
    blocks = _blocks_per_sm(arch, smem, threads, 255 if slices == 2 else 168)
    defines = (*options.defines(), ("SLICES", slices), ("TILE", tile), ("STAGES", stages), ("MIN_BLOCKS", blocks))
    return LinearKernel(KernelVariant("linear_states", arch, defines, hot=True), threads, smem, blocks)


@cache
def prefix_kernel(options: LinearOptions, arch: str, causal: bool) -> LinearKernel:
    variant = KernelVariant("linear_prefix", arch, (*options.defines(), ("CAUSAL", int(causal))), hot=True)
    return LinearKernel(variant, PREFIX_THREADS, 0, 1)


@cache
def full_kernel(options: LinearOptions, arch: str) -> tuple[LinearKernel, int]:
    """The kernel, and the query rows that a block takes at a time."""
    state = options.head_dim * options.pitch + 4 * options.head_dim
    for warps, row_tiles, stages in ((4, 2, 2), (4, 1, 2), (2, 1, 2)):
        smem = state + warps * stages * 16 * row_tiles * options.pitch
        if smem <= SHARED_MEMORY[arch]:
            break
    blocks = _blocks_per_sm(arch, smem, 32 * warps, 255 if options.head_dim > 64 else 168)
    defines = (
        *options.defines(),
        ("NORMALIZE", int(options.normalize)),
        ("NUM_WARPS", warps),
        ("ROW_TILES", row_tiles),
        ("STAGES", stages),
        ("MIN_BLOCKS", blocks),
    )
    kernel = LinearKernel(KernelVariant("linear_full", arch, defines, hot=True), 32 * warps, smem, blocks)
    return kernel, 16 * warps * row_tiles


@cache
def causal_kernel(options: LinearOptions, arch: str) -> LinearKernel:
    # Two slices, and how many rows' outputs are in registers at a time: what leaves no compiler with a spill.
    slices = 1 if arch == "sm_75" else _SLICES.get(options.head_dim, 1)
    tiles = 4 if slices == 1 else 2 if options.normalize else 1
    threads = 2 * options.head_dim // slices
    scores = CHUNK * (2 * CHUNK + ROW_PAD) + 4 * CHUNK * (CHUNK // 16) + 4 * options.head_dim
    for stages in (2, 1):
        smem = stages * 3 * CHUNK * options.pitch + scores
        if smem <= SHARED_MEMORY[arch]:
            break
    blocks = _blocks_per_sm(arch, smem, threads, 255 if slices == 2 else 168)
    defines = (
        *options.defines(),
        ("NORMALIZE", int(options.normalize)),
        ("SLICES", slices),
        ("PASS_TILES", tiles),
        ("STAGES", stages),
        ("MIN_BLOCKS", blocks),
    )
    return LinearKernel(KernelVariant("linear_causal", arch, defines, hot=True), threads, smem, blocks)


def _blocks_per_sm(arch: str, smem: int, threads: int, registers: int) -> int:
    # An SM has 1 KiB more shared memory than a block may ask for, and each block takes 1 KiB for itself.
    return max(1, min((SHARED_MEMORY[arch] + 1024) // (smem + 1024), _REGISTERS // (threads * registers)))


@dataclass(frozen=True, slots=True)
class Segments:
    """A length in pieces: all of `length` tokens but the last."""

    count: int
    length: int


@lru_cache(maxsize=4096)
def segments(
    tokens: int, pairs: int, slots: int, *, unit: int = CHUNK, state_tokens: int = 0, again: float = 1.0
) -> Segments:
    """Pieces of a length so that `pairs` times as many blocks, `slots` at a time, are done soonest.

    A piece is a multiple of `unit` tokens. Having more than one costs each piece `state_tokens` (a state is written,
    summed and read in float32: as much memory traffic as about two tokens per element of head_dim), and all the work
    `again` times (keys and values are read twice).
    """
    most = min(-(-tokens // max(unit, _MIN_SEGMENT)), max(1, -(-_WAVES * slots // pairs)))
    best, best_cost = Segments(1, -(-tokens // unit) * unit), float(-(-pairs // slots) * tokens)
    for wanted in range(2, most + 1):
        length = -(-tokens // (wanted * unit)) * unit
        count = -(-tokens // length)
        cost = -(-pairs * count // slots) * (length + state_tokens) * again
        if cost < best_cost:
            best, best_cost = Segments(count, length), cost
    return best


def covering(arch: str) -> Iterator[KernelVariant]:
    """What is compiled ahead: every head_dim, both sums of states, and what else is an option once."""
    main = torch.float16 if arch == "sm_75" else torch.bfloat16
    for head_dim in HEAD_DIMS:
        yield from _outer_passes(LinearOptions(main, head_dim), arch)
    for causal, head_dim in product((False, True), (64, 128)):
        yield prefix_kernel(LinearOptions(main, head_dim), arch, causal).variant
    yield from _outer_passes(LinearOptions(torch.float16, 64, "relu"), arch)
    yield from _outer_passes(LinearOptions(torch.float16, 128, "none", normalize=False), arch)


def _outer_passes(options: LinearOptions, arch: str) -> Iterator[KernelVariant]:
    yield states_kernel(options, arch).variant
    yield full_kernel(options, arch)[0].variant
    yield causal_kernel(options, arch).variant


def all_passes(options: LinearOptions, arch: str) -> Iterator[KernelVariant]:
    """Every kernel that a problem with these options may launch, whatever its lengths."""
    yield from _outer_passes(options, arch)
    for causal in (False, True):
        yield prefix_kernel(options, arch, causal).variant
