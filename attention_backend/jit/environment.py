"""The environment variables of the caches: the one place of this room that reads them.

Only server.settings reads the environment elsewhere; attention_backend is usable without a server, hence this module.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from attention_backend.jit.errors import CacheDirectoryError


@dataclass(frozen=True, slots=True)
class JitEnvironment:
    """Where compiled kernels and the CUDA toolkit are.

    * cache_directory: kernels in `cache_root()`
    * image_directory: `LONGWAVE_KERNEL_IMAGE_DIR`, kernels built into an image; looked up first and never written
    * toolkits: CUDA toolkits that may hold the headers, `CUDA_PATH` first
    """

    cache_directory: Path
    image_directory: Path | None
    toolkits: tuple[Path, ...]

    @classmethod
    def read(cls) -> "JitEnvironment":
        image = os.environ.get("LONGWAVE_KERNEL_IMAGE_DIR")
        toolkit = os.environ.get("CUDA_PATH")
        return cls(
            cache_directory=cache_root() / "kernels",
            image_directory=Path(image) if image else None,
            toolkits=(*([Path(toolkit)] if toolkit else []), Path("/usr/local/cuda")),
        )


def cache_root() -> Path:
    """Where everything that can be made again is kept, kernels and converted models: `LONGWAVE_CACHE_DIR`, else
    longwave in `XDG_CACHE_HOME` or ~/.cache. Raises CacheDirectoryError for a user without a home."""
    own = os.environ.get("LONGWAVE_CACHE_DIR")
    return Path(own) if own else _user_cache() / "longwave"


def _user_cache() -> Path:
    # The XDG specification says to ignore a relative path here.
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if configured.startswith("/"):
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:  # a user id without an entry in the password file, as containers have
        raise CacheDirectoryError("this user has no home directory; set LONGWAVE_CACHE_DIR") from error
