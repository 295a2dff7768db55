"""A model that learns: Hugging Face's, with our attention over packed sequences and, for LoRA, PEFT's modules.

Knows how hidden states and log-probabilities of a packed batch come about; knows no loss and no optimiser.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from models.loader import LoadFormat, load_for_training
from models.patching import (
    UnsupportedModelError,
    check_supported_for_serving,
    fix_longrope,
    fix_temperature,
    longrope_lengths,
)
from models.progress_bars import without_progress_bars
from models.registry import ModelSource
from models.training.activations import Checkpointing
from models.training.errors import CheckpointError, PlanError
from models.training.head import ModelHead
from models.training.logprobs import chunk_rows, token_logprobs
from models.training.packing import PackedBatch
from models.training.plan import LoraSettings, TrainingDType, TrainingPlan
from models.training.size import check_memory, check_plain
from models.training.targets import peft_targets

_log = logging.getLogger(__name__)

#: What a tokenizer consists of; copied beside a fully tuned model.
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")


class TrainableModel:
    """`plan.model` on a device, in train mode, with `parameters` wanting gradients and nothing else."""

    def __init__(
        self, plan: TrainingPlan, source: ModelSource, device: torch.device, load_format: LoadFormat = "auto"
    ) -> None:
        """Raises ModelLoadError, UnsupportedModelError (from models.patching), PlanError or ModelTooLargeError."""
        self._plan, self._source = plan, source
        self.device = device
        dtype = _dtype(plan.dtype, device)
        if plan.lora is None and load_format == "auto":
            check_plain(source)
            check_memory(source, device, dtype)
        self.base = load_for_training(source, dtype=dtype, device=device, load_format=load_format)
        self.config = self.base.config.get_text_config()
        if plan.max_length > self.config.max_position_embeddings:
            raise PlanError(
                f"max_length {plan.max_length} is more than the {self.config.max_position_embeddings} positions of "
                f"{source.name}"
            )
        # What packing asks of a family is what the engine's flat rows ask: no state but keys, positions that are told.
        check_supported_for_serving(self.base)
        self.max_model_len: int = plan.max_model_len or self.config.max_position_embeddings
        fix_longrope(self.base, self.max_model_len)
        fix_temperature(self.base)
        self.decoder = _decoder(self.base)
        self.head = ModelHead(self.base)
        self.adapter: PeftModel | None = None
        self.base.requires_grad_(plan.lora is None)
        if plan.lora is not None:
            self.adapter = _with_lora(self.base, plan.lora, plan)
        self._checkpointing: Checkpointing | None = None
        if plan.gradient_checkpointing and self.base.supports_gradient_checkpointing:  # all families but JetMoE
            enable_checkpointing(self.base, recompute_attention=plan.recompute_attention)
            self._checkpointing = Checkpointing(self.base)
        self.parameters: dict[str, Parameter] = {
            name: parameter for name, parameter in self._whole.named_parameters() if parameter.requires_grad
        }
        self._head_learns = any(parameter.requires_grad for parameter in self.head.linear.parameters())

    @property
    def _whole(self) -> nn.Module:
        return self.base if self.adapter is None else self.adapter

    def hidden(self, batch: PackedBatch) -> Tensor:
        """`[tokens, hidden_size]` after the last norm: what the head reads."""
        if self._checkpointing is not None:
            self._checkpointing.choose(batch.tokens)
        return self._decode(batch)

    def measure(self, batch: PackedBatch) -> None:
        """Learns from a small batch which ones need not be computed again in the backward pass."""
        if self._checkpointing is not None:
            self._checkpointing.measure(lambda: self._decode(batch), batch.tokens, self._whole.parameters())

    def _decode(self, batch: PackedBatch) -> Tensor:
        output = self.decoder(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            cu_seq_lens_k=batch.cu_seqlens,
            max_length_q=batch.max_length,
            max_length_k=batch.max_length,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Of the learnt tokens: log-probability, float32 `[learnt]`; whether it is the likeliest, bool `[learnt]`."""
        return token_logprobs(
            self.head,
            self.hidden(batch)[batch.rows],
            batch.labels,
            chunk_rows(self.config.vocab_size),
            head_learns=self._head_learns,
        )

    @contextmanager
    def evaluating(self, *, adapter: bool = True) -> Iterator[None]:
        """Without dropout and gradients, and if asked for without the adapter."""
        plain = nullcontext() if adapter or self.adapter is None else self.adapter.disable_adapter()
        was_training = self._whole.training
        self._whole.eval()
        try:
            with torch.no_grad(), plain:
                yield
        finally:
            self._whole.train(was_training)

    def check_factors(self, max_model_len: int | None) -> None:
        """Raises CheckpointError for weights that learnt at this length with other factors of LongRoPE than the ones
        here. None: nobody recorded it."""
        lengths = longrope_lengths(self.base)
        if max_model_len is None:
            if lengths:
                _log.warning("weights do not say for which max_model_len they learnt: LongRoPE's factors may differ")
            return
        if any((max_model_len > length) != (self.max_model_len > length) for length in lengths):
            raise CheckpointError(
                f"the weights learnt with LongRoPE's factors of max_model_len {max_model_len}; this model has the "
                f"other ones, of max_model_len {self.max_model_len}"
            )

    def save_adapter(self, folder: Path, name: str = "default") -> None:
        """PEFT's format: adapter_config.json and adapter_model.safetensors."""
        assert self.adapter is not None
        tensors = get_peft_model_state_dict(self.adapter, adapter_name=name, save_embedding_layers=False)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        config: dict[str, Any] = {**self.adapter.peft_config[name].to_dict(), "inference_mode": True}
        # PEFT writes sets in the order of their hashes, which change with every process.
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True))

    def save_result(self, folder: Path, chat_template: str | None = None) -> None:
        """What is served: the adapter, or the whole model as a Hugging Face folder with its tokenizer, and with this
        template in the place of the source's."""
        if self.adapter is not None:
            self.save_adapter(folder)
            return
        with without_progress_bars():
            self.base.save_pretrained(folder)
        origin = self._source.fetch(weights=False)
        for pattern in _TOKENIZER_FILES:
            for file in origin.glob(pattern):
                (folder / file.name).write_bytes(file.read_bytes())
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template, "utf-8")


def _dtype(name: TrainingDType, device: torch.device) -> Any:
    if name != "auto":
        return name
    return "float32" if device.type == "cpu" else "bfloat16"


def _decoder(model: PreTrainedModel) -> Any:
    """The model below the head."""
    for decoder in (model.base_model, getattr(model, "model", None)):  # the first is Llama 4 itself
        if isinstance(decoder, PreTrainedModel) and decoder is not model:
            return decoder
    raise UnsupportedModelError(f"{type(model).__name__} keeps its decoder in a place not known here")


def _with_lora(base: PreTrainedModel, lora: LoraSettings, plan: TrainingPlan) -> PeftModel:
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        **peft_targets(base, lora.target_modules),
    )
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.23 by a name that has changed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(plan.seed)
        # In the model's own type: the optimiser keeps float32 masters, and mixed types would be slow.
        adapter = get_peft_model(base, config, autocast_adapter_dtype=False)
    assert isinstance(adapter, PeftModel)
    adapter.peft_config["default"].base_model_name_or_path = plan.model  # PEFT has put the local folder there
    return adapter


def enable_checkpointing(model: PreTrainedModel, *, recompute_attention: bool) -> None:
    """Every decoder layer keeps its input (and our attention's output) and is computed again in the backward pass."""
    arguments: dict[str, Any] = {"use_reentrant": False}
    if not recompute_attention:
        # Quadratic in the length, and its output is no larger than the layer's input that is kept anyway.
        kept = [torch.ops.longwave.attention.default]
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:  # newer than transformers 5.17
        enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
