"""What full fine-tuning asks of a model and a device is known before anything is loaded."""

import json
from pathlib import Path

import pytest
import torch
from training_runs import write_model
from transformers import AutoModelForCausalLM, LlamaConfig

from models import registry
from models.errors import ModelLoadError
from models.training import LoraSettings, ModelTooLargeError, PlanError, TrainingPlan
from models.training import size as size_of_models
from models.training.size import check_memory, check_size, num_parameters
from models.training.trainable import TrainableModel

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_learn(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert num_parameters(registry.resolve(str(folder))) == sum(weight.numel() for weight in model.parameters())


def test_a_model_in_several_files_is_counted_whole(tiny_folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert num_parameters(registry.resolve(str(tmp_path))) == num_parameters(registry.resolve(str(tiny_folder)))


def test_weights_that_are_not_whole_cannot_be_counted(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    source = registry.resolve(str(tmp_path))
    with pytest.raises(ModelLoadError, match="no whole"):
        num_parameters(source)
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="no whole"):
        num_parameters(source)


def test_models_above_the_limit_are_refused(tiny_folder: Path) -> None:
    source = registry.resolve(str(tiny_folder))
    most = num_parameters(source)
    check_size(source, most)
    with pytest.raises(PlanError, match=f"has {most} parameters; models of up to {most - 1} are fully tuned here"):
        check_size(source, most - 1)


def test_quantised_models_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(quantization_config={"quant_method": "fp8"}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="the base model is quantised"):
        check_size(registry.resolve(str(tmp_path)), 10**12)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 16), ("bfloat16", 18)])
def test_memory_for_weights_gradients_and_moments_has_to_be_free(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bytes_each: int
) -> None:
    source = registry.resolve(str(tiny_folder))
    parameters = num_parameters(source)
    monkeypatch.setattr(size_of_models, "available_memory_bytes", lambda: bytes_each * parameters)
    check_memory(source, CPU, dtype)
    monkeypatch.setattr(size_of_models, "available_memory_bytes", lambda: bytes_each * parameters - 1)
    with pytest.raises(ModelTooLargeError, match=f"Full fine-tuning of {parameters} parameters keeps .* cpu has"):
        check_memory(source, CPU, dtype)


def test_a_gpu_s_free_memory_counts_there(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = registry.resolve(str(tiny_folder))
    free, host = [18 * num_parameters(source)], [12 * num_parameters(source)]
    monkeypatch.setattr(size_of_models, "available_memory_bytes", lambda: host[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 10**12))
    check_memory(source, torch.device("cuda"), "bfloat16")
    free[0] -= 1
    with pytest.raises(ModelTooLargeError, match="cuda has"):
        check_memory(source, torch.device("cuda"), "bfloat16")
    free[0], host[0] = free[0] + 1, host[0] - 1
    with pytest.raises(ModelTooLargeError, match=r"A checkpoint of .* of host memory while it is written"):
        check_memory(source, torch.device("cuda"), "bfloat16")


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4)], ids=["full", "lora"])
def test_a_model_is_not_loaded_into_too_little_memory_where_all_of_it_learns(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraSettings | None
) -> None:
    monkeypatch.setattr(size_of_models, "available_memory_bytes", lambda: 1000)
    plan = TrainingPlan(str(tiny_folder), lora=lora, max_length=64, micro_batch_tokens=64)
    if lora is not None:
        TrainableModel(plan, registry.resolve(str(tiny_folder)), CPU)
        return
    with pytest.raises(ModelTooLargeError):
        TrainableModel(plan, registry.resolve(str(tiny_folder)), CPU)
