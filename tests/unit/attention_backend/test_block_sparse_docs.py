"""Every code block of docs/block_sparse.md runs, and what its table of patterns names exists."""

import re
from pathlib import Path

import pytest

from attention_backend import block_patterns

PAGE = (Path(__file__).parents[3] / "docs" / "block_sparse.md").read_text()


def test_every_code_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"block_sparse.md, block {number}", "exec"), {})
    assert 0.0 < float(capsys.readouterr().out) < 0.5


def test_patterns_of_the_tables_exist() -> None:
    rows = re.findall(r"^\| (`[a-z_]+\(.*?) \|", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)\(", row)} - {"mask_mod"}  # FlexAttention's
    assert {"sliding_window", "dilated_window", "prefix_lm", "documents"} <= named
    assert not [name for name in named if not callable(getattr(block_patterns, name, None))]
