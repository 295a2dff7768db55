"""Saved weights on the disk: a folder each, with its own label, so that a restart loses nothing. Knows no process.

`longwave://<model id>/weights/<name>` is `<root>/<model id>/weights/<name>/`.
"""

import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server.errors import InvalidRequest, TrainingMissing
from server.files.folder import make_private, sync_folder
from server.training.calls import Kind

logger = logging.getLogger("longwave")

SCHEME = "longwave://"
LABEL = "longwave.json"
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
PATH = re.compile(r"longwave://(train-[0-9a-f]{32})/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]{0,63})")
BEFORE = "-before"  # how names of weights end that were replaced: models.training renames them, and then the new ones
DELETED = re.compile(r"\..+-deleted-[0-9]{19}")  # a time in nanoseconds: what is being written ends otherwise
AUTOSAVE = "autosave"  # the name under which the server itself saves
UNFINISHED_SECONDS = 3600.0  # what was begun before that was left by a crash


class Label(msgspec.Struct, frozen=True):
    """What is written beside the weights."""

    path: str
    kind: Kind
    owner: str
    base_model: str
    rank: int
    steps: int  # of optimiser
    served: bool  # under its path, as a model
    created_at: int  # seconds since 1970


@dataclass(frozen=True, slots=True)
class SavedWeights:
    label: Label
    folder: Path
    size: int  # bytes


class WeightsStore:
    def __init__(self, root: Path) -> None:
        self._root = root

    @staticmethod
    def path(model_id: str, kind: Kind, name: str) -> str:
        return f"{SCHEME}{model_id}/{kind}/{name}"

    def folder(self, path: str) -> Path:
        """Raises InvalidRequest for what is no path of weights."""
        parts = PATH.fullmatch(path)
        if parts is None:
            raise InvalidRequest(
                f"{path!r:.300} is no path of saved weights: those are {SCHEME}<model_id>/weights/<name> and "
                f"{SCHEME}<model_id>/sampler_weights/<name>.",
                param="path",
            )
        return self._root.joinpath(*parts.groups())

    def prepare(self, path: str) -> Path:
        """The folder that may be written, its parents made, and on the disk. Raises OSError."""
        folder = self.folder(path)
        make_private(self._root)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for parent in (folder.parent.parent, self._root):
            sync_folder(parent)
        return folder

    def find(self, path: str, owner: str) -> SavedWeights:
        """Raises InvalidRequest, TrainingMissing: also for another owner's."""
        found = _read(self.folder(path))
        if found is None or found.label.owner != owner:
            raise _missing(path)
        return found

    def all(self) -> list[SavedWeights]:
        """Of all owners, the oldest first."""
        folders = [folder for kind in KINDS for folder in self._root.glob(f"*/{kind}/*")]
        found = [saved for folder in folders if (saved := _read(folder)) is not None]
        return sorted(found, key=lambda saved: (saved.label.created_at, saved.label.path))

    def of(self, owner: str) -> list[SavedWeights]:
        return [saved for saved in self.all() if saved.label.owner == owner]

    def remove(self, saved: SavedWeights) -> None:
        """Gone in one instant, whatever becomes of the process. Raises TrainingMissing if somebody else was faster."""
        for left in self._hidden():
            if left.name.endswith(BEFORE) and self._place(left) == saved.folder:  # or it would come back
                shutil.rmtree(left, ignore_errors=True)
        doomed = saved.folder.with_name(f".{saved.folder.name}-deleted-{time.time_ns()}")
        try:
            saved.folder.rename(doomed)
        except FileNotFoundError:
            raise _missing(saved.label.path) from None
        shutil.rmtree(doomed, ignore_errors=True)

    def mend(self) -> None:
        """Undoes replacements that a crash cut short, and removes what others replaced. To be called while no process
        of this server writes. (A save of another server's that is between its two renames at that instant fails, and
        what was there stays.)"""
        for left in self._hidden():
            if not left.name.endswith(BEFORE):
                continue
            try:
                place = self._place(left)
                if place is None or place.exists():
                    shutil.rmtree(left)
                else:
                    left.rename(place)
                    sync_folder(place.parent)
                    logger.warning("%s was being replaced when its process ended: it is what it was", place)
            except FileNotFoundError:
                pass  # another server was faster
            except OSError as error:
                logger.error("%s cannot be put back or removed: %s", left, error)

    def sweep(self) -> None:
        """What crashes left half written or half deleted."""
        for left in self._hidden():
            with suppress(FileNotFoundError):  # another server was faster
                old = not left.name.endswith(BEFORE) and time.time() - left.stat().st_mtime > UNFINISHED_SECONDS
                if old or DELETED.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)

    def _hidden(self) -> Iterator[Path]:
        for kind in KINDS:
            yield from self._root.glob(f"*/{kind}/.*")

    def _place(self, left: Path) -> Path | None:
        """Where weights stood before they were replaced; None when they are no longer whole. Raises OSError."""
        try:
            label = msgspec.json.decode((left / LABEL).read_bytes(), type=Label)
            return self.folder(label.path)
        except (FileNotFoundError, msgspec.DecodeError, InvalidRequest):
            return None


def _missing(path: str) -> TrainingMissing:
    return TrainingMissing(f"There are no saved weights {path}.", param="path")


def _read(folder: Path) -> SavedWeights | None:
    """None for what is no whole folder of weights."""
    if folder.name.startswith("."):
        return None
    try:
        label = msgspec.json.decode((folder / LABEL).read_bytes(), type=Label)
        size = sum(file.stat().st_size for file in folder.iterdir())
    except (OSError, msgspec.DecodeError):
        return None
    return SavedWeights(label, folder, size)
