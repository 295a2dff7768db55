"""torch.compile sees through the patched attention, and registering changes nothing else of transformers."""

import subprocess
import sys

import pytest
import torch
from paged_steps import PAGE, pages
from patching_families import BY_NAME, padding, tokens
from transformers import AttentionInterface, AttentionMaskInterface

from attention_backend import PagedMetadata
from models import patch
from models.patching import LONGWAVE, LONGWAVE_PAGED, register


@pytest.mark.parametrize(("name", "fullgraph"), [("llama", True), ("gemma3", False)])
def test_a_compiled_forward_equals_the_eager_one(name: str, fullgraph: bool) -> None:
    model = BY_NAME[name].build("longwave")
    ids, mask = tokens(2, 24), padding(2, 24, "left")
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        actual = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_an_engine_step_compiles_as_one_graph(name: str) -> None:
    """A decode at position 2 beside a prompt of six tokens."""
    model = BY_NAME[name].build("longwave_paged")
    caches = pages(model, torch.device("cpu"))
    for cache in (tensor for pair in caches for tensor in pair):
        cache[0] = 0.5  # the decoding request's first tokens
    metadata = PagedMetadata(
        cu_seqlens_q=torch.tensor([0, 1, 7], dtype=torch.int32),
        seq_lens=torch.tensor([3, 6], dtype=torch.int32),
        block_table=torch.tensor([[0], [1]], dtype=torch.int32),
        slot_mapping=torch.tensor([2, *range(PAGE, PAGE + 6)]),
        num_decodes=1,
        max_seqlen_q=6,
        max_seqlen_k=6,
    )
    step = {
        "input_ids": tokens(1, 7),
        "position_ids": torch.tensor([[2, 0, 1, 2, 3, 4, 5]]),
        "use_cache": False,
        "paged_metadata": metadata,
        "kv_caches": caches,
    }
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(**step).logits
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(**step).logits
    torch.testing.assert_close(actual, expected)


def test_registering_twice_changes_nothing() -> None:
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    register()
    patch()
    assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)


def test_padding_has_a_mask_function_and_the_engine_has_none() -> None:
    assert LONGWAVE in AttentionMaskInterface._global_mapping
    assert LONGWAVE_PAGED not in AttentionMaskInterface._global_mapping


def test_importing_models_is_light() -> None:
    program = "import sys, models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
