"""Recording the README's results: real processes, that end, fail, never end, or write nothing."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import record
from benchmarks.record import RECORDINGS, Recording

WRITES = "import sys, json; json.dump({'machine': {'commit': 'abc'}}, open(sys.argv[1], 'w'))"


@dataclass(frozen=True)
class Script(Recording):
    """A process that executes its first argument instead of a benchmark."""

    def command(self, out: Path, commit: str, peers: dict[str, Path]) -> list[str]:
        return [sys.executable, "-c", self.arguments[0], str(out)]


def scripts(monkeypatch: pytest.MonkeyPatch, seconds: int = 60, adds: bool = False, **texts: str) -> None:
    """`seconds`: that each of them may take."""
    monkeypatch.setattr(
        record,
        "RECORDINGS",
        tuple(Script(n, "", seconds, (t,), devices=record.CPU, adds=adds) for n, t in texts.items()),
    )
    monkeypatch.setattr(record, "device_name", lambda: "cpu")


def ran(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(record.app, [*arguments, "--out", str(folder), "--commit", "abc"])
    return result.exit_code, result.output


def test_every_result_that_is_kept_can_be_recorded_again() -> None:
    names = {one.name for one in record.RECORDINGS}
    assert {file.stem.rpartition("_")[0] for file in record.RESULTS.glob("*.json")} <= names


def test_what_ends_well_is_kept_and_not_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(monkeypatch, good=WRITES)
    assert ran(tmp_path)[0] == 0
    assert json.loads((tmp_path / "good_cpu.json").read_text()) == {"machine": {"commit": "abc"}}
    scripts(monkeypatch, good="raise SystemExit(1)")
    code, output = ran(tmp_path)
    assert (code, "good: already there" in output) == (0, True)


def test_what_fails_stays_a_partial_result_beside_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"machine": {"commit": "older"}}
    (tmp_path / "bad_cpu.json").write_text(json.dumps(old))
    scripts(monkeypatch, bad=f"{WRITES}; print('why'); raise SystemExit(7)", silent="")
    code, output = ran(tmp_path)
    assert code == 1
    assert "bad: ended with code 7" in output
    assert "    why" in output
    assert "silent: ended with code 0 and wrote nothing" in output
    assert json.loads((tmp_path / "bad_cpu.json").read_text()) == old
    assert (tmp_path / "bad_cpu.partial.json").exists()


def test_what_an_earlier_run_left_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silent_cpu.partial.json").write_text(json.dumps({"machine": {"commit": "abc"}}))
    scripts(monkeypatch, silent="")
    code, output = ran(tmp_path)
    assert (code, "silent: ended with code 0 and wrote nothing" in output) == (1, True)
    assert not (tmp_path / "silent_cpu.json").exists()


def test_a_file_that_is_added_to_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are recorded here, the trials in the same file by hand."""
    (tmp_path / "more_cpu.json").write_text(json.dumps({"machine": {"commit": "older"}, "trials": {"soak": 1}}))
    adds = "import json, sys; f = sys.argv[1]; x = json.load(open(f)); "
    adds += "x['machine']['commit'] = 'abc'; json.dump(x, open(f, 'w'))"
    scripts(monkeypatch, adds=True, more=adds)
    assert ran(tmp_path)[0] == 0
    assert json.loads((tmp_path / "more_cpu.json").read_text()) == {"machine": {"commit": "abc"}, "trials": {"soak": 1}}
    assert [one.name for one in RECORDINGS if one.adds] == ["faults"]


def test_what_does_not_end_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = tmp_path / "beats"
    forks = "import os, time\nif os.fork(): os.wait()\n"
    scripts(monkeypatch, 3, stuck=f"{forks}while True: open({str(beats)!r}, 'a').write('.'); time.sleep(0.02)")
    code, output = ran(tmp_path)
    assert (code, "stuck: cut short after 3 s" in output) == (1, True)
    size = beats.stat().st_size
    assert size > 0
    time.sleep(0.2)
    assert beats.stat().st_size == size


def test_none_begins_that_might_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(monkeypatch, one=WRITES, two=WRITES)
    code, output = ran(tmp_path, "--seconds", "1.5")
    assert (code, "no time left for: one two" in output) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_a_peer_comes_first_where_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    peers = {"fa3": tmp_path / "fa3", "vllm": tmp_path / "vllm"}
    races, serves = Recording("a", "attention", 1, (), "fa3"), Recording("s", "serving", 1, (), "vllm")
    root = str(record.ROOT)
    assert races.environment(peers)["PYTHONPATH"] == f"{peers['fa3']}:{root}:/before"
    assert serves.environment(peers)["PYTHONPATH"] == f"{root}:/before"
    assert "--vllm-path" not in races.command(tmp_path, "abc", peers)
    assert str(peers["vllm"]) in serves.command(tmp_path, "abc", peers)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "no benchmark is named nothing"),
        (["serving"], "not to be recorded on a CPU: serving"),
        (["--peer", "fa3=/nowhere"], "fa3=/nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    code, output = ran(tmp_path, *arguments)
    assert code == 2
    assert said in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("one", record.RECORDINGS, ids=lambda one: one.name)
def test_every_benchmark_takes_the_arguments_that_it_is_given(one: Recording) -> None:
    source = (record.ROOT / "benchmarks" / f"{one.module}.py").read_text()
    assert "__main__" in source
    command = one.command(Path("x"), "abc", {"vllm": Path("v")})
    for flag in (argument for argument in command if argument.startswith("--")):
        name = flag.removeprefix("--").replace("-", "_")
        assert flag in source or f"    {name}: " in source or flag == "--kv-cache-dtype", flag
