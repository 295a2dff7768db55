"""What full fine-tuning asks of a model and a device, told by the headers of its weight files, before anything is
loaded. Importing it brings neither torch nor transformers: trainers start with it."""

import math
from typing import Any

from models.errors import ModelLoadError
from models.host import available_memory_bytes
from models.registry import ModelSource
from models.stored_weights import stored_tensors
from models.training.errors import ModelTooLargeError, PlanError

GIB = 2**30
#: Bytes for each parameter, whatever the batches: the weight, its gradient and AdamW's two moments in float32; beside
#: weights in bfloat16 a float32 master.
STATE_BYTES = {"float32": 16, "bfloat16": 18}
#: Of them in a checkpoint: the float32 weight and the moments. From a GPU they are copied all at once before they are
#: written; what is in host memory is written from where it is.
CHECKPOINT_BYTES = 12


def num_parameters(source: ModelSource) -> int:
    """Raises ModelLoadError."""
    try:
        return sum(math.prod(tensor.shape) for tensor in stored_tensors(source.fetch()))
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{source.name} has no whole *.safetensors files: {error}") from error


def check_plain(source: ModelSource) -> None:
    """Raises PlanError for a quantised model, also one that is dequantised while it loads: what transformers would save
    of it is neither. ModelLoadError."""
    from models import descriptions  # of transformers, seconds to import: not for those that ask nothing

    if getattr(descriptions.read_config(source.fetch(weights=False)), "quantization_config", None) is not None:
        raise PlanError("the base model is quantised: not all of its weights can be trained")


def check_size(source: ModelSource, most: int) -> None:
    """Raises PlanError for a model of more than `most` parameters, and for a quantised one; ModelLoadError."""
    check_plain(source)
    parameters = num_parameters(source)
    if parameters > most:
        raise PlanError(
            f"the base model has {parameters} parameters; models of up to {most} are fully tuned here: train a LoRA "
            "adapter instead"
        )


def check_memory(source: ModelSource, device: Any, dtype: str) -> None:
    """`device`: torch's; `dtype`: of the weights, float32 or bfloat16. Raises ModelTooLargeError, ModelLoadError."""
    parameters = num_parameters(source)
    needed, free = STATE_BYTES[dtype] * parameters, _free_bytes(device)
    if needed > free:
        raise ModelTooLargeError(
            f"Full fine-tuning of {parameters} parameters keeps {needed / GIB:.2f} GiB (weights, gradients and AdamW's "
            f"moments), beside what batches need; {device} has {free / GIB:.2f} GiB free"
        )
    copied, host = CHECKPOINT_BYTES * parameters, available_memory_bytes()
    if device.type != "cpu" and copied > host:
        raise ModelTooLargeError(
            f"A checkpoint of {parameters} parameters takes {copied / GIB:.2f} GiB of host memory while it is written; "
            f"{host / GIB:.2f} GiB are free there"
        )


def _free_bytes(device: Any) -> int:
    if device.type == "cpu":
        return available_memory_bytes()
    import torch

    free: int = torch.cuda.mem_get_info(device)[0]
    return free
