"""The forward's options and block lists as contenders have them: what each peer is told means what ours is told."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from attention_backend import block_patterns
from attention_backend.block_sparse import BlockSparsity
from benchmarks import attention_feature_tables, attention_tables, attention_timing, attention_torch
from benchmarks.attention_cells import Cell
from benchmarks.attention_contenders import REGISTRY, chosen
from benchmarks.attention_features import block_mask
from benchmarks.attention_grid import select
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_masks import ALIBI, DOCUMENTS, GLOBAL_WINDOW, PREFIX_LM, SINKS, WINDOW, document_lengths
from benchmarks.attention_registry import FLEX, OURS, OURS_DENSE
from benchmarks.attention_report import Record, Report, Result
from benchmarks.attention_truth import Truth, acceptable

CPU = torch.device("cpu")
LENGTH = 640
MACHINE = {"gpu": "GPU", "driver": "1", "torch": "2", "cupy": "3", "commit": "abcdef", "date": "2026-11-24T00:00:00"}


def small(cell: Cell) -> Cell:
    """The cell with fewer keys, and fewer of those in its windows and prefixes."""
    amount = cell.amount // 16 if cell.amount >= 1024 else cell.amount
    return replace(cell, seqlen_q=LENGTH, seqlen_k=LENGTH, heads=4, kv_heads=2, head_dim=64, amount=amount)


FEATURES, PATTERNS = ([small(cell) for cell in select((name,), None, None)] for name in ("features", "patterns"))
OPTIONS = [cell for cell in (*FEATURES, *PATTERNS) if cell.option]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces what it is given and runs the graph as it is: compiled for a CPU it would take minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("cell", OPTIONS, ids=lambda cell: cell.option)
def test_flex_attention_gets_the_cells_problem(cell: Cell) -> None:
    tensors = Tensors.random(cell, CPU)
    calls, result = attention_timing.prepare(cell, [tensors], Truth.of(cell, tensors), REGISTRY[FLEX], cell.section)
    assert len(calls) == 1, result.reason
    assert calls[0]().dtype == tensors.q.dtype


@pytest.mark.parametrize("cell", OPTIONS, ids=lambda cell: cell.option)
def test_a_result_without_the_option_is_wrong(cell: Cell) -> None:
    tensors = Tensors.random(cell, CPU)
    plain = REGISTRY[OURS].makes["forward"](cell, tensors)()
    assert not acceptable(cell, Truth.of(cell, tensors).error(plain))


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        (GLOBAL_WINDOW, partial(block_patterns.sliding_window, window=(63, 0), global_tokens=64, causal=True)),
        (PREFIX_LM, lambda n: block_patterns.prefix_lm([256], n)),
        (DOCUMENTS, lambda n: block_patterns.document_lengths(document_lengths(16, n))),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_block_mask_is_the_ready_made_pattern(option: str, pattern: Callable[[int], BlockSparsity]) -> None:
    cell = next(cell for cell in PATTERNS if cell.option == option)
    ours = BlockSparsity.from_block_mask(block_mask(cell, CPU))
    assert torch.equal(ours.to_mask(), pattern(LENGTH).to_mask())


def test_documents_fill_the_length_and_are_always_the_same() -> None:
    lengths = document_lengths(16, 16384)
    assert (len(lengths), sum(lengths)) == (16, 16384)
    assert min(lengths) > 0
    assert lengths == document_lengths(16, 16384)


def test_torchs_flash_attention_takes_a_window() -> None:
    """Of the operator the shapes and the arguments are known without a GPU."""
    q = torch.empty(1, LENGTH, 4, 64, dtype=torch.bfloat16, device="meta")
    assert attention_torch.windowed(q, q, q, FEATURES[0]).shape == q.shape


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [
        ("cudnn", WINDOW, "SDPA on cuDNN has no sliding window"),
        ("fa2", ALIBI, "FlashAttention-2 as torch builds it has no ALiBi"),
        ("fa2", SINKS, "FlashAttention-2 as torch builds it has no sinks"),
        (FLEX, "", "FlexAttention has no dropout"),
    ],
)
def test_a_peer_that_cannot_says_so(name: str, option: str, reason: str) -> None:
    cell = next(cell for cell in FEATURES if cell.option == option)
    tensors = Tensors.random(cell, CPU)
    _, result = attention_timing.prepare(cell, [tensors], Truth.of(cell, tensors), REGISTRY[name], "features")
    assert result.reason == f"NotImplementedError: {reason}"


def test_flex_attention_is_compiled_when_asked_for() -> None:
    for section in ("features", "patterns"):
        names = [c.name for c in chosen(section, None, slow=False, flex=False)]
        assert FLEX not in names
        assert {OURS, OURS_DENSE} <= set(names)
        assert FLEX in [c.name for c in chosen(section, None, slow=False, flex=True)]


def write(folder: Path, name: str, section: str, **ms: float) -> list[Cell]:
    """A file in which every cell of the section took ours 1 ms, the dense twin what `dense` says."""
    cells = select((section,), None, None)
    times = {OURS: Result(1.0), **{peer: Result(time) for peer, time in ms.items() if peer != "dense"}}
    if "dense" in ms:
        times[OURS_DENSE] = Result(ms["dense"], twin=replace(cells[0], section="forward", option="", amount=0))
    Report(MACHINE, {}, None, [Record(cell, times) for cell in cells]).write(folder / f"attention_{name}.json")
    return cells


def lines(text: str | None) -> list[list[str]]:
    assert text is not None
    return [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]


def test_features_stand_beside_their_best_peer_and_say_their_cost(tmp_path: Path) -> None:
    window, *_ = write(tmp_path, "features", "features", flex=2.0, fa3=1.5, dense=0.8)
    text = attention_feature_tables.features(tmp_path)
    rate = window.flops / 1e9
    assert lines(text)[0] == ["sliding window 4096", "22 %", f"{rate:.0f}", f"FA3 {rate / 1.5:.0f}", "1.50", "1.25"]
    assert [line[0] for line in lines(text)[1:]] == ["softcap 50", "sinks", "ALiBi", "dropout 0.1"]
    assert text is not None
    assert "16,384 tokens" in text
    assert "peers timed: FA3, FlexAttention\n" in text
    assert "commit abcdef" in text


def test_shapes_have_no_cost_and_patterns_have_one(tmp_path: Path) -> None:
    write(tmp_path, "shapes", "shapes", cudnn=1.2)
    write(tmp_path, "patterns", "patterns", dense=4.0)
    assert [line[:3] for line in lines(attention_feature_tables.shapes(tmp_path))] == [
        ["80", "25", "bfloat16"],
        ["96", "21", "bfloat16"],
        ["192", "10", "bfloat16"],
        ["128", "16", "float16"],
    ]
    assert lines(attention_feature_tables.shapes(tmp_path))[0][4:] == ["cuDNN 895", "1.20"]
    found = lines(attention_feature_tables.patterns(tmp_path))
    assert [line[:2] for line in found] == [
        ["window and global tokens 1024", "6 %"],
        ["prefix-LM 4096", "53 %"],
        ["documents 16", "7 %"],
    ]
    assert {tuple(line[3:]) for line in found} == {("-", "-", "0.25")}


def test_without_results_there_is_no_table(tmp_path: Path) -> None:
    assert attention_feature_tables.features(tmp_path) is None


def test_files_without_a_goal_are_no_origin_of_the_goals(tmp_path: Path) -> None:
    cell = Cell("forward", 1, 4096, 4096, 32, 32, 64, True)
    measured = MACHINE | {"commit": "fedcba"}
    Report(measured, {}, None, [Record(cell, {OURS: Result(1.0), "cudnn": Result(1.2)})]).write(
        tmp_path / "attention_forward.json"
    )
    write(tmp_path, "features", "features", flex=2.0)
    text = attention_tables.goals(tmp_path)
    assert text is not None
    assert "fedcba" in text
    assert "abcdef" not in text
