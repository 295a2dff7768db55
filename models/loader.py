"""A folder of Hugging Face files -> a model ready for the engine: weights, dtype, device, our attention. No generation.

Only safetensors are read, and no code that comes with a model is ever run.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from models import config_file, patching, placing, quantization
from models.adapters.folder import CONFIG as ADAPTER
from models.descriptions import positions_of, read_config
from models.errors import WRONG_CONFIG, ModelLoadError
from models.generation_files import eos_token_ids, read_generation, sampling_defaults, warn_of_rest
from models.host import usable_cpus
from models.load_report import read_report
from models.packed_linear import pack_linears
from models.progress_bars import without_progress_bars
from models.quantization import Quantization
from models.quantized_blocks import check_blocks, check_numbers, check_scales, check_unread
from models.registry import ModelSource
from models.stored_weights import check_files, check_index
from models.towers import fetch_text_model
from models.weight_reading import WeightReading

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]

#: What a config.json may want a forward to return beside logits. Nobody here reads it, and hooks that collect it would
#: keep layers from being fused.
_LOGITS_ALONE = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode whose attention is `longwave_paged`."""

    model: PreTrainedModel
    config: PretrainedConfig  # of the text model
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    vocab_size: int
    name: str
    capturable: bool = True  # by CUDA graphs
    sampling_defaults: dict[str, float] = field(default_factory=dict)  # of its generation_config.json

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device


def load(
    source: ModelSource,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    load_format: LoadFormat = "auto",
    reading: WeightReading | None = None,
) -> LoadedModel:
    """Loads the weights, or with load_format "dummy" makes random ones of the config's shape directly on the device.
    `reading`: of this folder, to this device, for weights that need nothing more.

    dtype "auto": see `choose_dtype`.
    Layers that stay quantised keep their checkpoint's dtype around them, on every device. Raises ModelLoadError, and
    UnsupportedModelError, before any weight is read, for families that cannot even be made with our attention and for
    checkpoints with towers; whether it can serve the others is for `models.runner` to say.
    """
    device = torch.device(device)
    folder = _fetch(source, load_format)
    model = _make(folder, dtype, device, load_format, patching.LONGWAVE_PAGED, reading=reading)
    model.eval().requires_grad_(False)
    if device.type == "cpu":
        pack_linears(model)
    text_config = model.config.get_text_config()
    warn_of_rest(read_generation(folder))
    return LoadedModel(
        model=model,
        config=text_config,
        eos_token_ids=eos_token_ids(folder, text_config),
        sampling_defaults=sampling_defaults(folder),
        max_position_embeddings=positions_of(text_config),
        vocab_size=text_config.vocab_size,
        name=source.name,
        capturable=quantization.capturable(model),
    )


def load_for_training(
    source: ModelSource,
    *,
    dtype: DTypeName,
    device: str | torch.device = "cpu",
    load_format: LoadFormat = "auto",
) -> PreTrainedModel:
    """As `load`, but plain, in train mode, with the attention `longwave`. Layers that stay quantised are refused."""
    folder = _fetch(source, load_format)
    return _make(folder, dtype, torch.device(device), load_format, patching.LONGWAVE, training=True).train()


def _fetch(source: ModelSource, load_format: LoadFormat) -> Path:
    return fetch_text_model(source) if load_format == "auto" else source.fetch(weights=False)


def _make(
    folder: Path,
    dtype: DTypeName,
    device: torch.device,
    load_format: LoadFormat,
    attention: str,
    *,
    training: bool = False,
    reading: WeightReading | None = None,
) -> PreTrainedModel:
    config = read_config(folder)
    _want_logits_alone(config)
    patching.check_config(config)
    _refuse_adapter(folder)
    if load_format == "auto":
        _require_safetensors(folder)
        check_files(folder)
    quantized = quantization.prepare(config, device)
    if quantized is not None and quantized.stays:
        has_weights = device.type != "meta"  # without, the doctor asks for shapes and sizes
        quantized.refuse_uses(dummy=load_format == "dummy" and has_weights, training=training)
        torch_dtype = quantized.dtype_around(dtype if has_weights else "auto", _checkpoint_dtype(config))
    else:
        slow = training and device.type == "cpu"  # training there is float32, whatever the processor
        torch_dtype = torch.float32 if slow and dtype == "auto" else choose_dtype(dtype, config, device)
    if quantized is not None and load_format == "auto":
        _check_quantized(folder, quantized)
    if device.type == "cpu":
        # torch counts the host's cores, not the container's share of them.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    patching.register()
    with without_progress_bars():
        if load_format == "dummy":
            quantization.forget(config)
            model = _random_weights(folder, config, torch_dtype, device, attention)
        else:
            read = None if reading is None else placing.place(_finish(reading), config, torch_dtype, device, attention)
            model = read or _load_weights(folder, config, torch_dtype, device, attention, quantized)
    if quantized is not None:
        logger.info("quantised weights: %s", quantized)
        quantization.settle(model, quantized, torch_dtype)
    return model


def _want_logits_alone(config: PretrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        for name, value in _LOGITS_ALONE.items():
            if hasattr(part, name):
                setattr(part, name, value)


def _check_quantized(folder: Path, quantized: Quantization) -> None:
    if quantized.method in ("fp8", "compressed-tensors"):
        check_scales(folder)
    if quantized.method == "fp8":
        check_blocks(folder, quantized.settings)


def _finish(reading: WeightReading) -> dict[str, Tensor]:
    try:
        return reading.finish()
    except OSError as error:
        raise ModelLoadError(f"the weights cannot be read: {error}") from error


def _refuse_adapter(folder: Path) -> None:
    """transformers, where PEFT is installed, would load it into the model, from a pickle too."""
    if (folder / ADAPTER).is_file():
        raise ModelLoadError(
            f"{folder} holds a model and an adapter ({ADAPTER}): move the adapter's files to a folder of their own and "
            "serve it by --lora-modules NAME=FOLDER"
        )


def _require_safetensors(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern))
    found = f"only {', '.join(others[:3])}" if others else "no weights"
    raise ModelLoadError(
        f"{folder} holds {found}: weights are read from *.safetensors alone (other formats can run code when loaded)"
    )


def choose_dtype(name: DTypeName, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """What "auto" is. On CUDA the checkpoint's dtype, and bfloat16 (float16 before Ampere) for a float32 one; on a CPU
    float32, but bfloat16 for a checkpoint of it where the processor multiplies that: half the bytes to read."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    checkpoint = _checkpoint_dtype(config)
    if device.type == "cpu":
        fast = checkpoint == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if checkpoint in (torch.bfloat16, torch.float16):
        return checkpoint
    before_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if before_ampere else torch.bfloat16


def _checkpoint_dtype(config: PretrainedConfig) -> torch.dtype | None:
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)


def _load_weights(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    quantized: Quantization | None,
) -> PreTrainedModel:
    check_index(folder)
    # Quantised tensors are made, or dequantised, where they stay; some cannot be moved.
    placement: dict[str, Any] = {} if quantized is None else {"device_map": {"": device}}
    read_generation(folder)
    try:
        with read_report() as said:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **placement,
            )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelLoadError(f"transformers cannot load {folder}: {said.failure or error}") from error
    except WRONG_CONFIG as error:
        raise _config_error(folder, config, error) from error
    model: PreTrainedModel
    model, report = loaded
    _refuse_other_weights(folder, model, report)
    if quantized is None:
        check_numbers(folder, report["unexpected_keys"])
        placed: Any = model
        placed.to(device)
    return model


def _refuse_other_weights(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """transformers would go on with random weights in place of what is not there, and with codes for weights."""
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, stored, expected = mismatched[0]
        raise ModelLoadError(f"{folder}: {name} is {list(stored)} in the weights and {list(expected)} by config.json")
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ModelLoadError(f"{folder} lacks weights of {type(model).__name__}: {', '.join(lacking[:5])}")
    check_unread(folder, report["unexpected_keys"])


def _config_error(folder: Path, config: PretrainedConfig, error: Exception) -> ModelLoadError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    word = error.args[0] if isinstance(error, KeyError) and error.args else None  # that a table of theirs lacks
    if isinstance(word, str) and (fields := [*config_file.fields_with(config_file.read(folder), word)]):
        reason = f"{' or '.join(fields)} is {word!r}, which it does not know"
    path = folder / config_file.FILE
    return ModelLoadError(f"transformers cannot make a {config.model_type} language model of {path}: {reason}")


def _random_weights(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (*WRONG_CONFIG, RuntimeError) as error:  # what has no memory does not run out of it
        raise _config_error(folder, config, error) from error
    model.to_empty(device=device)
    with _seeded(device), torch.no_grad():
        model.init_weights()  # parameters, and the buffers that no checkpoint holds (rotary frequencies)
    return model


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """The same random weights every time, without touching the process's random state."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
