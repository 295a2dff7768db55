"""Files of KV blocks: what was written comes back or is a miss, the limit holds, strangers' files stay."""

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Semaphore

import pytest

from server.engine import block_files
from server.engine.block_files import BlockFile, file_bytes, owner_of
from server.engine.disk_tier import HANG_SECONDS, PAUSE, SWITCH_INTERVAL, DiskResult, DiskTier, DiskTierError
from server.engine.prefixes import Prefix, hash_block, root_hash

BLOCK_SIZE, BLOCK_BYTES = 4, 1000
FILE_BYTES = file_bytes(BLOCK_BYTES, BLOCK_SIZE)


def open_tier(
    folder: Path, num_blocks: int = 10, fingerprint: int = 0, clock: Callable[[], float] = time.monotonic
) -> DiskTier:
    return DiskTier(
        folder,
        max_bytes=num_blocks * FILE_BYTES,
        fingerprint=bytes([fingerprint]) * 32,
        block_bytes=BLOCK_BYTES,
        block_size=BLOCK_SIZE,
        clock=clock,
    )


def prefix(number: int, salt: bytes = b"", digest: str = "") -> Prefix:
    token_bytes = number.to_bytes(4, "little") * BLOCK_SIZE
    return Prefix(hash_block(root_hash(salt, digest), token_bytes), token_bytes, 0, salt, digest, number + 1)


def content(number: int) -> bytearray:
    return bytearray((number * 7 + i) % 256 for i in range(BLOCK_BYTES))


def wait(tier: DiskTier, count: int = 1) -> list[DiskResult]:
    results: list[DiskResult] = []
    deadline = time.monotonic() + 60
    while len(results) < count:
        assert time.monotonic() < deadline
        results += tier.finished()
    tier.check_integrity()
    return results


def write(tier: DiskTier, *numbers: int, salt: bytes = b"") -> None:
    for number in numbers:
        now = time.time_ns()  # files that follow each other within a tick of the kernel's own clock would be as old
        assert tier.write(prefix(number, salt), memoryview(content(number)), number, used_ns=now)
        assert wait(tier) == [DiskResult(number, succeeded=True)]


def read(tier: DiskTier, wanted: Prefix) -> bytes | None:
    memory = bytearray(BLOCK_BYTES)
    tier.read(wanted, memoryview(memory), 1)
    return bytes(memory) if wait(tier)[0].succeeded else None


def test_what_was_written_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1, 2, 3)
    assert read(tier, prefix(2)) == content(2)
    tier.close()
    tier = open_tier(tmp_path)
    assert [read(tier, prefix(number)) for number in (1, 2, 3)] == [content(number) for number in (1, 2, 3)]
    stats = tier.stats()
    assert (stats.num_blocks, stats.num_damaged, stats.is_full) == (3, 0, False)
    assert (stats.read_bytes, stats.written_bytes) == (3 * FILE_BYTES, 0)
    tier.close()


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    write(tier, 1)
    tier.close()
    for path in [tmp_path / "kv" / f"{0:064x}", *tmp_path.rglob("*.kv")]:
        assert path.stat().st_mode & 0o077 == 0


def test_what_was_used_longest_ago_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, num_blocks=4)
    write(tier, 1, 2, 3, 4)
    read(tier, prefix(1))
    write(tier, 5)
    assert [prefix(number).hash in tier for number in (1, 2, 3, 4, 5)] == [True, False, True, True, True]
    tier.close()
    files = list(tmp_path.rglob("*.kv"))
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) <= 4 * FILE_BYTES


def test_one_tenants_flood_pushes_out_its_own_blocks(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, num_blocks=6)
    write(tier, 1, 2, salt=b"a")
    write(tier, *range(10, 30), salt=b"b")
    assert all(prefix(number, b"a").hash in tier for number in (1, 2))
    tier.close()


def test_the_same_tokens_of_two_tenants_are_two_files(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1, salt=b"a")
    assert prefix(1, b"a").hash in tier
    assert prefix(1, b"b").hash not in tier
    assert prefix(1, b"a", "an adapter's digest").hash not in tier
    assert owner_of(b"a") != owner_of(b"b")
    tier.close()


def test_a_file_that_is_not_the_prefix_asked_for_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "block"
    BlockFile(path, bytes(32), prefix(1)).write(memoryview(content(1)))
    memory = memoryview(bytearray(BLOCK_BYTES))
    assert BlockFile(path, bytes(32), prefix(1)).read(memory)
    for fingerprint, other in (
        (b"1" * 32, prefix(1)),
        (bytes(32), prefix(2)),
        (bytes(32), prefix(1, b"a")),
        (bytes(32), prefix(1, digest="d")),
    ):
        assert not BlockFile(path, fingerprint, other).read(memory)


def test_every_damaged_bit_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "block"
    file = BlockFile(path, bytes(32), prefix(1))
    file.write(memoryview(content(1)))
    whole = path.read_bytes()
    memory = memoryview(bytearray(BLOCK_BYTES))
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert not file.read(memory), place
    for length in (0, 1, len(whole) - BLOCK_BYTES, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert not file.read(memory)
    path.write_bytes(whole)
    assert file.read(memory)


def test_a_file_that_comes_and_goes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_pieces(call: Callable[[int, list[memoryview]], int]) -> Callable[[int, list[memoryview]], int]:
        return lambda descriptor, parts: call(descriptor, [parts[0][:77]])

    monkeypatch.setattr(os, "readv", in_pieces(os.readv))
    monkeypatch.setattr(os, "writev", in_pieces(os.writev))
    file = BlockFile(tmp_path / "block", bytes(32), prefix(1))
    file.write(memoryview(content(1)))
    memory = bytearray(BLOCK_BYTES)
    assert file.read(memoryview(memory))
    assert memory == content(1)
    file.path.write_bytes(file.path.read_bytes() + b"\0")
    assert not file.read(memoryview(memory))


def test_threads_that_compute_give_way_sooner_while_a_tier_is_open(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    tier = open_tier(tmp_path)
    assert sys.getswitchinterval() == SWITCH_INTERVAL < interval
    tier.close()
    assert sys.getswitchinterval() == interval


def test_a_full_disk_ends_the_writing_for_a_while_and_not_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    tier = open_tier(tmp_path, clock=lambda: now)
    write(tier, 1)

    def no_space(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", no_space)
        for _ in range(2):
            assert tier.write(prefix(2), memoryview(content(2)), 2)
            assert wait(tier) == [DiskResult(2, succeeded=False)]
            assert tier.stats().is_full
            assert prefix(2).hash not in tier
            assert not tier.write(prefix(3), memoryview(content(3)), 3)
            assert read(tier, prefix(1)) == content(1)
            assert [path.name for path in tmp_path.rglob("*.kv*")] == [f"{prefix(1).hash.hex()}.kv"]
            now += PAUSE
    assert len(caplog.records) == 1
    assert not tier.stats().is_full
    write(tier, 3)
    assert read(tier, prefix(3)) == content(3)
    tier.close()


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "write"])
def test_a_disk_that_gives_no_answer_hangs(tmp_path: Path, *, is_read: bool) -> None:
    """Files that are pipes: opening one waits for who is at its other end."""
    now = 0.0
    tier = open_tier(tmp_path, clock=lambda: now)
    write(tier, 1)
    (path,) = tmp_path.rglob("*.kv")
    if is_read:
        path.unlink()
    else:  # what is written first, and renamed
        path = path.with_name(f"{prefix(2).hash.hex()}.kv.tmp")
    os.mkfifo(path)
    if is_read:
        tier.read(prefix(1), memoryview(bytearray(BLOCK_BYTES)), 1)
    else:
        tier.write(prefix(2), memoryview(content(2)), 2)
    now += HANG_SECONDS
    assert not tier.stats().is_hanging
    now += 1
    assert tier.stats().is_hanging
    deadline = time.monotonic() + 60
    while not tier.finished():  # however late the thread opens it
        assert time.monotonic() < deadline
        with suppress(FileNotFoundError):
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    assert not tier.stats().is_hanging
    tier.close()


def test_writes_that_wait_for_each_other_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, may_end = 0.0, Semaphore(0)
    tier = open_tier(tmp_path, clock=lambda: now)
    with monkeypatch.context() as patched:
        patched.setattr(BlockFile, "write", lambda *_: may_end.acquire())
        for number in (1, 2, 3):
            assert tier.write(prefix(number), memoryview(content(number)), number)
        for _ in range(2):
            now += 0.9 * HANG_SECONDS
            may_end.release()
            wait(tier)
            assert not tier.stats().is_hanging
            tier.look_at_writer()
        assert not caplog.records
        now += 1.1 * HANG_SECONDS
        assert tier.stats().is_hanging
        for _ in range(2):
            tier.look_at_writer()
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path} has not taken a KV block for 30 s: few more go there until it does"
        ]
        may_end.release()
        wait(tier)
    tier.close()


def test_what_is_forgotten_while_it_is_written_is_gone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert tier.write(prefix(1), memoryview(content(1)), 1)
    tier.forget(prefix(1).hash)
    assert prefix(1).hash not in tier
    wait(tier)
    tier.close()
    assert not list(tmp_path.rglob("*.kv"))


def test_unfinished_and_misshapen_files_are_swept_and_strangers_left_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1)
    tier.close()
    folder = next(tmp_path.rglob("*.kv")).parent
    leftovers = [folder / f"{2:064x}.kv.tmp", folder / f"{3:064x}.kv"]
    strangers = [tmp_path / "notes.txt", folder / "notes.kv", tmp_path / "models" / "x.kv", folder.parent / "readme"]
    for path in (*leftovers, *strangers):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (folder / f"{4:064x}.kv").symlink_to(strangers[0])
    tier = open_tier(tmp_path)
    assert tier.stats().num_blocks == 1
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in strangers)
    tier.close()


def test_other_models_blocks_make_room_down_to_half_of_the_limit(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, num_blocks=10, fingerprint=1)
    write(tier, *range(8))
    tier.close()
    tier = open_tier(tmp_path, num_blocks=10, fingerprint=2)
    write(tier, *range(20))
    assert tier.stats().num_blocks == 5
    tier.close()
    tier = open_tier(tmp_path, num_blocks=10, fingerprint=1)
    assert [number for number in range(8) if prefix(number).hash in tier] == [3, 4, 5, 6, 7]  # the latest
    tier.close()


def test_a_directory_is_one_engines(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(DiskTierError, match="in use by another engine"):
        open_tier(tmp_path, fingerprint=1)
    tier.close()
    open_tier(tmp_path).close()


def test_a_directory_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskTierError, match="hold no KV block"):
        open_tier(tmp_path, num_blocks=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="cannot hold KV blocks"):
        open_tier(tmp_path / "file")


def test_the_secret_of_a_directory_stays_the_same(tmp_path: Path) -> None:
    secret = block_files.secret(tmp_path / "new")
    assert len(secret) == 32
    assert block_files.secret(tmp_path / "new") == secret
    assert block_files.secret(tmp_path / "other") != secret
    assert (tmp_path / "new" / "secret").stat().st_mode & 0o077 == 0
