"""A kernel's source with every local header it includes, as one snapshot that is both hashed and compiled.

NVRTC would look for headers in the working directory first; here they come from the kernels' folder only, so what the
cache key was made of is what is compiled.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from attention_backend.jit.errors import SourceError
from attention_backend.jit.spec import KernelSource

_INCLUDE = re.compile(r"^([ \t]*#[ \t]*include[ \t]*)(.*)$", re.MULTILINE)
_TARGET = re.compile(r'(?:"([^"\n]+)"|<([^>\n]+)>)')


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """The entry file's `text` and its `headers`, (name, text) by name; names are relative to the kernels' folder."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]


def snapshot(source: KernelSource) -> SourceSnapshot:
    """Read a kernel and, recursively, its local headers.

    As in C++, `#include "x"` is looked up beside the including file and then in the kernels' folder; the directive is
    rewritten to the name relative to that folder (lines keep their numbers). What is in neither is left to the CUDA
    headers. Raises SourceError for an unreadable file, an include of a macro or a header outside of the folder.
    """
    root = source.source_path.parent.resolve()
    entry = source.source_path.name
    texts: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name], included = _resolve_includes(root, name)
            waiting.extend(included)
    text = texts.pop(entry)
    return SourceSnapshot(entry, text, tuple(sorted(texts.items())))


def _resolve_includes(root: Path, name: str) -> tuple[str, list[str]]:
    try:
        text = (root / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {root / name}: {error}") from error
    included: list[str] = []

    def rewrite(directive: re.Match[str]) -> str:
        target = _TARGET.match(directive[2])
        if target is None:
            line = text.count("\n", 0, directive.start()) + 1
            raise SourceError(f"{name}({line}): only #include of a literal name can be hashed: {directive[0].strip()}")
        found = _local_header(root, name, target[1] or target[2], quoted=target[1] is not None)
        if found is None:
            return directive[0]
        included.append(found)
        return f'{directive[1]}"{found}"{directive[2][target.end() :]}'

    return _INCLUDE.sub(rewrite, text), included


def _local_header(root: Path, including: str, target: str, *, quoted: bool) -> str | None:
    beside = [(root / including).parent] if quoted else []
    for directory in (*beside, root):
        path = (directory / target).resolve()
        if path.is_file():
            if not path.is_relative_to(root):
                raise SourceError(f"{including} includes {target}, which is outside of {root}")
            return path.relative_to(root).as_posix()
    return None
