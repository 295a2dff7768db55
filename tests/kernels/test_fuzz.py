"""The random tester: fixed problems of every kind, and that it finds what is wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu

from . import fuzz
from .conftest import EMULATED
from .fuzz_draws import Place, RefusedError

CPU = fuzz.place_of("cpu", small=True)
#: Sets whose kernels a GPU compiles in seconds, and as many shapes of each.
SETS = (1, 2)


def problems_of(kind: str, sets: tuple[int, ...], shapes: int) -> Iterator[str]:
    return (f"{kind}-{chosen}-{shape}" for chosen in sets for shape in range(shapes))


def run(kind: str, place: Place, sets: tuple[int, ...], shapes: int, enough: int = 1000) -> None:
    served = 0
    for name in problems_of(kind, sets, shapes):
        try:
            fuzz.run_problem(name, place)
            served += 1
            if served == enough:
                return
        except RefusedError:
            continue
        except Exception as error:
            error.add_note(f"python -m tests.kernels.fuzz --problem {name}")
            raise
    assert served or place.device.type == "cuda", "a CPU and a Hopper serve some of every kind"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_random_problems_meet_the_error_rule(kind: str, device: torch.device) -> None:
    """In the emulator one, as some take a minute there."""
    if EMULATED:
        run(kind, fuzz.place_of("emulated", small=True), SETS, fuzz.SHAPES, enough=1)
    elif device.type == "cuda":
        run(kind, fuzz.place_of("cuda", small=False), SETS, fuzz.SHAPES)
    else:
        run(kind, CPU, SETS, fuzz.SHAPES)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_random_problems_meet_the_error_rule_on_cpu(kind: str) -> None:
    run(kind, CPU, (1,), 6)


def test_a_problem_is_the_same_every_time() -> None:
    said: list[list[str]] = [[], [], []]
    for words, name in zip(said, ("forward-1-3", "forward-1-3", "forward-1-4"), strict=True):
        fuzz.run_problem(name, CPU, words)
    assert said[0] == said[1]
    assert said[0] != said[2]


def test_what_is_wrong_is_told_in_a_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Outputs that are too large by three hundredths, and nothing else."""

    def wrong(args: AttentionArgs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = cpu.forward(args)
        return out * 1.03, lse

    monkeypatch.setattr(dispatch, "_implementation", lambda _: wrong)
    log = tmp_path / "log"
    assert fuzz.main(["--device", "cpu", "--small", "--problem", "paged-1", "--log", str(log)]) == 1
    printed = capsys.readouterr().out
    assert "python -m tests.kernels.fuzz --device cpu --small --problem paged-1-" in printed
    assert "FAILED AssertionError: max error" in printed
    assert log.read_text().split() == [f"paged-1-{shape}" for shape in range(fuzz.SHAPES)]


def test_refusals_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refusing(args: AttentionArgs) -> None:
        raise dispatch.UnsupportedError(
            "no attention kernel serves this call:\n  one (cuda) serves\n    but 7 are many"
        )

    monkeypatch.setattr(dispatch, "select", refusing)
    assert fuzz.main(["--device", "cpu", "--small", "--problem", "decode-1"]) == 0
    assert f"refused {fuzz.SHAPES} times, decode: but N are many" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [lambda _: vars()["nothing"], lambda _: max(())], ids=["KeyError", "ValueError"])
def test_an_error_of_another_kind_is_a_failure(
    broken: Callable[[AttentionArgs], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own ValueErrors, too: what the library refuses it raises itself."""
    monkeypatch.setattr(dispatch, "select", broken)
    counts = fuzz.Counts()
    assert fuzz.attempt("forward-1-3", CPU, counts, "again")
    assert len(counts.failed) == 1
    assert "again --problem forward-1-3" in counts.failed[0]


@pytest.mark.slow
def test_several_processes_are_counted_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--small", "--only", "decode", "--seconds", "0.2", "--processes", "2"]
    assert fuzz.main([*arguments, "--log", str(tmp_path / "fuzz")]) == 0
    assert "decode: " in capfd.readouterr().out
    logs = [(tmp_path / f"fuzz.{seed}.log").read_text().split() for seed in (1, 2)]
    assert logs[0]
    assert logs[0] != logs[1]
