"""On a GPU the served greedy tokens are transformers' own too: the whole way over HTTP, float32, eager attention."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks import model_folder

from .server_process import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NEW_TOKENS = 24
PROMPTS = [[3 + (7 * i + 11 * n) % 500 for i in range(n)] for n in (1, 5, 64, 65, 130, 700, 1500, 40)]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, wide enough apart that greedy choices are no near-ties."""
    path = model_folder.write(tmp_path_factory.mktemp("llama"), **SHAPE)
    torch.manual_seed(0)
    config = LlamaForCausalLM.config_class.from_pretrained(path)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """Steps so small that the long prompts take several, with nothing to sample in all but the last."""
    flags = ("--model", str(folder), "--dtype", "float32", "--max-num-batched-tokens", "256", "--max-num-seqs", "16")
    with ServerProcess(*flags, device="cuda") as process:
        yield process


def served(server: ServerProcess, folder: Path, prompt: list[int]) -> str:
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    text = reply.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def test_greedy_tokens_alone_and_at_once_are_those_of_eager_generate(server: ServerProcess, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to("cuda")
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in PROMPTS:
        tokens = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(" ".join(f"t{token}" for token in tokens[0, len(prompt) :].tolist()))

    alone = [served(server, folder, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: served(server, folder, prompt), PROMPTS))

    assert [text.strip() for text in alone] == expected
    assert together == alone
    assert server.metrics()["longwave:attention_kernel_calls_total"] > 0
