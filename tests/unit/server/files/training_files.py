"""Training files, multipart bodies and a store, as the tests of uploads need them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.files.catalog import StoredFile
from server.files.store import FileLimits, FileStore

CONTENT_TYPE = "multipart/form-data; boundary=cut"
LIMITS = FileLimits(max_file_bytes=2**20, max_total_bytes=2**22, max_files=100)
PAIR = b'{"prompt": "a", "completion": "b"}\n'


def chat(*roles: str, **last: Any) -> bytes:
    messages: list[dict[str, Any]] = [{"role": role, "content": f"says {role}"} for role in roles]
    messages[-1] |= last
    return json.dumps({"messages": messages}).encode() + b"\n"


CHAT = chat("system", "user", "assistant")


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--cut\r\ncontent-disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


def body(content: bytes, filename: str = "train.jsonl", **fields: str) -> bytes:
    fields = {"purpose": "fine-tune"} | fields
    texts = b"".join(part(name, value.encode()) for name, value in fields.items())
    return texts + part("file", content, filename) + b"--cut--\r\n"


def upload(store: FileStore, content: bytes, owner: str = "", piece: int = 1000, **form: str) -> StoredFile:
    return send(store, body(content, **form), owner, piece)


def send(store: FileStore, sent: bytes, owner: str = "", piece: int = 1000) -> StoredFile:
    running = store.begin(CONTENT_TYPE, owner)
    try:
        for start in range(0, len(sent), piece):
            store.feed(running, sent[start : start + piece])
        return store.finish(running)
    finally:
        store.end(running)


@contextmanager
def opened(path: Path, limits: FileLimits = LIMITS, **options: Any) -> Iterator[FileStore]:
    store = FileStore(path / "files", limits, **options)
    store.start()
    try:
        yield store
    finally:
        store.close()


def kept(path: Path) -> list[str]:
    """The names in the folder of contents."""
    content = path / "files" / "content"
    return sorted(entry.name for entry in content.iterdir()) if content.exists() else []


def listed(store: FileStore, owner: str = "", **options: Any) -> list[str]:
    asked = {"purpose": None, "after": None, "limit": 1000, "order": "asc"} | options
    return [stored.id for stored in store.page(owner, **asked)]
