"""Tiny models, examples and plans to train in a moment."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from models.progress_bars import without_progress_bars
from models.training import Example, LoraSettings, Preference, StepReport, TrainingPlan, Verdict

VOCABULARY = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, config: PretrainedConfig | None = None, **changes: Any) -> Path:
    """A folder of random weights, large enough that positions and neighbours matter."""
    config = config or LlamaConfig(**{**SIZES, **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
    with without_progress_bars():
        model.save_pretrained(folder)
    return folder


def random_example(words: random.Random, length: int) -> Example:
    tokens = tuple(words.randrange(3, VOCABULARY) for _ in range(length))
    return Example(tokens, tuple(place >= length // 2 for place in range(length)))


def random_examples(count: int, seed: int = 0, longest: int = 24) -> list[Example]:
    words = random.Random(seed)
    return [random_example(words, words.randrange(4, longest + 1)) for _ in range(count)]


def random_preferences(count: int, seed: int = 0) -> list[Preference]:
    both = random_examples(2 * count, seed)
    return [Preference(*both[2 * i : 2 * i + 2]) for i in range(count)]


def tiny_plan(model: Path, **changes: Any) -> TrainingPlan:
    fields: dict[str, Any] = {
        "lora": LoraSettings(rank=4, alpha=8),
        "n_epochs": 2,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 32,
        "micro_batch_tokens": 64,
        "checkpoint_every": 2,
    }
    return TrainingPlan(model=str(model), **{**fields, **changes})


class Reports(list[StepReport]):
    """Collects what a run tells, and answers with a verdict after one of its steps."""

    def __init__(self, verdict: Verdict = Verdict.CONTINUE, after: int = 0) -> None:
        super().__init__()
        self._verdict, self._after = verdict, after

    def __call__(self, report: StepReport) -> Verdict:
        self.append(report)
        return self._verdict if report.step == self._after else Verdict.CONTINUE
