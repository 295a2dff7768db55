"""Saved weights are found by their path, by their owner alone."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from server.errors import InvalidRequest, TrainingMissing
from server.training.calls import Kind
from server.training.weights import LABEL, UNFINISHED_SECONDS, Label, WeightsStore

MODEL = "train-" + "0" * 32


def put(store: WeightsStore, name: str, owner: str = "me", kind: Kind = "weights", created: int = 100) -> str:
    path = store.path(MODEL, kind, name)
    folder = store.prepare(path)
    folder.mkdir()
    label = Label(path, kind, owner, "base", 8, 3, served=False, created_at=created)
    (folder / LABEL).write_bytes(msgspec.json.encode(label))
    (folder / "adapter_model.safetensors").write_bytes(b"12345")
    return path


def test_weights_are_found_with_what_is_known_of_them(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "saved")
    path = put(store, "step-10")
    assert path == f"longwave://{MODEL}/weights/step-10"
    found = store.find(path, "me")
    assert (found.label.rank, found.label.steps, found.folder.name) == (8, 3, "step-10")
    assert found.size == 5 + (found.folder / LABEL).stat().st_size
    assert (tmp_path / "saved").stat().st_mode & 0o077 == 0


def test_other_owners_weights_do_not_exist(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "saved")
    path = put(store, "a")
    with pytest.raises(TrainingMissing) as theirs:
        store.find(path, "you")
    with pytest.raises(TrainingMissing) as none:
        store.find(store.path(MODEL, "weights", "b"), "you")
    assert theirs.value.message.replace("/a.", "/b.") == none.value.message
    assert store.of("you") == []


@pytest.mark.parametrize(
    "path",
    [
        "longwave://train-1/weights/a",
        f"longwave://{MODEL}/weights/..",
        f"longwave://{MODEL}/weights/.a",
        f"longwave://{MODEL}/weights/a/b",
        f"longwave://{MODEL}/other/a",
        f"longwave://{MODEL}/weights/a\n",
        f"longwave://{MODEL}/weights/" + "a" * 65,
        f"longwave://../../weights/{MODEL}",
        "/etc/passwd",
        "tinker://x/weights/a",
    ],
)
def test_what_is_no_path_of_weights_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequest, match="is no path of saved weights") as error:
        WeightsStore(tmp_path).folder(path)
    assert error.value.param == "path"


def test_the_list_is_in_the_order_of_saving_and_passes_over_what_is_not_whole(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "saved")
    paths = [put(store, "b", created=1), put(store, "a", kind="sampler_weights", created=2), put(store, "c", created=3)]
    put(store, "z", owner="you", created=0)
    (store.folder(paths[2]) / LABEL).write_text("{")
    store.folder(paths[0]).with_name(".d-abc").mkdir()
    assert [saved.label.path for saved in store.of("me")] == paths[:2]
    assert len(store.all()) == 3


def test_removed_weights_are_gone_and_what_crashes_left_is_swept(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "saved")
    path, other = put(store, "a"), put(store, "b")
    store.remove(store.find(path, "me"))
    assert [saved.label.path for saved in store.all()] == [other]
    parent = store.folder(path).parent
    old, new = parent / ".old-1", parent / ".new-1"
    for left in (old, new):
        left.mkdir()
    long_ago = old.stat().st_mtime - UNFINISHED_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    gone = parent / ".gone-1"
    gone.symlink_to("nowhere")  # as good as removed between the look and the touch
    store.sweep()
    assert (old.exists(), new.exists(), store.folder(other).exists()) == (False, True, True)


@pytest.mark.parametrize("name", ["a", "a-deleted-1", "a-deleted", f"a-deleted-{'1' * 19}", "a-before"])
def test_what_is_being_written_or_replaced_is_not_swept_whatever_its_name(tmp_path: Path, name: str) -> None:
    store = WeightsStore(tmp_path / "saved")
    folder = store.prepare(store.path(MODEL, "weights", name))
    left = [folder.with_name(f".{name}-12345678{end}") for end in ("", "-before")]  # as models.training names them
    for place in left:
        place.mkdir()
    store.sweep()
    assert [place.exists() for place in left] == [True, True]


def test_weights_that_two_remove_at_once_are_missing_for_the_second(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "saved")
    path = put(store, "a")
    first, second = store.find(path, "me"), store.find(path, "me")
    store.remove(first)
    with pytest.raises(TrainingMissing, match=f"There are no saved weights {path}"):
        store.remove(second)


def test_a_store_without_a_folder_is_empty(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "nowhere")
    store.sweep()
    assert store.all() == []


def test_what_was_replaced_is_put_back_only_where_nothing_stands_and_it_is_whole(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "saved")
    lost, stands, half, foreign = (store.folder(put(store, name)) for name in ("lost", "stands", "half", "foreign"))
    for folder in (lost, half, foreign):
        folder.rename(folder.with_name(f".{folder.name}-x1-before"))
    shutil.copytree(stands, stands.with_name(".stands-x1-before"))
    (half.with_name(".half-x1-before") / LABEL).unlink()  # it was being removed
    (foreign.with_name(".foreign-x1-before") / LABEL).write_text('{"path": "/etc"}')
    writing = lost.with_name(".lost-x1")
    writing.mkdir()
    store.mend()
    assert sorted(path.name for path in lost.parent.iterdir()) == [".lost-x1", "lost", "stands"]
    assert store.find(store.path(MODEL, "weights", "lost"), "me").size > 5
    store.sweep()
    assert writing.exists()  # it is young
    store.remove(store.find(store.path(MODEL, "weights", "lost"), "me"))
    assert not lost.exists()


def test_what_was_replaced_is_never_swept_for_its_age(tmp_path: Path) -> None:
    """A rename leaves a folder as old as it is: only `mend` knows what stands in its place."""
    store = WeightsStore(tmp_path / "saved")
    folder = store.folder(put(store, "a"))
    before = folder.rename(folder.with_name(".a-x1-before"))
    os.utime(before, (1.0, 1.0))
    store.sweep()
    assert before.exists()
    store.mend()
    assert folder.exists()
