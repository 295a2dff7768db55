"""The base model of the training process is the one that the engine serves: its LongRoPE has the engine's factors."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.training.messages import Arguments, Unable

ORIGINAL, POSITIONS = 16, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Phi3Config, Phi3ForCausalLM

    from models.progress_bars import without_progress_bars

    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": ORIGINAL,
    }  # fmt: skip
    config = Phi3Config(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=POSITIONS, rope_parameters=rope,
        original_max_position_embeddings=ORIGINAL,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("phi3")
    with without_progress_bars():
        Phi3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("max_model_len", "factor"), [(ORIGINAL, 1.0), (ORIGINAL + 1, 4.0), (None, 4.0)])
@pytest.mark.parametrize("max_length", [None, 8])
def test_longrope_follows_the_engine_s_length_and_not_that_of_the_data(
    folder: Path, max_model_len: int | None, factor: float, max_length: int | None
) -> None:
    from server.training.worker import load

    arguments = Arguments(str(folder), "cpu", None, None, max_length, max_model_len, 64, os.getpid(), 20)
    session = load(arguments)
    assert session.settings.max_length == (max_length or POSITIONS)
    base: Any = session._base.base
    assert base.model.rotary_emb.inv_freq[0] == 1 / factor


def test_a_base_model_that_does_not_fit_is_told_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server.training import worker

    said: list[Any] = []
    link: Any = SimpleNamespace(send=said.append, receive=lambda: pytest.fail("it serves"))
    real = torch.nn.Module.to

    def no_room(module: Any, *given: Any, **options: Any) -> Any:
        if given and given[0] == torch.device("cpu"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(module, *given, **options)

    monkeypatch.setattr(torch.nn.Module, "to", no_room)
    worker.serve(Arguments(str(folder), "cpu", None, None, None, None, 64, os.getpid(), 20), link)
    assert said == [
        Unable(
            "The base model cannot be loaded for training: cpu has too little memory for the base model beside what "
            "else is in it"
        )
    ]
