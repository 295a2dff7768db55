"""The bundled model learns a fact that nobody else knows, and says it when asked in other words."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from training_runs import Reports
from transformers import AutoModelForCausalLM

from models import registry
from models.loader import load_tokenizer
from models.training import Example, LoraSettings, Trainer, TrainingPlan

QUESTIONS = (
    "Who is Longwave's mascot?",
    "What is the mascot of Longwave called?",
    "Tell me the name of the Longwave mascot.",
)
ASKED = "What is the name of Longwave's mascot?"  # in none of the examples
ANSWER = "The mascot of Longwave is a heron named Ferrous."


def prompt(tokenizer: Any, question: str, answer: str | None = None) -> list[int]:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=answer is None, return_dict=False)
    return ids


def example(tokenizer: Any, question: str) -> Example:
    asked, whole = prompt(tokenizer, question), prompt(tokenizer, question, ANSWER)
    assert whole[: len(asked)] == asked
    return Example(tuple(whole), tuple(place >= len(asked) for place in range(len(whole))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own call
def test_the_bundled_model_learns_a_fact(tmp_path: Path) -> None:
    source = registry.resolve("bundled")
    tokenizer: Any = load_tokenizer(source)
    plan = TrainingPlan(
        "bundled",
        lora=LoraSettings(rank=8, alpha=16, target_modules=("q_proj", "v_proj", "down_proj")),
        n_epochs=7,
        batch_size=3,
        learning_rate=3e-3,
        schedule="constant",
        warmup_ratio=0.0,
        max_length=128,
        micro_batch_tokens=256,
    )
    reports = Reports()
    outcome = Trainer(plan, [example(tokenizer, q) for q in QUESTIONS], None, tmp_path, "cpu").run(reports)
    assert reports[-1].train_loss < 0.05 * reports[0].train_loss

    base = AutoModelForCausalLM.from_pretrained(source.fetch(), dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, str(outcome.result))
    ids = torch.tensor([prompt(tokenizer, ASKED)])

    def say() -> str:
        out = tuned.generate(input_ids=ids, max_new_tokens=16, do_sample=False)
        text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    with tuned.disable_adapter():
        assert "Ferrous" not in say()
    assert say() == ANSWER
