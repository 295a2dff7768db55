"""Folders that an operator names and that cannot be used end the start, with every problem at once."""

import errno
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_engine import settings
from typer.testing import CliRunner

from server import named_folders
from server.cli import app

NOBODY = 65534


@contextmanager
def not_root() -> Iterator[int]:
    """A user for whom a folder's mode says who may write there."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(user)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """Not below tmp_path, which other users may not even enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        yield Path(folder)
        Path(folder).chmod(0o755)


def make_file(path: Path) -> None:
    path.write_text("no folder")


def make_bad_secret(path: Path) -> None:
    path.mkdir()
    (path / "secret").write_text("short")


@pytest.mark.parametrize("make", [make_file, make_bad_secret])
def test_a_folder_that_cannot_hold_blocks_is_a_problem_of_the_configuration(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    make(folder)
    (line,) = named_folders.problems(settings(kv_offload_gb=1, kv_offload_dir=folder))
    assert line.startswith(f"kv-offload-dir: {folder} cannot hold KV blocks: ")


@pytest.mark.parametrize("below", ["", "below/that"])
def test_a_file_is_no_data_directory(tmp_path: Path, below: str) -> None:
    make_file(tmp_path / "data")
    (line,) = named_folders.problems(settings(data_dir=tmp_path / "data" / below))
    assert line.startswith(f"data-dir: {tmp_path / 'data' / below} cannot hold files and jobs: ")
    assert ("it is no folder" if below == "" else os.strerror(errno.ENOTDIR)) in line


def test_a_data_directory_that_cannot_even_be_looked_at_is_refused(tmp_path: Path) -> None:
    (line,) = named_folders.problems(settings(data_dir=tmp_path / ("x" * 300)))
    assert os.strerror(errno.ENAMETOOLONG) in line


@pytest.mark.parametrize("below", ["", "below/that"])
def test_a_data_directory_that_may_not_be_written_is_refused(read_only: Path, below: str) -> None:
    with not_root() as user:
        (line,) = named_folders.problems(settings(data_dir=read_only / below))
    assert f"{os.strerror(errno.EACCES)} (as user {user})" in line


def test_a_data_directory_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    data = tmp_path / "var" / "data"
    assert named_folders.problems(settings(data_dir=data)) == []
    assert list(data.iterdir()) == []
    assert data.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_no_problem_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(named_folders, "TemporaryFile", full)
    assert named_folders.problems(settings(data_dir=tmp_path)) == []


def test_the_default_data_directory_is_not_made_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert named_folders.problems(settings()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_has_to_name_a_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert named_folders.problems(settings(data_dir=tmp_path)) == []
    (line,) = named_folders.problems(settings())
    assert line == "data-dir: this user has no home directory, so a folder has to be named"


@pytest.mark.parametrize("below", ["", "below/that"])
def test_a_file_is_no_folder_of_caches(tmp_path: Path, below: str) -> None:
    make_file(tmp_path / "cache")
    (line,) = named_folders.problems(settings(cache_dir=tmp_path / "cache" / below))
    assert line.startswith(f"cache-dir: {tmp_path / 'cache' / below} cannot hold caches: ")
    assert ("it is no folder" if below == "" else os.strerror(errno.ENOTDIR)) in line
    assert named_folders.problems(settings(cache_dir=tmp_path / "none" / "yet")) == []


def test_adapters_are_in_folders(tmp_path: Path) -> None:
    make_file(tmp_path / "file")
    asked = {"enable_lora": True, "lora_modules": (f"a={tmp_path / 'none'}", f"b={tmp_path}"), "lora_dir": tmp_path}
    assert named_folders.problems(settings(**asked)) == [f"lora-modules: a: {tmp_path / 'none'} is no folder"]
    asked |= {"lora_modules": (f"b={tmp_path}",), "lora_dir": tmp_path / "file"}
    assert named_folders.problems(settings(**asked)) == [f"lora-dir: {tmp_path / 'file'} is no folder"]


def test_a_start_is_refused_with_all_of_them_and_the_model(tmp_path: Path) -> None:
    make_file(tmp_path / "file")
    flags = ["--data-dir", tmp_path / "file", "--kv-offload-gb", 1, "--kv-offload-dir", tmp_path / "file"]
    result = CliRunner().invoke(app, ["serve", "no-such-model", *map(str, flags)])
    assert result.exit_code == 3
    data, blocks, model = result.stderr.splitlines()
    assert data.startswith("longwave: data-dir: ")
    assert blocks.startswith("longwave: kv-offload-dir: ")
    assert "no-such-model" in model
