"""A process that stores one file, begins an upload or a delete, and kills itself (SIGKILL) at the named instant.

python killed_upload.py FOLDER INSTANT; prints the ids that were whole before."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from training_files import CONTENT_TYPE, PAIR, body, opened, upload

from server.files.catalog import Catalog
from server.files.folder import FileFolder

INSTANTS = ("created", "fed", "synced", "renamed", "listed", "unlisted")


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, instant: str) -> None:
    with opened(folder) as store:
        whole = upload(store, PAIR * 50)
        print(whole.id, flush=True)  # noqa: T201 - the test reads it
        if instant == "unlisted":
            FileFolder.remove = die  # type: ignore[method-assign]
            store.delete(whole.id, "")
        running = store.begin(CONTENT_TYPE, "")
        if instant == "created":
            die()
        sent = body(PAIR * 50)
        store.feed(running, sent[:-500])
        if instant == "fed":
            die()
        store.feed(running, sent[-500:])
        if instant == "synced":
            Path.rename = die  # type: ignore[method-assign]
        if instant == "renamed":
            Catalog.add = die  # type: ignore[method-assign]
        store.finish(running)
        die()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
