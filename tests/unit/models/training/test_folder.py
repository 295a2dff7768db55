"""A folder is whole or it is not there, and what was changed afterwards is found out."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from models.training import CheckpointError, DiskFullError
from models.training.folder import MANIFEST, is_whole, remove_unfinished, write_folder


def fill(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"0123456789")
    (folder / "deep").mkdir()
    (folder / "deep" / "config.json").write_text("{}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "made" / "one", fill)
    return tmp_path / "made" / "one"


def test_a_written_folder_is_whole_and_alone(folder: Path) -> None:
    assert is_whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    assert {path.name for path in folder.rglob("*")} == {"weights.bin", "deep", "config.json", MANIFEST}


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "weights.bin").write_bytes(b"0123456780"),
        lambda f: (f / "weights.bin").write_bytes(b"01234"),
        lambda f: (f / "deep" / "config.json").unlink(),
        lambda f: (f / MANIFEST).unlink(),
        lambda f: (f / MANIFEST).write_text('{"files": '),
        lambda f: (f / MANIFEST).write_text("[]"),
    ],
    ids=["changed", "short", "missing", "no manifest", "torn manifest", "foreign manifest"],
)
def test_damage_is_found(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)
    assert not is_whole(folder)


def test_a_folder_that_is_a_file_or_gone_is_not_whole(folder: Path) -> None:
    assert not is_whole(folder / "weights.bin")  # NotADirectoryError
    assert not is_whole(folder / "not there")


@pytest.mark.parametrize("name", ["weights.bin", MANIFEST])
def test_a_file_that_cannot_be_read_is_not_called_damaged(folder: Path, name: str) -> None:
    """Whatever is wrong with it (here a link to itself), it may be there again tomorrow."""
    (folder / name).rename(folder / "aside")
    (folder / name).symlink_to(name)
    with pytest.raises(CheckpointError, match=r"^one cannot be read: Too many levels of symbolic links$"):
        is_whole(folder)


def test_what_stood_there_is_replaced(folder: Path) -> None:
    write_folder(folder, lambda new: (new / "other").write_text("x") and None)
    assert {path.name for path in folder.iterdir()} == {"other", MANIFEST}
    assert is_whole(folder)


def test_a_failure_leaves_the_old_folder_and_nothing_else(folder: Path) -> None:
    def fail(new: Path) -> None:
        fill(new)
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFullError, match=r"one cannot be written: .*No space left"):
        write_folder(folder, fail)
    assert is_whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


def test_a_replacement_that_fails_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    failures = iter([OSError(errno.EIO, "Input/output error")])

    def refused(path: Path, target: Path) -> Path:
        if target == folder and (error := next(failures, None)):
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_folder(folder, lambda new: (new / "other").write_text("x") and None)
    assert is_whole(folder)
    assert (folder / "weights.bin").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("I/O error: Input/output error (os error 5)"), False),
    ],
)
def test_a_full_disk_is_told_from_other_refusals(folder: Path, error: Exception, full: bool) -> None:
    def fail(new: Path) -> None:
        raise error

    with pytest.raises(CheckpointError) as caught:
        write_folder(folder, fail)
    assert isinstance(caught.value, DiskFullError) is full


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    left = folder.parent / ".two-abc123"
    left.mkdir()
    (left / "weights.bin").write_bytes(b"0")
    remove_unfinished(folder.parent)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    remove_unfinished(folder / "not there")
