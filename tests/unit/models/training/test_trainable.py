"""What a run trains: PEFT's modules in the family's own model, saved as PEFT and transformers read it."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from quantized_folders import fp8
from training_runs import SIZES, random_examples, tiny_plan, write_model
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Glm4MoeConfig,
    GPT2Config,
    GraniteConfig,
    JetMoeConfig,
    Llama4TextConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
)

from models import registry
from models.adapters import AdapterSlots, LoraLimits, find_linears
from models.loader import load
from models.patching import UnsupportedModelError
from models.runner import ModelRunner
from models.training import LoraSettings, PlanError
from models.training.packing import build
from models.training.self_check import check_packed_path
from models.training.trainable import TrainableModel

CPU = torch.device("cpu")
DECODER = {name: size for name, size in SIZES.items() if name not in ("bos_token_id", "eos_token_id")}
FAMILIES = {
    "gemma2": Gemma2Config(**DECODER, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "granite": GraniteConfig(**DECODER, logits_scaling=4.0, residual_multiplier=0.5),
    "cohere2": Cohere2Config(**DECODER, logit_scale=0.25, sliding_window=8),
    "mistral": MistralConfig(**DECODER, sliding_window=8),
    "qwen3": Qwen3Config(**DECODER, head_dim=16),
    "gpt2": GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=256),  # Conv1D for linears
}


def trainable(folder: Path, **changes: Any) -> TrainableModel:
    plan = tiny_plan(folder, **changes)
    return TrainableModel(plan, registry.resolve(plan.model), CPU)


def stir(model: TrainableModel) -> None:
    """As after some training: B is no longer 0."""
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.1)


def test_lora_trains_its_own_parameters_of_every_linear_of_the_layers(tiny_folder: Path) -> None:
    model = trainable(tiny_folder)
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert model.adapter is not None
    assert model.adapter.peft_config["default"].target_modules == linears  # type: ignore[attr-defined]
    assert len(model.parameters) == 2 * 2 * len(linears)
    assert all("lora_" in name for name in model.parameters)


def test_chosen_targets_alone_are_trained(tiny_folder: Path) -> None:
    model = trainable(tiny_folder, lora=LoraSettings(4, 8, target_modules=("v_proj", "q_proj")))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in model.parameters} == {"q_proj", "v_proj"}


def test_targets_that_the_layers_do_not_have_are_refused_with_those_they_have(tiny_folder: Path) -> None:
    with pytest.raises(PlanError, match=r"no linear lm_head, qkv that LoRA could adapt; they have down_proj"):
        trainable(tiny_folder, lora=LoraSettings(4, 8, target_modules=("qkv", "q_proj", "lm_head")))


def test_a_quantised_model_is_not_tuned_whole_though_its_weights_are_dequantised(tmp_path: Path) -> None:
    """What transformers saves of one has names of weights and of their scales mixed up."""
    source, _ = fp8(tmp_path)
    assert source.folder is not None
    with pytest.raises(PlanError, match="the base model is quantised: not all of its weights can be trained"):
        trainable(source.folder, lora=None)


def test_full_tuning_trains_every_parameter(tiny_folder: Path) -> None:
    model = trainable(tiny_folder, lora=None)
    assert set(model.parameters) == {name for name, _ in model.base.named_parameters()}


def test_the_same_seed_starts_with_the_same_adapter_and_leaves_torch_s_generator_alone(tiny_folder: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, second, other = (trainable(tiny_folder, seed=seed).parameters for seed in (3, 3, 4))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, second[name]) for name, p in first.items())
    assert any(not torch.equal(p, other[name]) for name, p in first.items())


LONGROPE = Phi3Config(
    **DECODER, original_max_position_embeddings=16,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    },
)  # fmt: skip


@pytest.mark.parametrize("max_model_len", [None, 16, 17, 256])
@pytest.mark.parametrize("max_length", [8, 64])
def test_longrope_has_the_factors_that_the_engine_serves_with(
    max_model_len: int | None, max_length: int, tmp_path: Path
) -> None:
    """Whatever the longest example has."""
    folder = write_model(tmp_path, LONGROPE)
    model = trainable(folder, max_length=max_length, max_model_len=max_model_len)
    served = load(registry.resolve(str(folder)))
    limit = max_model_len or served.max_position_embeddings
    ModelRunner(
        served, block_size=16, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=limit, num_blocks=20
    )  # fmt: skip
    theirs: Any = served.model
    ours: Any = model.base
    assert torch.equal(ours.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)


def test_more_tokens_than_positions_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(PlanError, match="max_length 300 is more than the 256 positions"):
        trainable(tiny_folder, max_length=300, micro_batch_tokens=300)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own call
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_adapter_gives_peft_the_same_logits(tiny_folder: Path, tmp_path: Path, dtype: Any) -> None:
    model = trainable(tiny_folder, dtype=dtype)
    stir(model)
    model.save_adapter(tmp_path)
    batch = build(random_examples(1, longest=20), (0,), CPU)
    with model.evaluating():
        ours = model.head(model.hidden(batch))

    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    # Without autocast_adapter_dtype=False PEFT computes the adapter's part in float32.
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        theirs = loaded(input_ids=batch.input_ids, use_cache=False).logits[0]
        with loaded.disable_adapter():
            plain = loaded(input_ids=batch.input_ids, use_cache=False).logits[0]

    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == "float32" else {"atol": 0.25, "rtol": 0.05}
    torch.testing.assert_close(ours, theirs, **tolerance)
    assert not torch.allclose(ours, plain, **tolerance)


def test_the_adapter_s_files_are_the_same_bytes_every_time(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        trainable(tiny_folder).save_adapter(tmp_path / name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_folder)
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (4, 8, True)
    assert config["target_modules"] == sorted(config["target_modules"])


def test_a_fully_tuned_model_is_a_hugging_face_folder_with_its_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny_folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    model = trainable(source, lora=None)
    stir(model)
    result = tmp_path / "result"
    result.mkdir()
    model.save_result(result)
    loaded = AutoModelForCausalLM.from_pretrained(result)
    for name, parameter in model.base.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert (result / "tokenizer.json").read_text() == "{}"
    assert (result / "chat_template.jinja").read_text() == "{{ messages }}"
    model.save_result(result, "{{ 'another' }}")
    assert (result / "chat_template.jinja").read_text() == "{{ 'another' }}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_families_pass_the_check_with_their_own_heads_and_windows(name: str, lora: bool, tmp_path: Path) -> None:
    model = trainable(write_model(tmp_path, FAMILIES[name]), **({} if lora else {"lora": None}))
    check_packed_path(model)
    assert model.base.training


@pytest.mark.parametrize("field", ["_softcap", "_scale"])
def test_a_head_that_computes_something_else_is_found_out(field: str, tmp_path: Path) -> None:
    model = trainable(write_model(tmp_path, FAMILIES["gemma2"]))
    setattr(model.head, field, 3.0)
    with pytest.raises(UnsupportedModelError, match="fails the self-test: packed for training"):
        check_packed_path(model)


def test_routers_and_experts_keep_their_weights(tmp_path: Path) -> None:
    config = Llama4TextConfig(
        **DECODER,
        head_dim=16,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=16,
        no_rope_layers=[1, 0],
        floor_scale=7,  # of a packed row's tokens, the check tells apart which are the eighth of their sequences
        attn_scale=1.0,
    )
    model = trainable(write_model(tmp_path, config))
    assert model.parameters
    assert not [name for name in model.parameters if ".experts." in name or "router" in name]
    assert [name for name in model.parameters if ".shared_expert." in name]
    check_packed_path(model)


def test_what_peft_means_experts_by_is_no_target(tmp_path: Path) -> None:
    """It would train parameters of experts in the place of the dense layer and the shared expert of these names."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = Glm4MoeConfig(**DECODER, **sizes, n_group=1, topk_group=1, first_k_dense_replace=1)
    folder = write_model(tmp_path / "model", config)
    model = trainable(folder)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in model.parameters}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    check_packed_path(model)
    (tmp_path / "adapter").mkdir()
    model.save_adapter(tmp_path / "adapter")
    limits = LoraLimits(max_loras=1, max_lora_rank=8)
    linears = find_linears(trainable(folder, lora=None).base)
    slots = AdapterSlots(linears, limits, max_num_batched_tokens=8, dtype=torch.float32, device=CPU)
    assert slots.read(7, str(tmp_path / "adapter")).num_layers == 8
    for wanted in ("down_proj", "gate_proj"):
        with pytest.raises(PlanError, match=f"no linear {wanted} that LoRA could adapt; they have k_proj, o_proj"):
            trainable(folder, lora=LoraSettings(4, 8, target_modules=(wanted,)))


def test_a_family_that_recomputes_no_layers_keeps_them_and_its_routers(tmp_path: Path) -> None:
    config = JetMoeConfig(**DECODER, kv_channels=16, num_local_experts=3, num_experts_per_tok=2)
    model = trainable(write_model(tmp_path, config))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in model.parameters} == {"kv_proj"}
    check_packed_path(model)
    model.logprobs(build(random_examples(3), (0, 1, 2), CPU))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters.values())


def test_the_engine_s_slots_give_the_trained_logits(tiny_folder: Path, tmp_path: Path) -> None:
    model = trainable(tiny_folder)
    stir(model)
    model.save_adapter(tmp_path)
    batch = build(random_examples(3), (0, 1, 2), CPU)
    with model.evaluating():
        expected = model.head(model.hidden(batch))

    served = trainable(tiny_folder, lora=None)
    slots = AdapterSlots(
        find_linears(served.base),
        LoraLimits(max_loras=2, max_lora_rank=8),
        max_num_batched_tokens=256,
        dtype=torch.float32,
        device=CPU,
    )
    slots.read(7, str(tmp_path))
    slots.place(7, slot=1)
    slots.select(torch.ones(batch.tokens, dtype=torch.int32), num_slots=2)
    with served.evaluating():
        torch.testing.assert_close(served.head(served.hidden(batch)), expected, atol=1e-4, rtol=1e-4)
