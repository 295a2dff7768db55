"""Random LoRA adapters as PEFT saves them, PEFT's own answers, and ours for a whole batch of rows at once."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import random_model, tiny_config
from torch import Tensor
from transformers import GPT2Config, PretrainedConfig, PreTrainedModel, Qwen3Config

from models.adapters import AdapterSlots, LoraLimits, find_linears
from models.attention_sites import attention_implementation, find_attention_sites
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.inputs import StepInputs
from models.kv_pool import allocate

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": tiny_config(),
    "qwen3": Qwen3Config(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    ),
    "gpt2": GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2),
}
BLOCK = 16
MAX_TOKENS = 128
LIMITS = LoraLimits(max_loras=4, max_lora_rank=16)


def save_adapter(model: PreTrainedModel, folder: Path, seed: int, **config: Any) -> PeftModel:
    """A random adapter on a copy of the model (with eager attention), saved in `folder`."""
    fields: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    if model.config.model_type == "gpt2":
        fields["fan_in_fan_out"] = True
    torch.manual_seed(seed)
    with attention_implementation(model, "eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT meets its own deprecations in transformers
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{**fields, **config}, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no hub to ask for the base model
        adapted.save_pretrained(str(folder))
    return adapted.eval()  # type: ignore[no-any-return]


@torch.inference_mode()
def alone(model: Any, prompt: Sequence[int]) -> Tensor:
    """What PEFT and transformers answer: `[len(prompt), vocab]`."""
    logits: Tensor = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0]
    return logits


class PackedBatch:
    """A model with adapter slots, run as the engine runs it: flattened rows over pages."""

    def __init__(self, model: PreTrainedModel, limits: LoraLimits = LIMITS) -> None:
        self.model = model
        self.slots = AdapterSlots(
            find_linears(model),
            limits,
            max_num_batched_tokens=MAX_TOKENS,
            dtype=model.dtype,
            device=model.device,
        )
        self._sites = find_attention_sites(model)
        self._forward = PagedForward(model)

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Sequence[int]], adapter_slots: Sequence[int]) -> list[Tensor]:
        """Of each prompt, `[len(prompt), vocab]`, all in one step."""
        inputs = StepInputs(
            max_num_seqs=8,
            max_num_batched_tokens=MAX_TOKENS,
            max_blocks_per_seq=8,
            block_size=BLOCK,
            device=self.model.device,
        )
        seqs, block = [], 1
        for at, (prompt, slot) in enumerate(zip(prompts, adapter_slots, strict=True)):
            blocks = -(-len(prompt) // BLOCK)
            seqs.append(ScheduledSeq(at, prompt, 0, list(range(block, block + blocks)), True, adapter_slot=slot))
            block += blocks
        step = inputs.build(StepBatch(tuple(seqs)))
        self.slots.select(step.adapter_rows, step.num_adapter_slots)
        caches = allocate(self._sites, block, BLOCK, self.model.dtype, self.model.device)
        rows = self._forward.every_row(step, caches)
        return list(rows.split([len(prompt) for prompt in prompts]))


def family(name: str) -> PreTrainedModel:
    return random_model(FAMILIES[name])
