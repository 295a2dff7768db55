"""Every code block of docs/training.md runs, in order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "training.md"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own call
def test_every_code_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert " 40 of 40  loss 0." in printed
    assert "result ['adapter_config.json', 'adapter_model.safetensors', 'manifest.json']" in printed
    assert "the same bits: True" in printed
