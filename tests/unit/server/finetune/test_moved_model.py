"""A job whose base model lies elsewhere when it goes on, with the real trainer: another cache, another image."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import VOCAB_SIZE, tiny_tokenizer
from working import at_work

from models import bundled
from server.finetune import Status

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(180)]

STEPS = 60  # so many that the job does not end before it is stopped
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a cache directory holds, with little weights in the place of the bundled model's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    cache = tmp_path_factory.mktemp("cache")
    folder = bundled.cached_folder(cache)
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"files": sizes}))
    return cache


def test_a_job_goes_on_where_its_model_has_moved_to(model: Path, tmp_path: Path) -> None:
    here, there = shutil.copytree(model, tmp_path / "here"), shutil.copytree(model / "models", tmp_path / "there")
    always: Any = {"source": "bundled", "worker": "server.finetune.worker"}

    async def begin() -> None:
        async with at_work(tmp_path, **always, cache_dir=here) as work:
            job = await work.create(steps=STEPS)
            await work.told(job, "Step 1/")
            await work.jobs.drain()
            assert (await work.jobs.get(job.id, "me")).status is Status.QUEUED

    async def end() -> None:
        async with at_work(tmp_path, **always, model_image_dir=there) as work:
            (job,) = await work.jobs.page("me", None, 9, {})
            await work.succeeded(job)
            assert any("Fine-tuning job goes on after step" in text for text in await work.said(job))
            config = json.loads((tmp_path / "finetune" / "adapters" / job.id / "adapter_config.json").read_bytes())
            assert config["base_model_name_or_path"] == "bundled"  # no folder of the server's

    asyncio.run(begin())
    shutil.rmtree(here)
    asyncio.run(end())
