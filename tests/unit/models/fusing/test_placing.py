"""Weights that we read ourselves make the model that transformers makes of the same files, to the bit."""

from pathlib import Path

import pytest
import torch
from fused_models import CONFIGS
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from models import patching
from models.fusing import fuse
from models.loader import load
from models.placing import place
from models.registry import ModelSource
from models.stored_weights import readable
from models.weight_reading import WeightReading

CPU = torch.device("cpu")
TIED = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "tie_word_embeddings": True})


def save(folder: Path, config: PretrainedConfig, *, shard: str = "50GB") -> PretrainedConfig:
    """Random bfloat16 weights, norms too. Returns the config as it is read again."""
    patching.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return type(config).from_pretrained(folder)


def read(folder: Path) -> WeightReading:
    tensors = readable(folder)
    assert tensors is not None
    return WeightReading(tensors, CPU)


def placed(folder: Path, config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel | None:
    return place(read(folder).finish(), config, dtype, CPU, patching.LONGWAVE_PAGED)


@pytest.mark.parametrize("name", [*CONFIGS, "tied"])
def test_placed_weights_are_the_model_that_transformers_loads(tmp_path: Path, name: str) -> None:
    config = save(tmp_path, TIED if name == "tied" else CONFIGS[name], shard="60KB")
    ours = placed(tmp_path, config)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation=patching.LONGWAVE_PAGED
    )
    assert ours is not None
    assert (type(ours), ours.dtype, ours.device) == (type(theirs), theirs.dtype, theirs.device)
    expected = theirs.state_dict()
    assert {name: tensor.dtype for name, tensor in ours.state_dict().items()} == {
        n: t.dtype for n, t in expected.items()
    }
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
    buffers = dict(ours.named_buffers())
    assert buffers.keys() == dict(theirs.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in theirs.named_buffers())
    assert len(set(ours.parameters())) == len(set(theirs.parameters()))  # tied or not
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        for model in (ours, theirs):
            model.set_attn_implementation("eager")
        assert torch.equal(ours.eval()(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "gemma2"])
def test_what_is_fused_lies_together_already(tmp_path: Path, name: str) -> None:
    model = placed(tmp_path, save(tmp_path, CONFIGS[name]))
    assert model is not None
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fuse(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    layer = model.model.layers[0].self_attn
    q, k = layer.q_proj.weight, layer.k_proj.weight
    assert k.data_ptr() == q.data_ptr() + q.numel() * q.element_size()


def test_what_is_not_exactly_the_models_is_left_to_transformers(tmp_path: Path) -> None:
    config = save(tmp_path, CONFIGS["llama"])
    assert placed(tmp_path, config, torch.float16) is None
    tensors = read(tmp_path).finish()
    for changed in (
        {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
        {**tensors, "model.another.weight": torch.zeros(3)},
        {**tensors, "model.norm.weight": torch.zeros(3, dtype=torch.bfloat16)},
    ):
        assert place(changed, config, torch.bfloat16, CPU, patching.LONGWAVE_PAGED) is None
    other = GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4)
    assert place(tensors, other, torch.bfloat16, CPU, patching.LONGWAVE_PAGED) is None


def test_a_tied_head_that_was_stored_is_left_to_transformers(tmp_path: Path) -> None:
    config = save(tmp_path, TIED)
    tensors = read(tmp_path).finish()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    assert place(tensors, config, torch.bfloat16, CPU, patching.LONGWAVE_PAGED) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_reading_changes_nothing_of_what_is_loaded(tmp_path: Path, dtype: str) -> None:
    """float32 is a cast, which transformers makes from the files."""
    save(tmp_path, CONFIGS["llama"])
    source = ModelSource("tiny", folder=tmp_path)
    ours = load(source, dtype=dtype, reading=read(tmp_path))  # type: ignore[arg-type]
    theirs = load(source, dtype=dtype)  # type: ignore[arg-type]
    assert ours.dtype == theirs.dtype == getattr(torch, dtype)
    expected = theirs.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in ours.model.parameters())
