"""What fine-tuning jobs take from the files and give to them: links that outlive a delete, and result files."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from training_files import PAIR, kept, listed, opened, upload

from server.errors import FileMissing, InsufficientStorage
from server.files import store as store_module
from server.files.catalog import Catalog, StoredFile
from server.files.folder import FileFolder
from server.files.store import FileLimits

RESULT = "file-" + "a" * 32


def put(store: object, content: bytes = b"step\n1\n") -> object:
    return store.put(  # type: ignore[attr-defined]
        RESULT, "me", purpose="fine-tune-results", filename="x.csv", content=content, lines=1
    )


def test_a_link_keeps_the_bytes_of_a_file_that_is_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = upload(store, PAIR * 3, "me")
        store.link(stored.id, "me", tmp_path / "mine")
        store.delete(stored.id, "me")
        assert (tmp_path / "mine").read_bytes() == PAIR * 3
        assert kept(tmp_path) == []


def test_another_owners_file_is_not_linked(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = upload(store, PAIR, "me")
        with pytest.raises(FileMissing):
            store.link(stored.id, "them", tmp_path / "theirs")
        assert not (tmp_path / "theirs").exists()


def test_a_result_is_a_file_like_others_after_a_restart_too(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        made = put(store)
        assert listed(store, "me", purpose="fine-tune-results") == [RESULT]
    with opened(tmp_path) as store:
        assert store.get(RESULT, "me") == made
        stored, file = store.read(RESULT, "me")
        with file:
            assert file.read() == b"step\n1\n"
        assert (stored.form, stored.examples, stored.filename) == (None, 1, "x.csv")
        store.delete(RESULT, "me")
        assert kept(tmp_path) == []


def test_a_result_that_is_put_again_after_a_crash_is_the_first(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        made = put(store)
        assert put(store, b"other") == made
        assert kept(tmp_path) == [RESULT]


def test_a_result_is_not_refused_for_the_quota_and_counts_in_it(tmp_path: Path) -> None:
    with opened(tmp_path, FileLimits(2**20, len(PAIR), 1)) as store:
        upload(store, PAIR)
        put(store)
        assert len(kept(tmp_path)) == 2


def test_a_full_disk_leaves_no_half_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", no_space)
            with pytest.raises(InsufficientStorage):
                put(store)
        assert kept(tmp_path) == []
        put(store)


class OtherServer:
    """Puts the result from a thread of its own, as soon as meet() is called for the first time."""

    def __init__(self, store: object, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1)
        self._is_stuck_or_done = threading.Event()
        self._real_alone: Callable[[Path], AbstractContextManager[None]] = store_module.alone
        self.result: object = None
        monkeypatch.setattr(store_module, "alone", self._alone)

    def meet(self) -> None:
        """Returns when the other one has done all that it can do now."""
        if self.result is None:
            self.result = self._thread.submit(self._put)
            assert self._is_stuck_or_done.wait(60)

    def close(self) -> None:
        self._thread.shutdown()

    def _put(self) -> object:
        try:
            return put(self._store)
        finally:
            self._is_stuck_or_done.set()

    def _alone(self, lock: Path) -> AbstractContextManager[None]:
        if threading.current_thread() is not threading.main_thread():
            self._is_stuck_or_done.set()
        return self._real_alone(lock)


def test_a_result_that_two_servers_put_at_once_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Catalog.find

    def find_and_meet(catalog: Catalog, file_id: str, owner: str, now: float) -> StoredFile | None:
        known = find(catalog, file_id, owner, now)
        if threading.current_thread() is threading.main_thread():
            other.meet()
        return known

    with opened(tmp_path) as here, opened(tmp_path) as there:
        assert listed(there) == []  # it is open
        other = OtherServer(there, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(Catalog, "find", find_and_meet)
            made = put(here)
        other.close()
        assert other.result.result() == made  # type: ignore[attr-defined]
        with here.read(RESULT, "me")[1] as file:
            assert file.read() == b"step\n1\n"


def test_a_result_that_is_put_while_another_server_deletes_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = FileFolder.remove

    def meet_and_remove(folder: FileFolder, file_id: str) -> None:
        if threading.current_thread() is threading.main_thread():
            other.meet()
        remove(folder, file_id)

    with opened(tmp_path) as here, opened(tmp_path) as there:
        put(there)
        other = OtherServer(there, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(FileFolder, "remove", meet_and_remove)
            here.delete(RESULT, "me")
        other.close()
        assert listed(here, "me") == [RESULT]
        with here.read(RESULT, "me")[1] as file:
            assert file.read() == b"step\n1\n"
