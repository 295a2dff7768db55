"""Writes a model folder: a Llama-shaped config.json, a tokenizer whose words are its token ids, random weights.

Time and memory of a real shape need no real weights, and with `--load-format dummy` none at all. Knows no server.
"""

import json
from pathlib import Path
from typing import Any

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}

#: What a CPU runs in seconds, to try a script.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def write(folder: Path, **changes: Any) -> Path:
    """A folder with the shape of Llama-3.1-8B, with the config fields in `changes` replaced."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = {**LLAMA_3_1_8B, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    vocabulary = {f"t{i}": i for i in range(config["vocab_size"]) if i not in (1, 2)} | {"<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder


def write_weights(folder: Path, *, shards: int = 4, device: str = "cpu") -> None:
    """Random bfloat16 weights of the folder's config into so many *.safetensors, in the order of their names: what is
    read is as large as a real model, and in as many files."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    names = sorted(shapes)
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {}
        for name in names[len(names) * number // shards : len(names) * (number + 1) // shards]:
            shape = shapes[name].shape
            weight = torch.ones(shape) if len(shape) == 1 else torch.empty(shape, dtype=torch.bfloat16, device=device)
            if len(shape) > 1:
                weight.normal_(std=config.initializer_range, generator=generator)
            part[name] = weight.bfloat16().cpu()
            index[name] = file
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
