"""The teaching ladder without a GPU: rungs compile, fit their GPU, stay short; a wrong one is told from a right."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typer import Typer
from typer.testing import CliRunner

from benchmarks import ladder
from benchmarks.ladder import Step, climb, errors, standard, table
from benchmarks.ladder_rungs import LADDER, RUNGS, TILE, Rung, compile_rung, make, source
from benchmarks.stopwatch import Call, Stopwatch

STEP = Step("rung", "an idea", "any", 2, 128)
BLOCK_SMEM = {"sm_75": 64 * 1024, "sm_80": 163 * 1024, "sm_90a": 227 * 1024}  # dynamic, after opting in
MOST_LINES = 160


class OneMillisecond(Stopwatch):
    """Calls once and says one millisecond."""

    def times(self, calls: Sequence[Call]) -> list[float]:
        calls[0]()
        return [1.0]


@pytest.fixture
def watch() -> Stopwatch:
    return OneMillisecond(torch.device("cpu"), flush=False)


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.randn(2, 128, 128, dtype=torch.bfloat16) for _ in range(3)]


def archs(rung: Rung) -> list[str]:
    return list(dict.fromkeys([rung.arch, "sm_90a"]))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs the cuda extra (NVRTC)")
@pytest.mark.parametrize(
    ("rung", "arch"), [(r, a) for r in RUNGS for a in archs(r)], ids=lambda x: getattr(x, "name", x)
)
def test_a_rung_compiles_without_spills_or_warnings(rung: Rung, arch: str) -> None:
    report = compile_rung(rung, arch).report

    assert report.spill_bytes == report.local_bytes == 0
    assert report.warnings == ()
    assert report.static_smem == 0
    assert len(report.parameter_sizes) == 5 + rung.scores


@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_a_rung_is_one_short_file_that_its_gpu_can_hold(rung: Rung) -> None:
    lines = rung.path.read_text().splitlines()

    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith(f"// Rung {RUNGS.index(rung) + 1}: ")
    assert f"{rung.threads} threads" in rung.path.read_text()
    assert rung.smem_bytes <= BLOCK_SMEM[rung.arch]
    assert TILE % rung.rows == 0


def test_every_kernel_of_the_folder_is_a_rung_and_explained() -> None:
    text = (LADDER / "README.md").read_text()

    assert sorted(path.stem for path in LADDER.glob("*.cu")) == [rung.name for rung in RUNGS]
    assert all(f"({rung.name}.cu)" in text for rung in RUNGS)


def test_headers_come_with_those_that_they_include() -> None:
    names = {rung.name: [name for name, _ in source(rung).headers] for rung in RUNGS}

    assert names["rung1_naive"] == []
    assert {"parts/element.cuh", "parts/tma.cuh", "parts/wgmma_sm90.cuh"} <= set(names["rung6_overlap"])


def test_a_rung_runs_on_its_gpu_and_later_ones_or_on_its_own_only() -> None:
    first, last = RUNGS[0], RUNGS[-1]

    assert first.runs_on((7, 5))
    assert first.runs_on((12, 0))
    assert not RUNGS[3].runs_on((7, 5))
    assert last.runs_on((9, 0))
    assert not last.runs_on((10, 0))


@pytest.mark.parametrize("shape", [(2, 100, 128), (2, 128, 64)])
def test_a_length_that_tiles_do_not_divide_is_refused(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match="multiple of 128"):
        make(RUNGS[0], x, x, x, x)


def test_a_right_rung_is_timed(tensors: list[Tensor], watch: Stopwatch) -> None:
    step = climb(STEP, lambda: lambda: standard(*tensors), tensors, watch)

    assert (step.ms, step.reason, step.wrong) == (1.0, None, False)
    assert step.tflops == pytest.approx(4 * 2 * 128 * 128 * 128 / 1e9)


@pytest.mark.parametrize("spoil", [lambda x: x + 0.1, lambda x: x.index_fill(1, torch.tensor([7]), torch.nan)])
def test_a_wrong_rung_is_not_timed(spoil: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> None:
    step = climb(STEP, lambda: lambda: spoil(standard(*tensors)), tensors, Stopwatch(torch.device("cpu"), flush=False))

    assert step.ms is None
    assert step.wrong
    assert step.reason is not None
    assert step.reason.startswith("wrong: ")


def test_a_rung_that_fails_says_why(tensors: list[Tensor], watch: Stopwatch) -> None:
    def prepare() -> Callable[[], Tensor]:
        raise RuntimeError("no such kernel")

    step = climb(STEP, prepare, tensors, watch)

    assert (step.wrong, step.reason) == (True, "RuntimeError: no such kernel")


def test_errors_are_the_worst_heads(tensors: list[Tensor]) -> None:
    out = standard(*tensors).clone()
    out[1, 5, 7] += 1.0

    q, k, v = tensors
    ours, theirs = errors(q, k, v, out)

    assert ours == pytest.approx(1.0, abs=0.05)
    assert 0 < theirs < 0.05


def test_the_table_shows_shares_of_the_best_rung_and_reasons() -> None:
    steps = [
        replace(STEP, name="slow", ms=4.0, scores_bytes=10**9),
        replace(STEP, name="fast", ms=1.0),
        replace(STEP, name="absent", reason="needs sm_90a only"),
        replace(STEP, name=ladder.PRODUCT, ms=0.5),
    ]

    lines = table(steps).splitlines()

    assert "25.0%" in lines[2]
    assert "1.00 GB" in lines[2]
    assert "100.0%" in lines[3]
    assert "needs sm_90a only" in lines[4]
    assert "200.0%" in lines[5]


def test_the_error_of_nan_is_infinite() -> None:
    assert ladder.largest_error(torch.tensor([1.0, math.nan]), torch.zeros(2, dtype=torch.float64)) == math.inf


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--seqlen", "100"], 2)])
def test_without_a_gpu_or_with_a_wrong_length_the_script_stops(arguments: list[str], code: int) -> None:
    app = Typer()
    app.command()(ladder.main)

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == code
    assert "no NVIDIA GPU" in result.output or "multiple of 128" in result.output


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
@pytest.mark.parametrize("seqlen", [128, 640])
def test_a_rung_is_right_on_the_gpu(rung: Rung, seqlen: int) -> None:
    if not rung.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"needs {rung.arch}")
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.randn(3, seqlen, 128, dtype=torch.bfloat16, device=device) for _ in range(3)]

    step = ladder.climb_rung(rung, tensors, OneMillisecond(device, flush=False))

    assert (step.reason, step.wrong) == (None, False)
