"""Folders that are whole or not there: written beside their place, hashed, synced and renamed. Knows no tensor.

The order (Pillai et al. 2014): files, their sync, the manifest, its sync, the folder's, the rename, the parent's.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from models.training.errors import CheckpointError, DiskFullError

MANIFEST = "manifest.json"


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """`fill` writes the files into the folder it is given; then `target` appears, with a manifest, in one instant.

    A folder that stands there is replaced. Raises CheckpointError when the disk refuses, DiskFullError when it is full;
    nothing is left behind then.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            temporary.chmod(0o755)
            fill(temporary)
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            manifest = {"files": {path.relative_to(temporary).as_posix(): _facts(path) for path in files}}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in [temporary / MANIFEST, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
                _sync(path)
            _put(temporary, target)
            _sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = DiskFullError if _is_full_disk(error) else CheckpointError
        raise reason(f"{target} cannot be written: {error}") from error


def _put(temporary: Path, target: Path) -> None:
    """What stood there goes when the new folder stands: deleting takes long, and may fail in the middle."""
    if not target.exists():
        temporary.rename(target)
        return
    before = target.rename(temporary.with_name(f"{temporary.name}-before"))
    try:
        temporary.rename(target)
    except BaseException:
        before.rename(target)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _is_full_disk(error: OSError | SafetensorError) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return any(f"os error {number}" in str(error) for number in full)  # safetensors only quotes the number


def is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there, with its SHA-256. Raises CheckpointError where nobody can tell: a
    disk that does not answer now has the files perhaps tomorrow."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        return all(_sha256(folder / name) == facts["sha256"] for name, facts in manifest["files"].items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False
    except OSError as error:
        raise CheckpointError(f"{folder.name} cannot be read: {error.strerror}") from error


def remove_unfinished(parent: Path) -> None:
    """Removes what a killed `write_folder` left in `parent`; nobody else may be writing there."""
    for left in parent.glob(".*-*"):
        if left.is_dir():
            shutil.rmtree(left)


def _facts(path: Path) -> dict[str, Any]:
    _sync(path)
    return {"sha256": _sha256(path), "size": path.stat().st_size}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
