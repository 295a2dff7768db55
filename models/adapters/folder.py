"""A folder as PEFT's save_pretrained writes it -> the bytes of its two files and their digest. Knows no tensors.

What is hashed is what is read later, and a folder that somebody else names may not lead out of where it must be.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from models.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    config: bytes
    weights: bytes
    digest: str  # SHA-256 of both, hexadecimal: equal digests are equal adapters
    written: int  # when its weights were, in seconds since 1970


def open_folder(folder: str, max_weight_bytes: int, within: str | None = None) -> AdapterFiles:
    """Raises AdapterError. With `within`, `folder` counts from there, and folder and files must lie in it after every
    symbolic link is followed."""
    place = _resolve(folder, "", within)
    try:
        if not place.is_dir():
            raise AdapterError(f"there is no folder {folder}")
        if not (place / WEIGHTS).exists():
            raise AdapterError(
                f"{folder} holds {_found(place)}: an adapter is read from {WEIGHTS} alone, with {CONFIG}"
            )
        if not (place / CONFIG).exists():
            raise AdapterError(f"{folder} has no {CONFIG}: it is no folder that PEFT saved an adapter in")
    except OSError as error:
        raise AdapterError(f"{folder:.200} cannot be read: {error.strerror or error}") from error
    config, _ = _read(_resolve(folder, CONFIG, within), CONFIG, MAX_CONFIG_BYTES)
    weights, written = _read(_resolve(folder, WEIGHTS, within), WEIGHTS, max_weight_bytes)
    digest = hashlib.sha256(hashlib.sha256(config).digest() + hashlib.sha256(weights).digest())
    return AdapterFiles(config, weights, digest.hexdigest(), written)


def _resolve(folder: str, file: str, within: str | None) -> Path:
    """Tells of what is outside no more than of what is not there, and shows paths as they were given."""
    try:
        place = Path(within or "", folder, file).resolve()
        inside = within is None or place.is_relative_to(Path(within).resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name with a zero byte
        inside = False
    if not inside:
        raise AdapterError(f"{Path(folder, file)!s:.4096} is not in the folder that adapters may be loaded from")
    return place


def _read(path: Path, name: str, limit: int) -> tuple[bytes, int]:
    """What the file holds, and when it was written."""
    try:
        # NONBLOCK: opening a pipe must not wait for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise AdapterError(f"{name} is no regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                read = file.read(limit + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise AdapterError(f"{name} cannot be read: {error.strerror or error}") from error
    if len(read) > limit:
        raise AdapterError(f"{name} is larger than {limit} bytes, the most that an adapter of this model can have")
    return read, int(found.st_mtime)


def _found(folder: Path) -> str:
    """What is there instead, for the error."""
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if others:
        return f"only {', '.join(others[:3])} (such files can run code when they are loaded)"
    return "no weights"
