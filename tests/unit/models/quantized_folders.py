"""Small quantised checkpoints, as their methods' own tools write them, or by hand in the layout of published ones."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig

from models.registry import ModelSource

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def unquantized(folder: Path, config: PretrainedConfig | None = None, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Weights large enough that every mistake shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or tiny_config(intermediate_size=128), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def quantized(
    folder: Path, settings: Any, dtype: torch.dtype = torch.bfloat16, config: PretrainedConfig | None = None
) -> ModelSource:
    """By transformers, with a quantisation config of its."""
    plain = unquantized(folder / "plain", config, dtype)
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=dtype, device_map={"": torch.device("cpu")}, quantization_config=settings
    )
    model.save_pretrained(folder)
    return ModelSource(name="quantised", folder=folder)


def fp8(folder: Path, config: PretrainedConfig | None = None) -> tuple[ModelSource, dict[str, Tensor]]:
    """DeepSeek's layout: float8 weights, a float32 scale for each block. The weights that it means come along."""
    unquantized(folder, config)
    stored, meant, size = {}, {}, 32
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        meant[name] = weight.float()
        if "proj" in name:
            blocks = weight.float().unflatten(1, (-1, size)).unflatten(0, (-1, size))
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).float()
            meant[name] = (codes * scale[:, None, :, None]).reshape(weight.shape)
            stored[name] = codes.reshape(weight.shape).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [size, size]}
    return _write(folder, stored, settings), meant


def auto_fp8(folder: Path) -> ModelSource:
    """AutoFP8's layout, which no method of transformers reads: one scale a tensor, under another name than fp8's."""
    unquantized(folder)
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        if "proj" in name:
            scale = weight.float().abs().max() / 448
            stored[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            stored |= {f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": torch.tensor(0.02)}
    return _write(folder, stored, {"quant_method": "fp8", "activation_scheme": "static"})


def mxfp4(folder: Path) -> tuple[ModelSource, dict[str, Tensor]]:
    """gpt-oss's layout: experts in two 4-bit codes a byte, a power of two for each 32. The weights come along."""
    config = GptOssConfig(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    unquantized(folder, config)
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name], meant[name] = weight, weight.float()
        if "experts" in name and not name.endswith("bias"):
            experts, rows, columns = weight.shape
            shape = (experts, columns, rows // 32)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
            codes = torch.stack([_FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
            values = codes * (scales.float() - 127).exp2()[..., None]
            meant[name] = values.flatten(-2).transpose(1, 2)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}
    return _write(folder, stored, settings), meant


def compressed_int8(folder: Path) -> tuple[ModelSource, dict[str, Tensor]]:
    """compressed-tensors' `int-quantized`: int8 weights, a scale for each row; activations would be rounded too."""
    unquantized(folder)
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name], meant[name] = weight, weight.float()
        if "proj" in name:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
            codes = (weight.float() / scale.float()).round().clamp(-128, 127)
            stored[name], meant[name] = codes.to(torch.int8), codes * scale.float()
            stored[f"{name}_scale"] = scale
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel"},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return _write(folder, stored, settings), meant


def say_quantized(folder: Path, settings: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


def _write(folder: Path, stored: dict[str, Tensor], settings: dict[str, Any]) -> ModelSource:
    whole = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    say_quantized(folder, settings)
    return ModelSource(name="quantised", folder=folder)
