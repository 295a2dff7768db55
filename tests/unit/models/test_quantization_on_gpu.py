"""On a GPU: quantised checkpoints pass the self-test, are recorded in CUDA graphs, and answer as without graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import fp8, mxfp4, quantized
from test_quantization import KEPT
from tiny_models import tiny_config

from models.batch import SamplingParams, ScheduledSeq, StepBatch
from models.loader import load
from models.registry import ModelSource
from models.runner import ModelRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

_SIZES = {"hidden_size": 256, "intermediate_size": 512}  # heads of 64, rows that every 8-bit product takes
_PROMPT = list(range(3, 23))


def _answer(source: ModelSource, *, graphs: bool) -> list[int]:
    """Eight greedy tokens."""
    loaded = load(source, device="cuda:0")
    runner = ModelRunner(
        loaded,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_blocks=9,
        enforce_eager=not (graphs and loaded.capturable),
    )
    runner.warm_up()
    runner.add_request(0, SamplingParams(temperature=0.0), _PROMPT)
    tokens, computed, given = [], 0, _PROMPT
    for _ in range(8):
        out = runner.execute(StepBatch((ScheduledSeq(0, given, computed, [1, 2, 3], sample=True),)))
        computed, given = computed + len(given), list(out.token_ids[:1])
        tokens += given
    return tokens


@pytest.mark.parametrize("write", [fp8, mxfp4])
def test_dequantised_weights_answer_the_same_with_graphs(tmp_path: Path, write: Callable[..., Any]) -> None:
    source, _meant = write(tmp_path, tiny_config(**_SIZES)) if write is fp8 else write(tmp_path)
    assert _answer(source, graphs=True) == _answer(source, graphs=False)


@pytest.mark.parametrize(("config", "name", "kind"), KEPT)
def test_quantised_layers_answer_the_same_with_graphs(
    tmp_path: Path, config: Callable[[str], Any], name: str, kind: str
) -> None:
    source = quantized(tmp_path, config(name), config=tiny_config(**_SIZES))
    assert _answer(source, graphs=True) == _answer(source, graphs=False)
