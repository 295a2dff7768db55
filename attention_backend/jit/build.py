"""Compiles the covering set ahead of time, with no GPU: for images, CI and `longwave kernels`. Knows no device."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from attention_backend.jit.artefact import Artefact
from attention_backend.jit.cache import KernelCache, default_cache
from attention_backend.jit.errors import CacheDirectoryError, CompileError
from attention_backend.jit.report import CompileReport
from attention_backend.jit.sources import SourceSnapshot
from attention_backend.jit.spec import ARCHS, KernelVariant


@dataclass(frozen=True, slots=True)
class BuildResult:
    """One variant, compiled or (cached) found."""

    variant: KernelVariant
    cached: bool
    artefact: Artefact

    @property
    def seconds(self) -> float:
        """What its compilation took when it was compiled."""
        return self.artefact.seconds

    @property
    def report(self) -> CompileReport:
        return self.artefact.report


Progress = Callable[[BuildResult], None]


def archs_named(name: str) -> tuple[str, ...]:
    """`all`, one architecture, or several with commas between. Raises ValueError with the names there are."""
    archs = ARCHS if name == "all" else tuple(part.strip() for part in name.split(","))
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        raise ValueError(f"no kernels for {', '.join(unknown)}: give all, or some of {', '.join(ARCHS)}")
    return archs


def list_variants(archs: Sequence[str] = ARCHS) -> list[KernelVariant]:
    """The covering set: every variant that a call could select with the default heuristics, on these architectures."""
    from attention_backend.dispatch import covering_set  # here, because it imports this room

    return list(dict.fromkeys(variant for arch in archs for variant in covering_set(arch)))


def build(
    archs: Sequence[str] = ARCHS,
    out: Path | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[BuildResult]:
    """Compile the covering set of `archs` into `out`, or into the user's cache.

    A directory built so can be given as LONGWAVE_KERNEL_IMAGE_DIR, to other users too. Raises as build_variants does,
    and CacheDirectoryError where there can be none.
    """
    if out is not None:
        try:
            out.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheDirectoryError(f"{out} cannot be a folder of kernels: {error.strerror}") from error
    cache = default_cache() if out is None else KernelCache(out)
    return build_variants(list_variants(archs), cache, jobs, progress)


def build_variants(
    variants: Iterable[KernelVariant],
    cache: KernelCache,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[BuildResult]:
    """Compile variants with `jobs` threads (one per CPU by default); the results are in the variants' order.

    Threads are enough: CuPy releases the interpreter's lock and NVRTC 13 takes none of its own (measured: 8 kernels in
    3.8 s one after another, 2.0 s on two cores with threads, 2.0 s with processes). `progress` is called in this thread
    as each is done. Every variant is tried; those that do not compile are raised together as one CompileError.
    """
    wanted = dict.fromkeys(variants)
    sources = {kernel: cache.snapshot(kernel) for kernel in dict.fromkeys(variant.kernel for variant in wanted)}
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), thread_name_prefix="nvrtc") as pool:
        futures = {pool.submit(_build_one, variant, cache, sources[variant.kernel]): variant for variant in wanted}
        try:
            failures = _report_each(futures, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if failures:
        raise CompileError(
            f"{len(failures)} of {len(futures)} kernels do not compile:\n\n" + "\n\n".join(map(str, failures)),
            "\n".join(failure.log for failure in failures),
        )
    return [future.result() for future in futures]


def check(results: Iterable[BuildResult]) -> list[str]:
    """What is wrong with compiled kernels that nevertheless compiled, one line each; empty when all is well.

    A hot kernel may neither spill nor use local memory; no kernel may have its wgmma serialised or setmaxnreg ignored.
    """
    violations = []
    for result in results:
        report = result.report
        if result.variant.hot and report.spill_bytes:
            violations.append(f"{result.variant} spills {report.spill_bytes} bytes ({report.registers} registers)")
        if result.variant.hot and report.local_bytes:
            violations.append(f"{result.variant} uses {report.local_bytes} bytes of local memory")
        violations += [f"{result.variant}: {warning}" for warning in report.wgmma_warnings]
    return violations


def _build_one(variant: KernelVariant, cache: KernelCache, source: SourceSnapshot) -> BuildResult:
    found = cache.get(variant, source)
    if not found.kept:
        raise CacheDirectoryError(f"{variant} is compiled and cannot be written: the log says why")
    return BuildResult(variant, found.cached, found.artefact)


def _report_each(futures: Iterable[Future[BuildResult]], progress: Progress | None) -> list[CompileError]:
    failures = []
    for future in as_completed(futures):
        error = future.exception()
        if isinstance(error, CompileError):
            failures.append(error)
        elif error is not None:
            raise error
        elif progress is not None:
            progress(future.result())
    return failures
