"""A compiled kernel on disk: a directory with kernel.cubin and manifest.json, complete or absent. Knows no compiler."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attention_backend.jit.report import CompileReport

_CUBIN, _MANIFEST = "kernel.cubin", "manifest.json"
_FORMAT = 2


class DamagedArtefactError(ValueError):
    """What lies on disk is not what was written: truncated, changed, or of another key."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """A cubin, the key it is a function of, what the compiler said, and how long it took in seconds."""

    key: str
    description: str
    cubin: bytes
    report: CompileReport
    seconds: float


def read(directory: Path, key: str) -> Artefact | None:
    """The artefact of `key`, None when there is none of this format. Raises DamagedArtefactError when its digest does
    not fit, or when it cannot be read."""
    place = directory / key
    try:
        manifest = json.loads((place / _MANIFEST).read_bytes())
        cubin = (place / _CUBIN).read_bytes()
        if manifest["format"] != _FORMAT:  # of another version of this module
            return None
        if manifest["key"] != key:
            raise DamagedArtefactError(f"{place} is of another key")
        if manifest.pop("sha256") != _digest(manifest, cubin):
            raise DamagedArtefactError(f"{place} has been changed or truncated")
        return Artefact(key, manifest["description"], cubin, _report(manifest["report"]), float(manifest["seconds"]))
    except FileNotFoundError as error:
        if place.exists():
            raise DamagedArtefactError(f"{place} is incomplete: {error}") from error
        return None
    except DamagedArtefactError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise DamagedArtefactError(f"{place} cannot be read: {error!r}") from error


def write(directory: Path, artefact: Artefact, scratch: Callable[[], Path]) -> None:
    """Publish an artefact by one rename, replacing a damaged one.

    `scratch` gives a fresh path on the same file system. When another process published the same key first, its
    artefact stays. Raises OSError, and then leaves nothing.
    """
    staged = scratch()
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "key": artefact.key,
        "description": artefact.description,
        "seconds": artefact.seconds,
        "report": asdict(artefact.report),
    }
    manifest["sha256"] = _digest(manifest, artefact.cubin)
    try:
        staged.mkdir(mode=0o755)  # a cache's own directory is 0700; an image's kernels are read by another user
        _write_durably(staged / _CUBIN, artefact.cubin)
        _write_durably(staged / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_directory(staged)
        place = directory / artefact.key
        while not _rename(staged, place):
            if _intact(directory, artefact.key):
                break
            # Moved away before it is deleted: no reader sees it half deleted.
            removed = scratch()
            if _rename(place, removed):
                remove(removed)
    finally:
        remove(staged)  # if it is still there
    _sync_directory(directory)


def remove(path: Path) -> None:
    """A folder with all that it holds, or whatever lies there instead. What cannot go stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _intact(directory: Path, key: str) -> bool:
    try:
        return read(directory, key) is not None
    except DamagedArtefactError:
        return False


def _rename(source: Path, target: Path) -> bool:
    """False when the target is there already, or the source is gone: another process was faster."""
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    except OSError:
        if target.exists():
            return False
        raise
    return True


def _write_durably(path: Path, content: bytes) -> None:
    # Readable by all (a cache's directory is not), writable by its owner whatever the umask.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor, not a path
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(manifest: dict[str, Any], cubin: bytes) -> str:
    """Of all but itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode() + cubin).hexdigest()


def _report(fields: dict[str, Any]) -> CompileReport:
    return CompileReport(
        **{**fields, "parameter_sizes": tuple(fields["parameter_sizes"]), "warnings": tuple(fields["warnings"])}
    )
