"""A job's files on the disk, and the finished adapters: server-made names in a private folder. Knows no SQL, no HTTP.

A job has its own links to the files it learns from: deleting or expiry of a file takes nothing from the job. What the
operator said of the chat template when it was made is kept with them, so its examples stay the same tokens.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from server.files.folder import PRIVATE, make_private, sync_folder
from server.finetune.records import JOB_ID
from server.text.operators_template import NOTHING_SAID, OperatorsTemplate

TRAINING, VALIDATION = "training_file", "validation_file"  # the request's names
DELETED = ".deleted-"  # how names of whole models begin that are on their way out
FolderState = frozenset[tuple[str, int, int, int]]  # of every file name, inode, bytes, when it was written
ORPHAN_SECONDS = 3600.0  # a folder that no job knows may be of one that is just being made


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run(self) -> Path:
        """The trainer's: checkpoints and result."""
        return self.path / "run"

    @property
    def result(self) -> Path:
        """What the trainer makes at its end: there when it is whole."""
        return self.run / "result"

    @property
    def is_orphan(self) -> bool:
        """Whether it is too old to be one of a job that is just being made. Raises FileNotFoundError."""
        return _is_old(self.path)

    def dataset(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    def keep_template(self, template: OperatorsTemplate) -> None:
        """Before anybody knows the job. On the disk when this returns. Raises OSError."""
        with self._template.open("wb") as file:
            file.write(msgspec.json.encode(template))
            file.flush()
            os.fsync(file.fileno())

    def template(self) -> OperatorsTemplate:
        """Raises OSError, msgspec.DecodeError."""
        try:
            return msgspec.json.decode(self._template.read_bytes(), type=OperatorsTemplate)
        except FileNotFoundError:  # made by a server that could be told nothing
            return NOTHING_SAID

    @property
    def _template(self) -> Path:
        return self.path / "chat_template.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other process works in it; while this lasts, none begins to. A crash ends it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)


class Folders:
    """`root`/jobs/<job id> while a job lives, `root`/adapters/<job id> or `root`/models/<job id> for what it made."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def are_there(self) -> bool:
        """Whether anybody ever asked for fine-tuning. Asked every second: a disk that hangs is to hang a thread."""
        return await asyncio.to_thread(self.root.exists)

    def job(self, job_id: str) -> JobFolder:
        return JobFolder(self.root / "jobs" / job_id)

    def made(self, job_id: str, *, whole: bool) -> Path:
        """Where a job's adapter is, or its `whole` model."""
        return self.root / ("models" if whole else "adapters") / job_id

    def models(self) -> set[str]:
        """The jobs whose whole models are here."""
        return {path.name for path in _entries(self.root / "models") if path.name.startswith(JOB_ID)}

    def jobs(self) -> list[JobFolder]:
        return [JobFolder(path) for path in _entries(self.root / "jobs")]

    def have_work(self) -> bool:
        """Whether any job has got as far as a checkpoint: before that, none is lost that cannot be sent again."""
        made = _entries(self.root / "adapters") + _entries(self.root / "models")
        return any(path.name.startswith(JOB_ID) for path in made) or any(_entries(job.run) for job in self.jobs())

    def create(self, job_id: str, link: Callable[[JobFolder], None]) -> JobFolder:
        """`link` puts the datasets in. All is on the disk when this returns, or nothing is left. Raises OSError."""
        make_private(self.root)
        folder = self.job(job_id)
        folder.path.mkdir(mode=0o700, parents=True)
        try:
            folder.run.mkdir(mode=0o700)
            link(folder)
            for path in (folder.path, folder.path.parent, self.root):
                sync_folder(path)
        except BaseException:
            self.remove(job_id)
            raise
        return folder

    def remove(self, job_id: str) -> None:
        """Of a job that has ended: datasets, checkpoints. The adapter stays."""
        shutil.rmtree(self.job(job_id).path, ignore_errors=True)

    def keep(self, job_id: str, result: Path, *, whole: bool) -> Path:
        """Moves a result to where it is `made`; a second time, after a crash, it is there already. It is on the disk
        when this returns. Raises OSError."""
        place = self.made(job_id, whole=whole)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if not place.exists():
            result.rename(place)
        for path in (place.parent, self.root):
            sync_folder(path)
        return place

    def remove_adapter(self, job_id: str) -> None:
        shutil.rmtree(self.made(job_id, whole=False), ignore_errors=True)

    def remove_model(self, job_id: str) -> bool:
        """Whether it was there. It is gone in one instant, and never half; on the disk, too, when this returns. Raises
        OSError."""
        doomed = self.root / "models" / f"{DELETED}{job_id}"
        try:
            self.made(job_id, whole=True).rename(doomed)
        except FileNotFoundError:
            return False
        sync_folder(doomed.parent)
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def stray_adapters(self, has_ended: Callable[[str], bool | None], has_adapter: Callable[[str], bool]) -> list[Path]:
        """Those that are no job's model, or no longer, and never will be. `has_ended` of an unknown job is None, and is
        asked first: a job has ended and has its adapter in the same instant."""
        return _strays(self.root / "adapters", has_ended, has_adapter)

    def stray_models(self, has_ended: Callable[[str], bool | None], has_succeeded: Callable[[str], bool]) -> list[Path]:
        """As `stray_adapters`, of whole models; and what was deleted and is not gone yet."""
        deleted = [path for path in _entries(self.root / "models") if path.name.startswith(DELETED)]
        return deleted + _strays(self.root / "models", has_ended, has_succeeded)


def folder_state(folder: Path) -> FolderState:
    """Another one, if its files are changed. That of a folder that is not there, or cannot be read, is empty."""
    try:
        entries = [(path.name, path.stat()) for path in folder.iterdir()]
    except OSError:
        return frozenset()
    return frozenset((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in entries)


def _strays(parent: Path, has_ended: Callable[[str], bool | None], is_kept: Callable[[str], bool]) -> list[Path]:
    """What has no name of ours is somebody's own."""
    strays = []
    for path in _entries(parent):
        if not path.name.startswith(JOB_ID):
            continue
        ended = has_ended(path.name)
        with contextlib.suppress(FileNotFoundError):  # another server was faster
            if ended is not False and not is_kept(path.name) and (ended or _is_old(path)):
                strays.append(path)
    return strays


def _entries(parent: Path) -> list[Path]:
    return list(parent.iterdir()) if parent.is_dir() else []


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > ORPHAN_SECONDS
