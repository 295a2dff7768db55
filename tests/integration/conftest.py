"""Models, flags of small servers, and the truth to compare with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .eager_answers import EagerAnswers

MAX_MODEL_LEN = 1024
#: Small steps and a small pool: servers share two cores and start quickly.
SMALL = ("--dtype", "float32", "--max-num-seqs", "32", "--max-num-batched-tokens", "256")
FLAGS = (*SMALL, "--kv-cache-memory-bytes", str(400 << 20), "--max-model-len", str(MAX_MODEL_LEN))


@pytest.fixture(scope="session")
def eager(bundled_model: Path) -> EagerAnswers:
    return EagerAnswers(bundled_model)


@pytest.fixture(scope="session")
def little_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that knows nothing and costs nothing: the bundled one's tokenizer and family, two layers of
    random weights."""
    folder = tmp_path_factory.mktemp("models") / "little"
    shutil.copytree(bundled_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    hidden, inner, head, heads, kv_heads = 128, 256, 32, 4, 2
    sizes = {
        "hidden_size": hidden, "intermediate_size": inner, "head_dim": head, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text()) | sizes
    assert (config["model_type"], config["tie_word_embeddings"]) == ("llama", True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (heads * head, hidden), "self_attn.o_proj": (hidden, heads * head)}
    shapes |= {f"self_attn.{name}_proj": (kv_heads * head, hidden) for name in "kv"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    random = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=random) / 8}
    for layer in range(sizes["num_hidden_layers"]):
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=random) * shape[1] ** -0.5
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file({**tensors, "model.norm.weight": torch.ones(hidden)}, folder / "model.safetensors", {"format": "pt"})
    return folder
