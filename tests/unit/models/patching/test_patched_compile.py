"""torch.compile sees through the patched attention, and registering changes nothing else of transformers."""

import subprocess
import sys

import pytest
import torch
from patching_families import BY_NAME, padding, tokens
from transformers import AttentionInterface, AttentionMaskInterface

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
