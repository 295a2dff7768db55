"""`longwave doctor` on adapters: what their slots cost, and what is wrong with a folder before a server is started."""

import json
import warnings
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from server.adapter_report import report
from server.cli import app
from server.engine.config import EngineConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights: the report needs none. In it, an adapter."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    config.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of transformers
        adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        adapted.save_pretrained(str(folder / "adapter"))
    return folder


def test_slots_and_adapters_are_described_and_wrong_ones_are_problems(model: Path) -> None:
    config = EngineConfig(model=str(model), enable_lora=True, max_loras=2, max_lora_rank=8)
    problems: list[str] = []
    lines = report(config, {"good": model / "adapter", "bad": model / "nowhere"}, problems)
    numbers = 2 * 8 * 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))  # slots, rank, layers, linears
    assert lines["LoRA"] == f"2 slots of rank 8 on 14 linear layers: {numbers * 4 / 2**20:.1f} MiB"
    assert lines["adapter good"].startswith("rank 8, 4 layers, SHA-256 ")
    assert problems == [f"The adapter bad cannot be served: there is no folder {model / 'nowhere'}."]


def test_without_lora_that_is_all_there_is_to_say(model: Path) -> None:
    assert report(EngineConfig(model=str(model)), {}, []) == {"LoRA": "not served"}


def test_the_doctor_prints_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGWAVE_ENABLE_LORA", "true")
    monkeypatch.setenv("LONGWAVE_LORA_MODULES", f"good={model / 'adapter'},bad={model}")
    result = CliRunner().invoke(app, ["doctor", "--json", "--model", str(model)])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["adapters"]["adapter good"].startswith("rank 8")
    assert any(problem.startswith("The adapter bad cannot be served") for problem in said["problems"])
    text = CliRunner().invoke(app, ["doctor", "--model", str(model)]).stdout
    assert "adapter good" in text
    assert "4 slots of rank 16 on 14 linear layers" in text
