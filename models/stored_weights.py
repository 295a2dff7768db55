"""What the *.safetensors of a folder hold, by their headers, and how it is to lie in memory. Reads no weights and
imports no transformers: reading begins before that does. The format: https://github.com/huggingface/safetensors#format"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from models import config_file
from models.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: model_type of families whose checkpoints hold their modules' own names: those that are fused.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2", "gemma3_text"})
#: Linear layers of the same input, which models.fusing wants below each other in one tensor.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
_LARGEST_HEADER = 100 << 20  # bytes; the format's own limit
_POINTER = b"version "  # of https://git-lfs.github.com/spec/v1; as a header's length it would be too large


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    file: Path
    dtype: str  # BF16, F16, ...
    shape: tuple[int, ...]
    begin: int  # byte of the file
    size: int  # bytes


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Of the files that transformers would read, in the order of names and places. Raises OSError or ValueError for
    files that are not there or not whole."""
    names = [SINGLE] if (folder / SINGLE).is_file() else _indexed(folder / INDEX)
    return [tensor for name in names for tensor in _header(folder / name)]


def check_files(folder: Path) -> None:
    """Raises ModelLoadError for files that are not whole. Without a file of transformers' usual names there is nothing
    to check."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return
    try:
        stored_tensors(folder)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the weights cannot be read: {error}") from error


def check_index(folder: Path) -> None:
    """Raises ModelLoadError for an index that transformers cannot read although it is whole: it wants `metadata`, which
    the format leaves open."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return
    if not isinstance(config_file.read_object(index).get("metadata"), dict):
        raise ModelLoadError(f'{index} has no object `metadata`, which transformers wants: add "metadata": {{}} to it')


def _indexed(index: Path) -> list[str]:
    """The names of the files."""
    try:
        names = {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({type(error).__name__}: {error})") from error
    return sorted(names)


def _header(path: Path) -> list[StoredTensor]:
    end = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == _POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull`")
        if end < 8 or length > min(end - 8, _LARGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file, or was cut")
        text = file.read(length)
    found = []
    name = "its header"
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = map(_count, entry["data_offsets"])
            shape = tuple(map(_count, entry["shape"]))
            found.append(StoredTensor(name, path, _text(entry["dtype"]), shape, 8 + length + first, last - first))
            width = _BYTES.get(entry["dtype"])
            if width is not None and math.prod(shape) * width != last - first:
                raise ValueError("its size is not its shape's")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file: {name} cannot be read") from error
    for tensor in found:
        if not (tensor.size >= 0 and 8 + length <= tensor.begin <= end - tensor.size):
            raise ValueError(f"{path} ends before {tensor.name}")
    if max((tensor.begin + tensor.size for tensor in found), default=8 + length) != end:
        raise ValueError(f"{path} goes on after its last tensor")
    return sorted(found, key=lambda tensor: tensor.begin)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def readable(folder: Path) -> list[StoredTensor] | None:
    """The tensors, when they are dense weights in 16 bits of a family whose checkpoints need no conversion; None: they
    are transformers' to read, or to refuse."""
    try:
        config = config_file.read(folder)
        if config["model_type"] not in FAMILIES or config.get("quantization_config") is not None:
            return None
        tensors = stored_tensors(folder)
    except (ModelLoadError, OSError, ValueError):
        return None
    one_name_each = len({tensor.name for tensor in tensors}) == len(tensors)
    half = {tensor.dtype for tensor in tensors} in ({"BF16"}, {"F16"})
    return tensors if half and one_name_each else None


def together(tensors: Iterable[StoredTensor]) -> list[list[StoredTensor]]:
    """The tensors in groups, each of which is to be one tensor in memory, its members below each other."""
    by_name = {tensor.name: tensor for tensor in tensors}
    groups = []
    for tensor in list(by_name.values()):
        if tensor.name not in by_name:
            continue
        group = [by_name.pop(name) for name in _names_beside(tensor.name) if name in by_name]
        whole = len({(member.dtype, member.shape[1:]) for member in group}) == 1
        groups += [group] if whole and tensor.shape else [[member] for member in group]
    return groups


def _names_beside(name: str) -> list[str]:
    """Of the group that this name belongs to, in order."""
    parts = name.split(".")
    if len(parts) >= 2:
        for members in JOINED:
            if parts[-2] in members:
                return [".".join([*parts[:-2], member, parts[-1]]) for member in members]
    return [name]
