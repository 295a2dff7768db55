"""Which directories are trusted."""

import os
import stat
from pathlib import Path

import pytest

from attention_backend.jit import CacheDirectoryError, KernelCache
from attention_backend.jit.directory import secure, trusted_image
from attention_backend.jit.environment import JitEnvironment


def test_a_new_directory_and_its_parents_are_ours_alone(tmp_path: Path) -> None:
    path = secure(tmp_path / "a/b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_can_write_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    for refuse in (secure, trusted_image):
        with pytest.raises(CacheDirectoryError, match=rf"written by others \(mode {mode:04o}\)"):
            refuse(path)


def test_a_symbolic_link_is_refused_even_to_a_directory_of_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    for refuse in (secure, trusted_image):
        with pytest.raises(CacheDirectoryError, match="symbolic link"):
            refuse(tmp_path / "link")


def test_a_dangling_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("dangling", "file"):
        with pytest.raises(CacheDirectoryError):
            secure(tmp_path / name)


def test_a_directory_of_another_user_is_refused_with_both_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "foreign"
    path.mkdir(mode=0o700)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CacheDirectoryError, match=f"belongs to uid {owner}, not to uid {owner + 1}"):
        secure(path)


def test_an_image_may_belong_to_root_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "image"
    path.mkdir(mode=0o755)
    with pytest.raises(CacheDirectoryError, match="LONGWAVE_KERNEL_IMAGE_DIR"):
        trusted_image(tmp_path / "missing")
    if path.stat().st_uid == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
        assert trusted_image(path) == path


def test_a_directory_in_one_where_all_may_rename_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    (parent / "cache").mkdir(parents=True, mode=0o700)
    parent.chmod(0o777)
    with pytest.raises(CacheDirectoryError, match="could be replaced by others"):
        secure(parent / "cache")
    parent.chmod(0o1777)  # sticky, as /tmp is: only the owner of an entry renames it
    assert secure(parent / "cache") == parent / "cache"


def test_a_place_that_cannot_be_made_is_reported_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheDirectoryError, match="set LONGWAVE_CACHE_DIR"):
        secure(tmp_path / "file/cache")


def test_a_cache_refuses_an_untrusted_image_at_once(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image").chmod(0o777)
    with pytest.raises(CacheDirectoryError):
        KernelCache(tmp_path / "cache", image=tmp_path / "image")


def test_the_cache_is_where_the_environment_says_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONGWAVE_CACHE_DIR", "LONGWAVE_KERNEL_IMAGE_DIR", "XDG_CACHE_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert JitEnvironment.read().cache_directory == Path("/home/somebody/.cache/longwave/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert JitEnvironment.read().cache_directory == Path("/home/somebody/.cache/longwave/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert JitEnvironment.read().cache_directory == tmp_path / "longwave/kernels"
    assert JitEnvironment.read().image_directory is None
    monkeypatch.setenv("LONGWAVE_CACHE_DIR", "/fast")
    monkeypatch.setenv("LONGWAVE_KERNEL_IMAGE_DIR", "/image")
    environment = JitEnvironment.read()
    assert (environment.cache_directory, environment.image_directory) == (Path("/fast/kernels"), Path("/image"))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONGWAVE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_001)
    with pytest.raises(CacheDirectoryError, match="set LONGWAVE_CACHE_DIR"):
        JitEnvironment.read()
