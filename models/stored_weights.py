"""What the *.safetensors of a folder hold, by their headers, and how it is to lie in memory. Reads no weights and
imports no transformers: reading begins before that does. The format: https://github.com/huggingface/safetensors#format"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: model_type of families whose checkpoints hold their modules' own names: those that are fused.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2", "gemma3_text"})
#: Linear layers of the same input, which models.fusing wants below each other in one tensor.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LARGEST_HEADER = 100 << 20  # bytes; the format's own limit


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
    if (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    return [tensor for name in names for tensor in _header(folder / name)]


def _header(path: Path) -> list[StoredTensor]:
    end = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(end - 8, _LARGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file, or was cut")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= end - 8 - length:
            raise ValueError(f"{path} ends before {name}")
        found.append(StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first))
    return sorted(found, key=lambda tensor: tensor.begin)


def readable(folder: Path) -> list[StoredTensor] | None:
    """The tensors, when they are dense weights in 16 bits of a family whose checkpoints need no conversion; None: they
    are transformers' to read, or to refuse."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if config.get("model_type") not in FAMILIES or config.get("quantization_config") is not None:
            return None
        tensors = stored_tensors(folder)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
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
