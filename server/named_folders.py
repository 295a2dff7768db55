"""The folders that an operator names, tried before anything loads: can they be what they are to be? Knows no HTTP."""

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile

from server.engine import block_files
from server.settings import Settings

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk may be full: what is there is served, and room may be made


def problems(settings: Settings) -> list[str]:
    """A line each. What is missing is made; the default data directory is not, before somebody uploads something."""
    return [
        *_cache(settings.cache_dir), *_data(settings), *_blocks(settings.kv_offload_dir), *_adapters(settings)
    ]  # fmt: skip


def _cache(folder: Path | None) -> list[str]:
    """Not written to: it may be filled already, and not be ours to change."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in FULL:
            reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            return [f"cache-dir: {folder} cannot hold caches: {reason} (as user {os.geteuid()})"]
    return []


def _data(settings: Settings) -> list[str]:
    """Files are always served, so it is always needed."""
    try:
        folder = settings.data_folder
        if settings.data_dir is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
    except RuntimeError:
        return ["data-dir: this user has no home directory, so a folder has to be named"]
    except OSError as error:
        if error.errno not in FULL:
            reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            return [f"data-dir: {folder} cannot hold files and jobs: {reason} (as user {os.geteuid()})"]
    return []


def _blocks(folder: Path | None) -> list[str]:
    try:
        if folder is not None:
            block_files.secret(folder)
    except (OSError, ValueError) as error:
        return [f"kv-offload-dir: {folder} cannot hold KV blocks: {error}"]
    return []


def _adapters(settings: Settings) -> list[str]:
    """What an adapter's files say is looked at beside the model that it changes, later."""
    found = [
        f"lora-modules: {name}: {folder} is no folder"
        for name, folder in settings.lora_folders.items()
        if not folder.is_dir()
    ]
    if settings.lora_dir is not None and not settings.lora_dir.is_dir():
        found.append(f"lora-dir: {settings.lora_dir} is no folder")
    return found
