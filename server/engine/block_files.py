"""One KV block as a file, and a directory of them: the format, what is checked, what is found after a restart. Knows no
thread and no device.

A file is named by its block's chained hash, in a folder of its owner's, in a folder of what computed it. Its header
repeats all that and the block's tokens, and has a checksum of the content: a file that is short, torn or another one is
a miss. Ancestors rest on SHA-256 alone. Nothing is synced: what a power cut tears is found by the same checks."""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from server.engine.prefixes import Prefix, root_hash

_MAGIC = b"LWKV\0\0\0\1"
_HEADER = struct.Struct(
    "<8s32s32s32sIIQ"
)  # magic, fingerprint, root, hash, CRC-32 of the content, sizes of tokens, content
_SECRET_BYTES = 32
_BLOCK = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.kv\.tmp")
_OWNER = re.compile(r"[0-9a-f]{16}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def owner_of(cache_salt: bytes) -> bytes:
    """A tenant, as files name it."""
    return hashlib.sha256(b"longwave kv blocks\0" + cache_salt).digest()[:8]


@dataclass(frozen=True, slots=True)
class BlockFile:
    """Where a prefix's last block is, and what its file must say of itself."""

    path: Path
    fingerprint: bytes
    prefix: Prefix

    def read(self, memory: memoryview) -> bool:
        """Fills `memory`; false when the file is not this block. Raises OSError."""
        head = bytearray(_HEADER.size + len(self.prefix.token_bytes))
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            parts = [memoryview(head), memory, memoryview(bytearray(1))]  # nothing comes for the last one
            size = _move(partial(os.readv, descriptor), parts)
            is_this = size == len(head) + len(memory) and head == self._head(memory)
            if is_this:
                os.utime(descriptor)  # used now: after a restart, what was used longest ago goes first
            return is_this
        finally:
            os.close(descriptor)

    def write(self, memory: memoryview, used_ns: int | None = None) -> None:
        """Whole or not at all, whenever the process ends. `used_ns`: when it was used last, since 1970; None: now.
        Raises OSError."""
        unfinished = self.path.with_name(self.path.name + ".tmp")
        try:
            descriptor = self._open_new(unfinished)
            try:
                _move(partial(os.writev, descriptor), [memoryview(self._head(memory)), memory])
                if used_ns is not None:
                    os.utime(descriptor, ns=(used_ns, used_ns))
            finally:
                os.close(descriptor)
            unfinished.replace(self.path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _open_new(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # the owner's first block
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _head(self, memory: memoryview) -> bytes:
        prefix = self.prefix
        root = root_hash(prefix.cache_salt, prefix.adapter_digest)
        sizes = len(prefix.token_bytes), len(memory)
        fields = _HEADER.pack(_MAGIC, self.fingerprint, root, prefix.hash, zlib.crc32(memory), *sizes)
        return fields + prefix.token_bytes


def _move(call: Callable[[list[memoryview]], int], parts: list[memoryview]) -> int:
    """Reads or writes `parts` until all are done or the file ends; how many bytes it was. In few calls: after each, the
    thread waits for the interpreter, which runs others meanwhile."""
    done = 0
    while parts and (count := call(parts)):
        done += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]
    return done


def file_bytes(block_bytes: int, block_size: int) -> int:
    return _HEADER.size + 4 * block_size + block_bytes


def block_path(folder: Path, owner: bytes, block_hash: bytes) -> Path:
    return folder / owner.hex() / f"{block_hash.hex()}.kv"


def lock(directory: Path) -> int:
    """A descriptor to keep open: two engines would delete each other's files. Raises BlockingIOError."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def secret(directory: Path) -> bytes:
    """32 bytes that stay with the directory: what tenants' salts are made of, so that their blocks are found after a
    restart. Raises OSError, or ValueError for a file that is not ours."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "secret"
    if not path.exists():
        unfinished = directory / f"secret.{os.getpid()}.tmp"
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError):  # another process was first
            path.hardlink_to(unfinished)
        unfinished.unlink()
    kept = path.read_bytes()
    if len(kept) != _SECRET_BYTES:
        raise ValueError(f"{path} must have {_SECRET_BYTES} bytes, it has {len(kept)}")
    return kept


@dataclass(frozen=True, slots=True)
class Found:
    blocks: list[tuple[bytes, bytes]]  # (hash, owner), used longest ago first
    num_places: int  # blocks that may be in the folder in all


def sweep(directory: Path, folder: Path, *, max_bytes: int, block_file_bytes: int) -> Found:
    """What earlier processes left in `folder`. Deletes what they left unfinished, and what is too much.

    Other models' blocks in the directory may stay as long as half of `max_bytes` is left for this one's. Files that no
    engine of ours has written are neither counted nor touched."""
    ours: list[tuple[int, Path]] = []
    others: list[tuple[int, int, Path]] = []
    for path in _files(directory):
        status = path.stat()
        if _UNFINISHED.fullmatch(path.name):
            path.unlink()
        elif path.parent.parent != folder:
            others.append((status.st_mtime_ns, status.st_size, path))
        elif status.st_size == block_file_bytes:
            ours.append((status.st_mtime_ns, path))
        else:
            path.unlink()
    other_bytes = sum(size for _, size, _ in others)
    for _, size, path in sorted(others):
        if other_bytes <= max_bytes // 2:
            break
        path.unlink()
        other_bytes -= size
    num_places = (max_bytes - other_bytes) // block_file_bytes
    kept = sorted(ours)
    while len(kept) > num_places:
        kept.pop(0)[1].unlink()
    blocks = [(bytes.fromhex(path.stem), bytes.fromhex(path.parent.name)) for _, path in kept]
    return Found(blocks, num_places)


def _files(directory: Path) -> list[Path]:
    """Blocks, finished or not."""
    owners = [
        owner
        for folder in directory.iterdir()
        if _FINGERPRINT.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        for owner in folder.iterdir()
        if _OWNER.fullmatch(owner.name) and owner.is_dir() and not owner.is_symlink()
    ]
    names = (_BLOCK.fullmatch, _UNFINISHED.fullmatch)
    return [
        path
        for owner in owners
        for path in owner.iterdir()
        if any(matches(path.name) for matches in names) and path.is_file() and not path.is_symlink()
    ]
