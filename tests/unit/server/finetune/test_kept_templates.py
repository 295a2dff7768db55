"""What a job's chats are rendered with: what the operator said when it was made, whatever is said later."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import VOCAB_SIZE, tiny_tokenizer
from working import at_work

from models import bundled, descriptions
from models.training import Example
from server.finetune import Status, worker
from server.finetune.folders import JobFolder
from server.finetune.messages import Arguments
from server.text.operators_template import NOTHING_SAID, OperatorsTemplate

CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
FRAMED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ '[assistant]' if add_generation_prompt }}"  # noqa: E501
OTHER = FRAMED.replace("[", "(").replace("]", ")")
STEPS = 60  # so many that the job does not end before it is stopped
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first example of a job's training file, as the trainer reads it, as text."""
    monkeypatch.setattr(worker, "model_source", lambda _: None)
    monkeypatch.setattr(descriptions, "load_tokenizer", lambda _: tiny_tokenizer())
    monkeypatch.setattr(descriptions, "max_positions", lambda _: 256)
    arguments = Arguments(
        "train", "base", "supervised", str(folder), "cpu", None, None, None, None, False, os.getpid(), 20
    )
    example = worker.read_datasets(arguments, JobFolder(folder), None)[0].examples[0]
    assert isinstance(example, Example)
    return str(tiny_tokenizer().decode(example.tokens))


def test_a_job_keeps_the_template_with_which_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def make(template: OperatorsTemplate) -> Path:
        async with at_work(tmp_path, template=template, start=False) as work:
            return work.job_folder(await work.create(CHAT))

    first, second, third = (
        asyncio.run(make(said)) for said in (OperatorsTemplate(FRAMED), OperatorsTemplate(OTHER), NOTHING_SAID)
    )
    assert read(first, monkeypatch) == "[user]a<|im_end|>[assistant]b<|im_end|>"
    assert read(second, monkeypatch) == "(user)a<|im_end|>(assistant)b<|im_end|>"
    assert read(third, monkeypatch) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"


def test_a_job_of_an_earlier_version_has_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training_file.jsonl").write_bytes(CHAT)
    assert read(tmp_path, monkeypatch) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("training_type", ["lora", "full"])
def test_a_job_goes_on_with_its_template_where_the_server_has_another_by_then(
    tmp_path: Path, training_type: str
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = bundled.cached_folder(tmp_path / "cache")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"files": sizes}))
    always: Any = {
        "source": "bundled", "worker": "server.finetune.worker", "cache_dir": tmp_path / "cache",
        "max_full_parameters": 10**6,
    }  # fmt: skip

    async def begin() -> None:
        async with at_work(tmp_path, **always, template=OperatorsTemplate(FRAMED)) as work:
            job = await work.create(CHAT * 4, steps=STEPS, training_type=training_type)
            await work.told(job, "Step 1/")
            await work.jobs.drain()
            assert (await work.jobs.get(job.id, "me")).status is Status.QUEUED

    async def end() -> None:
        async with at_work(tmp_path, **always, template=OperatorsTemplate(OTHER)) as work:
            (job,) = await work.jobs.page("me", None, 9, {})
            await work.succeeded(job)
            assert any("Fine-tuning job goes on after step" in text for text in await work.said(job))
            if training_type == "full":
                made = tmp_path / "finetune" / "models" / job.id
                assert (made / "chat_template.jinja").read_text() == FRAMED

    asyncio.run(begin())
    asyncio.run(end())
