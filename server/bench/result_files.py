"""Where a benchmark's results go, looked at before anything is measured: a run of an hour must not end in a traceback.
Knows no format."""

import os
from pathlib import Path
from tempfile import TemporaryFile


def check_writable(file: Path | None) -> None:
    """Makes the folder that `file` is to be in, and leaves the file as it is. Raises ValueError."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=file.parent):
            pass
        if file.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(None, "it may not be written")
    except OSError as error:
        raise ValueError(f"the results cannot be written to {file}: {error.strerror}") from error
