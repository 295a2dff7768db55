"""Listing, owners, quota, expiry and the folder, without HTTP."""

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_files import CHAT, CONTENT_TYPE, PAIR, body, kept, listed, opened, part, send, upload

from server.errors import (
    FileMissing,
    InsufficientStorage,
    InvalidRequest,
    LongwaveError,
    PayloadTooLarge,
    QuotaExceeded,
    ServerOverloaded,
)
from server.files import folder as folder_module
from server.files import store as store_module
from server.files.ballast import BYTES
from server.files.catalog import Catalog
from server.files.examples import Form
from server.files.form import plain_name
from server.files.store import FileLimits


def test_a_stored_file_is_described_and_read_back(tmp_path: Path) -> None:
    with opened(tmp_path, clock=lambda: 1000.5) as store:
        stored = upload(store, CHAT * 5, "me")
        assert store.get(stored.id, "me") == stored
        assert (stored.filename, stored.bytes, stored.created_at) == ("train.jsonl", len(CHAT) * 5, 1000)
        assert (stored.form, stored.examples, stored.expires_at) == (Form.CHAT, 5, None)
        found, file = store.read(stored.id, "me")
        with file:
            assert (found, file.read()) == (stored, CHAT * 5)


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_the_folder_and_files_are_the_users_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "data") as store:
        stored = upload(store, PAIR)
        folder = tmp_path / "new" / "data" / "files"
        modes = {path: path.stat().st_mode & 0o777 for path in (folder, folder / "content" / stored.id)}
    assert list(modes.values()) == [0o700, 0o600]


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o720])
def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files").chmod(mode)
    with opened(tmp_path) as store, pytest.raises(InsufficientStorage):
        store.begin(CONTENT_TYPE, "")
    assert list((tmp_path / "files").iterdir()) == []


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "files").symlink_to(tmp_path / "elsewhere")
    with opened(tmp_path) as store, pytest.raises(InsufficientStorage):
        store.begin(CONTENT_TYPE, "")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_come_back_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = upload(store, PAIR)
    with opened(tmp_path) as store:
        assert store.get(stored.id, "") == stored


def test_a_catalogue_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    import sqlite3
    from contextlib import closing

    with opened(tmp_path) as store:
        upload(store, PAIR)
    with closing(sqlite3.connect(tmp_path / "files" / "catalog.sqlite3")) as connection:
        connection.execute("PRAGMA user_version=2")
    with opened(tmp_path) as store, pytest.raises(InsufficientStorage):
        listed(store)
    assert len(kept(tmp_path)) == 1


def test_pages_follow_the_order_of_uploads(tmp_path: Path) -> None:
    with opened(tmp_path, clock=lambda: 7.0) as store:  # all in one second
        ids = [upload(store, PAIR).id for _ in range(7)]
        assert listed(store) == ids
        assert listed(store, order="desc") == ids[::-1]
        assert listed(store, after=ids[1], limit=3) == ids[2:5]
        assert listed(store, after=ids[4], limit=3, order="desc") == [ids[3], ids[2], ids[1]]
        assert listed(store, after=ids[-1]) == []
        assert listed(store, purpose="batch") == []
        store.delete(ids[3], "")
        assert listed(store, after=ids[2], limit=1) == [ids[4]]
        with pytest.raises(FileMissing):
            listed(store, after=ids[3])


def test_another_owners_files_do_not_exist(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        mine, theirs = upload(store, PAIR, "me").id, upload(store, PAIR, "them").id
        assert listed(store, "me") == [mine]
        for act in (store.get, store.read, store.delete):
            with pytest.raises(FileMissing) as error:
                act(theirs, "me")
            assert (error.value.status, error.value.param) == (404, "id")
        with pytest.raises(FileMissing):
            listed(store, "me", after=theirs)
        assert listed(store, "them") == [theirs]


@pytest.mark.parametrize("file_id", ["", "x", "../catalog.sqlite3", "file-../../etc/passwd", "file-" + "g" * 32, "\0"])
def test_ids_that_no_server_made_are_missing(tmp_path: Path, file_id: str) -> None:
    with opened(tmp_path) as store:
        for act in (store.get, store.read, store.delete):
            with pytest.raises(FileMissing):
                act(file_id, "")


def test_a_deleted_file_is_gone_and_its_readers_finish(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stored = upload(store, PAIR * 9)
        _, file = store.read(stored.id, "")
        store.delete(stored.id, "")
        with file:
            assert file.read() == PAIR * 9
        assert (listed(store), kept(tmp_path)) == ([], [])
        with pytest.raises(FileMissing):
            store.delete(stored.id, "")


def test_an_expired_file_is_gone_at_once_and_its_bytes_at_the_next_upload(tmp_path: Path) -> None:
    now = [1000.0]
    with opened(tmp_path, clock=lambda: now[0]) as store:
        lasting = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        stored = upload(store, PAIR, **lasting)
        assert stored.expires_at == 4600
        now[0] = 4599.0
        assert listed(store) == [stored.id]
        now[0] = 4600.0
        assert listed(store) == []
        with pytest.raises(FileMissing):
            store.read(stored.id, "")
        assert kept(tmp_path) == [stored.id]
        other = upload(store, PAIR)
        assert kept(tmp_path) == [other.id]


def test_a_file_may_have_exactly_its_limit(tmp_path: Path) -> None:
    with opened(tmp_path, FileLimits(len(PAIR) * 10, 2**20, 100)) as store:
        assert upload(store, PAIR * 10).bytes == len(PAIR) * 10
        with pytest.raises(PayloadTooLarge, match=f"larger than {len(PAIR) * 10} bytes"):
            upload(store, PAIR * 10 + b"x")
        assert len(kept(tmp_path)) == 1


def test_the_quota_is_exact_and_a_delete_gives_room(tmp_path: Path) -> None:
    with opened(tmp_path, FileLimits(2**20, len(PAIR) * 10, 100)) as store:
        first = upload(store, PAIR * 6)
        with pytest.raises(QuotaExceeded) as error:
            upload(store, PAIR * 5)
        assert (error.value.status, error.value.headers()) == (429, {"x-should-retry": "false"})
        upload(store, PAIR * 4)
        store.delete(first.id, "")
        upload(store, PAIR * 6)
        assert len(kept(tmp_path)) == 2


def test_the_number_of_files_counts_what_is_under_way(tmp_path: Path) -> None:
    with opened(tmp_path, FileLimits(2**20, 2**20, 2)) as store:
        upload(store, PAIR)
        running = store.begin(CONTENT_TYPE, "")
        with pytest.raises(QuotaExceeded, match="holds 2 files"):
            store.begin(CONTENT_TYPE, "")
        store.end(running)
        upload(store, PAIR)


def test_the_quota_holds_to_the_byte_under_parallel_uploads(tmp_path: Path) -> None:
    room = len(PAIR) * 50 * 4  # for four of the fifty
    with opened(tmp_path, FileLimits(2**20, room, 100)) as store, ThreadPoolExecutor(8) as pool:

        def attempt(_: int) -> int:
            try:
                return upload(store, PAIR * 50, piece=300).bytes
            except QuotaExceeded:
                return 0

        accepted = list(pool.map(attempt, range(50)))
        assert sum(accepted) <= room
        while sum(accepted) < room:  # what refused each other leaves room for the next
            accepted.append(upload(store, PAIR * 50).bytes)
        with pytest.raises(QuotaExceeded):
            upload(store, PAIR)
        assert sum(store.get(file_id, "").bytes for file_id in listed(store)) == room


def test_concurrent_uploads_are_all_whole(tmp_path: Path) -> None:
    contents = [b'{"prompt": "%d", "completion": "x"}\n' % number * 400 for number in range(16)]
    with opened(tmp_path) as store, ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(lambda content: upload(store, content), contents))
        for file, content in zip(stored, contents, strict=True):
            with store.read(file.id, "")[1] as opened_file:
                assert opened_file.read() == content
        assert sorted(listed(store)) == sorted(kept(tmp_path))


def test_uploads_at_once_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_UPLOADS", 2)
    with opened(tmp_path) as store:
        running = [store.begin(CONTENT_TYPE, "") for _ in range(2)]
        with pytest.raises(ServerOverloaded):
            store.begin(CONTENT_TYPE, "")
        for one in running:
            store.end(one)
        upload(store, PAIR)


def test_one_owners_uploads_do_not_shut_out_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_UPLOADS", 4)
    with opened(tmp_path) as store:
        running = [store.begin(CONTENT_TYPE, "flood") for _ in range(4)]
        running += [store.begin(CONTENT_TYPE, "quiet") for _ in range(2)]  # an equal part
        for owner in ("flood", "quiet"):
            with pytest.raises(ServerOverloaded):
                store.begin(CONTENT_TYPE, owner)
        running.append(store.begin(CONTENT_TYPE, "third"))
        for one in running:
            store.end(one)
        for one in [store.begin(CONTENT_TYPE, "third") for _ in range(4)]:
            store.end(one)


def test_a_full_disk_is_507_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as store:
        for call in ("write", "fsync"):
            with monkeypatch.context() as patched:
                patched.setattr(os, call, no_space)
                with pytest.raises(InsufficientStorage):
                    upload(store, PAIR)
        assert (listed(store), kept(tmp_path)) == ([], [])
        upload(store, PAIR)
        assert store.failures == 2


def test_a_full_disk_lets_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting is what makes room, and SQLite needs some for it: that of the ballast."""
    now = 1000.0
    with opened(tmp_path, clock=lambda: now) as store:
        first, second = upload(store, PAIR), upload(store, PAIR)
        third = upload(store, PAIR, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        (ballast,) = (path for path in (tmp_path / "files").iterdir() if path.stat().st_size == BYTES)

        def full(removing: Callable[..., Any]) -> Callable[..., Any]:
            def remove(*asked: Any) -> Any:
                if ballast.exists():
                    raise sqlite3.OperationalError("database or disk is full")
                return removing(*asked)

            return remove

        with monkeypatch.context() as patched:
            for name in ("remove", "remove_expired"):
                patched.setattr(Catalog, name, full(getattr(Catalog, name)))
            store.delete(first.id, "")
            assert (listed(store), ballast.exists()) == ([second.id, third.id], True)
            now += 7200
            store.end(store.begin(CONTENT_TYPE, ""))
        assert (kept(tmp_path), ballast.exists()) == ([second.id], True)


def test_room_for_deleting_is_kept_again_of_what_a_deleted_file_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        stored = upload(store, PAIR)
        ballast = tmp_path / "files" / "ballast"
        ballast.unlink()

        def random(size: int) -> bytes:
            if kept(tmp_path):
                raise OSError(errno.ENOSPC, "no room")
            return bytes(size)

        monkeypatch.setattr("server.files.ballast.os.urandom", random)
        store.delete(stored.id, "")
        assert ballast.stat().st_size == BYTES


def test_room_for_deleting_is_kept_though_a_server_was_killed_when_it_made_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        upload(store, PAIR, "me")
    ballast = tmp_path / "files" / "ballast"
    ballast.write_bytes(b"")
    (tmp_path / "files" / "ballast.part").write_bytes(b"half")
    with opened(tmp_path):
        assert ballast.stat().st_size == BYTES
    assert [path.name for path in (tmp_path / "files").glob("ballast*")] == ["ballast"]


def test_a_process_that_stands_still_with_a_lock_holds_nobody_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "LOCK_SECONDS", 0.05)
    with opened(tmp_path) as store:
        stored = upload(store, PAIR, "me")
        with (tmp_path / "files" / "results.lock").open("wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(InsufficientStorage):
                store.delete(stored.id, "me")
            assert listed(store, "me") == [stored.id]
        store.delete(stored.id, "me")
        assert listed(store, "me") == []


def test_closing_waits_for_the_piece_that_is_written_and_what_follows_is_refused(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()
    with opened(tmp_path) as store, ThreadPoolExecutor(2) as pool:
        running = store.begin(CONTENT_TYPE, "")
        reserve = running._reserve

        def waiting(upload_: object, more: int) -> None:
            entered.set()
            assert go_on.wait(20)
            reserve(running, more)

        running._reserve = waiting
        feeding = pool.submit(store.feed, running, body(PAIR))
        assert entered.wait(20)
        ending = pool.submit(store.end, running)
        assert not ending.done()
        go_on.set()
        feeding.result(20)
        ending.result(20)
        assert kept(tmp_path) == []


def test_another_process_does_not_sweep_what_is_under_way(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        running = store.begin(CONTENT_TYPE, "")
        store.feed(running, body(PAIR)[:-40])
        with opened(tmp_path) as other:  # its own descriptors: flock tells them apart as it does processes
            assert kept(tmp_path) == [f"{running.id}.part"]
            upload(other, PAIR)
        store.feed(running, body(PAIR)[-40:])
        stored = store.finish(running)
        store.end(running)
        assert stored.id in listed(store)
        assert len(listed(store)) == 2


TWO_FILES = part("purpose", b"fine-tune") + part("file", PAIR, "a") + part("file", PAIR, "b") + b"--cut--\r\n"


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (part("file", PAIR, "a") + b"--cut--\r\n", "purpose"),
        (part("purpose", b"fine-tune") + b"--cut--\r\n", "file"),
        (part("purpose", b"fine-tune") + part("file", PAIR) + b"--cut--\r\n", "file"),
        (TWO_FILES, "file"),
        (part("purpose", b"fine-tune") * 2, "purpose"),
        (part("purpose", b"batch") + b"--cut--", "purpose"),
        (part("purpose", b"x" * 300), "purpose"),
        (part("model", b"x"), "model"),
        (body(PAIR, **{"expires_after[seconds]": "3600"}), "expires_after[anchor]"),
        (body(PAIR, **{"expires_after[anchor]": "created_at"}), "expires_after[seconds]"),
        (body(PAIR, **{"expires_after[anchor]": "last_active_at"}), "expires_after[anchor]"),
        *((body(PAIR, **{"expires_after[seconds]": text}), "expires_after[seconds]")
          for text in ("3599", "2592001", "-1", "1e4", "", "٣٦٠٠")),
        (body(PAIR)[:-8], None),
        (b"no multipart", None),
        (b"--cut\r\n\r\nx\r\n--cut--\r\n", None),
    ],
    ids=range(20),
)  # fmt: skip
def test_forms_are_refused_with_the_fields_name_and_leave_nothing(
    tmp_path: Path, sent: bytes, param: str | None
) -> None:
    with opened(tmp_path) as store:
        with pytest.raises(InvalidRequest) as error:
            send(store, sent)
        assert error.value.param == param
        assert (listed(store), kept(tmp_path)) == ([], [])


def test_the_file_may_come_before_its_purpose(tmp_path: Path) -> None:
    sent = part("file", PAIR, "a") + part("purpose", b"fine-tune") + b"--cut--\r\n"
    with opened(tmp_path) as store:
        assert send(store, sent).filename == "a"


@given(st.binary(max_size=400))
def test_any_name_is_plain_or_refused(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        name = plain_name(raw)
        assert 0 < len(name) <= 255
        assert name.isprintable()
        assert not set(name) & {"/", "\\", "\0"}
        assert name not in (".", "..")


def test_servers_that_start_at_once_share_a_new_folder(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def use(number: int) -> str:
        with opened(tmp_path) as store:
            together.wait(20)
            return upload(store, PAIR * number).id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(use, range(1, 9)))
    with opened(tmp_path) as store:
        assert sorted(listed(store)) == sorted(ids) == kept(tmp_path)


def test_carriage_returns_do_not_cut_a_file_into_crumbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (PAIR.rstrip(b"\n") + b"\r\n") * 5000
    writes: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: writes.append(len(data)) or write(to, data))
    with opened(tmp_path) as store:
        stored = upload(store, content, piece=2**16)
        assert stored.bytes == sum(writes) == len(content)
        assert len(writes) <= len(content) // 2**16 + 2


HOSTILE = [
    "../../x",
    "/etc/passwd",
    "..\\..\\x",
    "a/../../b",
    "CON",
    ".hidden",
    "x" * 255,
    "ünï 文.jsonl",
    "%2e%2e%2fx",
]
REFUSED = ["", ".", "..", "../", "a/..", "x" * 256, "a\0b", "a\tb", "\u202egnp.exe"]


@pytest.mark.parametrize("name", HOSTILE + REFUSED)
def test_the_clients_name_is_shown_and_never_a_path(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "data") as store:
        if name in HOSTILE:
            stored = upload(store, PAIR, filename=name)
            assert stored.filename == name.replace("\\", "/").split("/")[-1]
            assert kept(tmp_path / "data") == [stored.id]
        else:
            with pytest.raises(LongwaveError, match=r"filename|parse"):
                upload(store, PAIR, filename=name)
            assert kept(tmp_path / "data") == []
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
