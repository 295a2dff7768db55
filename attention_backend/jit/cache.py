"""Compiled kernels by key: from an image, from the user's cache directory, or compiled now. Knows no device."""

import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attention_backend.jit import artefact as artefacts
from attention_backend.jit import compiler, directory
from attention_backend.jit.artefact import Artefact, DamagedArtefactError
from attention_backend.jit.environment import JitEnvironment
from attention_backend.jit.sources import SourceSnapshot, snapshot
from attention_backend.jit.spec import KERNELS_DIR, KernelSource, KernelVariant

_SCRATCH, _LOCKS = ".scratch", ".locks"
_ABANDONED_SECONDS = 86_400.0
_LOG = logging.getLogger("attention_backend.jit")


@dataclass(frozen=True, slots=True)
class Lookup:
    """An artefact, whether it was on disk already, and whether it is now."""

    artefact: Artefact
    cached: bool
    kept: bool = True


class KernelCache:
    """Artefacts in `writable`, after those in `image`, which is never written.

    Any number of processes may share the directory: an artefact appears whole, by a rename, and a lock per key lets one
    process compile while the others wait for it. `sources` is the folder of the kernels.
    """

    def __init__(self, writable: Path, image: Path | None = None, sources: Path = KERNELS_DIR) -> None:
        self._writable = writable
        self._image = directory.trusted_image(image) if image is not None else None
        self._sources = sources

    def find(self, variant: KernelVariant) -> Artefact | None:
        """The variant's artefact if it is on disk; compiles nothing and writes nothing."""
        return self._find(compiler.key(variant, self.snapshot(variant.kernel)))

    def get(self, variant: KernelVariant, source: SourceSnapshot | None = None) -> Lookup:
        """The variant's artefact, compiled if need be; not kept, and that is logged, where the disk is full. `source`:
        of its kernel, where that has been read. Raises CompileError, SourceError or CacheDirectoryError."""
        source = source or self.snapshot(variant.kernel)
        key = compiler.key(variant, source)
        if found := self._find(key):
            return Lookup(found, cached=True)
        writable = directory.secure(self._writable)
        fresh: Artefact | None = None
        try:
            with _locked(writable, key):
                if found := _read(writable, key):
                    return Lookup(found, cached=True)
                fresh = _compiled(variant, source, key)
                artefacts.write(writable, fresh, lambda: _scratch(writable))
                return Lookup(fresh, cached=False)
        except OSError as error:
            _LOG.warning("%s cannot be kept and will be compiled again: %s", variant, error)
        return Lookup(fresh or _compiled(variant, source, key), cached=False, kept=False)

    def snapshot(self, kernel: str) -> SourceSnapshot:
        """The kernel's source as it is now. Raises SourceError."""
        return snapshot(KernelSource.named(kernel, self._sources))

    def _find(self, key: str) -> Artefact | None:
        if self._image is not None and (found := _read(self._image, key)):
            return found
        if not os.path.lexists(self._writable):
            return None
        directory.trusted_cache(self._writable)
        return _read(self._writable, key)


@lru_cache(maxsize=1)
def default_cache() -> KernelCache:
    """The cache of this user, as the environment has it at the first call."""
    environment = JitEnvironment.read()
    return KernelCache(environment.cache_directory, environment.image_directory)


def _compiled(variant: KernelVariant, source: SourceSnapshot, key: str) -> Artefact:
    compiled = compiler.compile_variant(variant, source)
    return Artefact(key, str(variant), compiled.cubin, compiled.report, compiled.seconds)


def _read(place: Path, key: str) -> Artefact | None:
    try:
        return artefacts.read(place, key)
    except DamagedArtefactError as error:
        _LOG.warning("compiling again: %s", error)
        return None


@contextmanager
def _locked(place: Path, key: str) -> Iterator[None]:
    """Hold the lock of a key; the kernel drops it when the process dies."""
    locks = place / _LOCKS
    locks.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(locks / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _scratch(place: Path) -> Path:
    """A path for staging, on the cache's own file system; what killed processes left there a day ago is removed."""
    scratch = place / _SCRATCH
    scratch.mkdir(mode=0o700, exist_ok=True)
    for abandoned in scratch.iterdir():
        try:
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_SECONDS:
                artefacts.remove(abandoned)
        except FileNotFoundError:
            continue  # its owner finished, or another process removed it
    return scratch / uuid.uuid4().hex
