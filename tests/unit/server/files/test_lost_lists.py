"""A list of files that is lost or damaged takes none of them along."""

from pathlib import Path

import pytest
from training_files import PAIR, kept, listed, opened, upload

from server.errors import InsufficientStorage


@pytest.mark.parametrize("left", [None, b""])
def test_files_whose_catalogue_is_lost_are_left_alone_and_found_again_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: bytes | None
) -> None:
    """A disk that lost it, or a copy of the data directory without it, must not take the files along."""
    with opened(tmp_path) as store:
        stored = upload(store, PAIR)
    catalog = tmp_path / "files" / "catalog.sqlite3"
    kept_catalog = catalog.rename(tmp_path / "kept")
    if left is not None:
        catalog.write_bytes(left)
    with opened(tmp_path) as store, pytest.raises(InsufficientStorage):
        listed(store)
    assert f"files in {tmp_path / 'files'}: {catalog} is lost" in caplog.text
    assert kept(tmp_path) == [stored.id]
    kept_catalog.replace(catalog)
    with opened(tmp_path) as store:
        assert listed(store) == [stored.id]


def test_a_folder_that_is_gone_is_made_anew_and_a_list_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    """Under a server that runs: what it wrote to a list without a name would be lost with it."""
    with opened(tmp_path) as store:
        upload(store, PAIR)
        (tmp_path / "files").rename(tmp_path / "away")
        stored = upload(store, PAIR)
        assert listed(store) == [stored.id]
        (tmp_path / "files" / "catalog.sqlite3").unlink()
        with pytest.raises(InsufficientStorage):
            upload(store, PAIR)
        assert kept(tmp_path) == [stored.id]


@pytest.mark.parametrize("place", [1, 2, 3])  # the table, its ids, the counter of its rows
def test_a_damaged_catalogue_takes_no_file_along_and_is_looked_at_anew(tmp_path: Path, place: int) -> None:
    catalog = tmp_path / "files" / "catalog.sqlite3"
    with opened(tmp_path) as store:
        stored = upload(store, PAIR)
    whole = catalog.read_bytes()
    page = len(whole) // 4096 - place
    catalog.write_bytes(whole[: page * 4096] + b"\xa5" * 4096 + whole[(page + 1) * 4096 :])
    with opened(tmp_path) as store:
        for _ in range(2):
            with pytest.raises(InsufficientStorage):
                listed(store)
        assert kept(tmp_path) == [stored.id]
        catalog.write_bytes(whole)
        assert listed(store) == [stored.id]
