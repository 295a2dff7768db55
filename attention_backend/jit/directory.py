"""Trust in a directory of compiled kernels: code from it runs on the GPU, so nobody else may be able to write there."""

import os
import stat
from pathlib import Path

from attention_backend.jit.errors import CacheDirectoryError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def secure(path: Path) -> Path:
    """Create `path` (mode 0700, missing parents too) and check it. CacheDirectoryError when it is not ours alone."""
    path = Path(os.path.abspath(path))  # noqa: PTH100  resolve() would follow the symlink that must be refused
    try:
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot create the kernel cache {path}: {error}; set LONGWAVE_CACHE_DIR to a directory of your own"
        ) from error
    trusted_cache(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CacheDirectoryError(f"the kernel cache {path} is not writable; set LONGWAVE_CACHE_DIR to one that is")
    return path


def trusted_cache(path: Path) -> None:
    """Check a user's cache, which is there. Raises CacheDirectoryError when it is not ours alone."""
    _check(Path(os.path.abspath(path)), owners={os.geteuid()}, setting="LONGWAVE_CACHE_DIR")  # noqa: PTH100


def trusted_image(path: Path) -> Path:
    """Check a read-only directory of kernels, which root may own (an image built it). Raises CacheDirectoryError."""
    path = Path(os.path.abspath(path))  # noqa: PTH100
    _check(path, owners={0, os.geteuid()}, setting="LONGWAVE_KERNEL_IMAGE_DIR")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CacheDirectoryError(f"the kernel directory {path} (LONGWAVE_KERNEL_IMAGE_DIR) is not readable")
    return path


def _check(path: Path, *, owners: set[int], setting: str) -> None:
    """Refuse a directory that is a symlink, belongs to somebody else, or that others could write or swap."""
    try:
        status = path.lstat()
    except OSError as error:
        raise CacheDirectoryError(f"cannot read the kernel directory {path} ({setting}): {error}") from error
    if stat.S_ISLNK(status.st_mode):
        raise CacheDirectoryError(f"{path} is a symbolic link; give the directory itself as {setting}")
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(f"{path} ({setting}) is not a directory")
    if status.st_uid not in owners:
        raise CacheDirectoryError(
            f"{path} belongs to uid {status.st_uid}, not to uid {os.geteuid()}: kernels in it are not trusted; "
            f"choose another {setting}"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise CacheDirectoryError(
            f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): kernels in it are not "
            f"trusted; chmod go-w it or choose another {setting}"
        )
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheDirectoryError(
                f"{path} could be replaced by others: {parent} is world-writable (mode {stat.S_IMODE(mode):04o}); "
                f"choose another {setting}"
            )
