"""Every code block of docs/huggingface.md runs, in order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "huggingface.md"


def test_every_code_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "bloom: " in printed
    assert "output_attentions=True" in printed
