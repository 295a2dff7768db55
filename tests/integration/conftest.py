"""Servers that many tests share, one process each for the whole session, and the truth to compare with."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import save_file

from .eager_answers import EagerAnswers
from .server_process import ServerProcess

MAX_MODEL_LEN = 1024
#: Small steps and a small pool: servers share two cores and start quickly.
SMALL = ("--dtype", "float32", "--max-num-seqs", "32", "--max-num-batched-tokens", "256")
KEY = "sk-integration-0123456789"
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


@pytest.fixture(scope="session")
def server(bundled_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS) as process:
        yield process
        process.terminate()
        assert process.wait() == 0, "an idle server exits with 0, whatever it has answered"


@pytest.fixture(scope="session")
def chunking_server(bundled_model: Path) -> Iterator[ServerProcess]:
    """Every prompt takes several steps, mixed with others' decode rows; no prefix is ever reused. It wants KEY."""
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "24")
    with ServerProcess(*FLAGS, *limits, "--no-enable-prefix-caching", api_key=KEY) as process:
        yield process


@pytest.fixture(scope="session")
def tight_server(bundled_model: Path) -> Iterator[ServerProcess]:
    """KV blocks for about three of the tests' requests: running ones are preempted and recomputed."""
    pool = ("--block-size", "16", "--num-gpu-blocks-override", "30")
    with ServerProcess(*SMALL, "--max-model-len", "320", *pool) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
