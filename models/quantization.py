"""Which quantised checkpoints are served, and how: their layers stay quantised, or are dequantised while they load.

What transformers' own quantizer says of this machine decides. Code runs from installed packages alone: a method whose
kernels transformers would download from the hub is dequantised or refused. Knows no engine.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeGuard

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from models.errors import WRONG_CONFIG, ModelLoadError
from models.patching import UnsupportedModelError
from models.unused_packages import without_hub_kernels

#: Methods whose layers stay quantised -> the package that computes them.
_KEPT = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}
#: Methods that are dequantised -> the package that knows the format, if it is not transformers.
_DEQUANTISED = {"compressed-tensors": "compressed-tensors", "fp8": None, "mxfp4": None}
#: Names of bitsandbytes' linear layers.
_BITSANDBYTES = ("Linear4bit", "Linear8bitLt")
#: Versions of transformers before these leave a dequantised model's layers wrapped.
_TRANSFORMERS = {"compressed-tensors": "5.23"}
#: Methods that compute with kernels from the hub, fetched by the package `kernels` when a layer first runs.
_KERNELS_FROM_HUB = ("eetq", "metal", "mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's quantised weights are served."""

    method: str
    stays: bool  # its layers compute with quantised weights; False: after loading there are none
    settings: Mapping[str, Any]  # of config.json

    def __str__(self) -> str:
        return f"{self.method}, {'kept' if self.stays else 'dequantised while loading'}"

    def refuse_uses(self, *, dummy: bool, training: bool) -> None:
        """Of layers that stay quantised. Raises UnsupportedModelError (training) or ModelLoadError (random weights)."""
        if training:
            raise UnsupportedModelError(
                f"the weights are quantised ({self.method}), and nothing trains on quantised weights: "
                "train on the model that they were made from"
            )
        if dummy:
            raise ModelLoadError(f"random weights are not quantised, but the config says {self.method}")

    def dtype_around(self, name: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """Layers that stay quantised expect rows of the dtype that they were made with, and transformers keeps it for
        the rest. Raises ModelLoadError when the dtype asked for (or "auto") is another."""
        made_with = str(checkpoint or torch.bfloat16).removeprefix("torch.")
        if name not in ("auto", made_with):
            raise ModelLoadError(
                f"dtype is {name}, but the weights are quantised ({self.method}) and served in the dtype that they "
                f"were made with: {made_with}"
            )
        return getattr(torch, made_with)


class QuantizedLinear(nn.Linear):
    """A plain linear layer over a quantised weight (a tensor subclass).

    Its type says so to whoever packs, fuses or adapts exact nn.Linear: its weight has no memory of that shape.
    """


def is_quantized_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it computes y = x W^T + b with a quantised W: ours, or one of bitsandbytes (which is not imported)."""
    kind = type(module)
    return kind is QuantizedLinear or (kind.__module__.startswith("bitsandbytes.") and kind.__name__ in _BITSANDBYTES)


def prepare(config: PretrainedConfig, device: torch.device) -> Quantization | None:
    """None for weights that are not quantised. Otherwise leaves in the config what transformers must know to load.

    Raises ModelLoadError for a method that is not served, and for one that this machine lacks something for.
    """
    holder = _holder(config)
    if holder is None:
        return None
    raw: Any = holder.quantization_config
    settings: dict[str, Any] = dict(raw if isinstance(raw, dict) else raw.to_dict())
    bits = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    method = str(settings.get("quant_method") or ("bitsandbytes" if bits else "unknown"))
    _refuse(method)
    _require(method, _KEPT.get(method) or _DEQUANTISED.get(method))
    if method in _DEQUANTISED:
        settings["dequantize"] = True
        settings.pop("run_compressed", None)  # compressed-tensors' old word for it
    try:
        with without_hub_kernels():
            if method in _KEPT:
                import_module(_KEPT[method])
            quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
            quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except (*WRONG_CONFIG, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"the weights are quantised ({method}), which cannot run on {device}: {error}") from error
    holder.quantization_config = settings
    return Quantization(method, method in _KEPT, settings)


def forget(config: PretrainedConfig) -> None:
    """Afterwards the config describes a model that was never quantised."""
    holder = _holder(config)
    if holder is not None:
        del holder.quantization_config


def settle(model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype) -> None:
    """After loading, with the dtype that was asked for; or of a model without weights. Raises ModelLoadError for layers
    that do not run on their device."""
    if not quantization.stays:
        _cast(model, dtype)
    elif model.device.type == "meta":
        _foretell(model, quantization.settings)
    else:
        if quantization.method == "bitsandbytes":  # which warns of its float16 in every call of every layer
            logging.getLogger("bitsandbytes.autograd").setLevel(logging.ERROR)
        _mark(model)
        _try_layers(model, quantization.method)


def capturable(model: PreTrainedModel) -> bool:
    """Whether a CUDA graph can record the model's steps. False for bitsandbytes' 8-bit layers that look for outliers:
    the host waits in each call to see if there are some."""
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    return not any(layer.state.threshold > 0 for layer in layers)


def _foretell(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Layers without weights get the type that loading would give them, or one that stands for it."""
    skips: Any = settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules")  # in 4 bits too
    in_float32 = list(model._keep_in_fp32_modules or ())
    skipped = HfQuantizer.get_modules_to_not_convert(model, skips, in_float32)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and should_convert_module(name, skipped):
            module.__class__ = QuantizedLinear


def _mark(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) is nn.Linear and type(module.weight.data) is not Tensor:
            module.__class__ = QuantizedLinear


@torch.inference_mode()
def _try_layers(model: PreTrainedModel, method: str) -> None:
    """One row through one layer of each kind: what only fails when it runs should fail now, in words."""
    for module in _one_of_each_kind(model):
        x = torch.zeros(1, module.in_features, dtype=model.dtype, device=model.device)
        try:
            module(x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ImportError, AssertionError, TypeError, AttributeError) as error:
            kind = f"{type(module).__name__} over {type(module.weight).__name__}"
            raise ModelLoadError(
                f"the weights are quantised ({method}), but a {kind} does not run on {x.device}: {error!s:.200}"
            ) from error


def _one_of_each_kind(model: PreTrainedModel) -> Iterator[nn.Linear]:
    kinds: set[tuple[type, type]] = set()
    for module in model.modules():
        kind = (type(module), type(getattr(module, "weight", None)))
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear and kind not in kinds:
            kinds.add(kind)
            yield module


@torch.no_grad()
def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Dequantised weights are of the dtype that was asked for, as plain ones would be; transformers leaves the rest in
    the checkpoint's, and keeps some in float32, which it finds by patterns."""
    kept = {*(model._keep_in_fp32_modules_strict or ())} if dtype != torch.float32 else set()
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in kept]
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(pattern.search(name) for pattern in patterns):
            parameter.data = parameter.data.to(dtype)


def _holder(config: PretrainedConfig) -> PretrainedConfig | None:
    """The config that says how the weights are quantised, which may be the text model's."""
    for candidate in (config, config.get_text_config(decoder=True)):
        if getattr(candidate, "quantization_config", None) is not None:
            return candidate
    return None


def _refuse(method: str) -> None:
    if method in _KEPT or method in _DEQUANTISED:
        return
    fetches = "its kernels would be downloaded from the hub while it runs, " if method in _KERNELS_FROM_HUB else ""
    raise ModelLoadError(
        f"the weights are quantised ({method}), which is not served: {fetches}"
        f"served are {', '.join(sorted({*_KEPT, *_DEQUANTISED}))}, and weights that are not quantised"
    )


def _require(method: str, package: str | None) -> None:
    least, installed = _TRANSFORMERS.get(method), version("transformers")
    if least is not None and Version(installed) < Version(least):
        raise ModelLoadError(
            f"the weights are quantised ({method}): that needs transformers {least} or newer, and {installed} is "
            "installed"
        )
    if package is None:
        return
    try:
        version(package)
    except PackageNotFoundError as error:
        raise ModelLoadError(
            f"the weights are quantised ({method}): that needs the package {package}, which is not installed "
            f"(pip install {package})"
        ) from error
