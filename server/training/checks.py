"""Which calls can never be carried out: told at once, with the field's name, instead of through a future.

The process checks again: it knows the base model, which may still be loading when the first calls come.
"""

from models.training import ALLOWED_INPUTS, REQUIRED_INPUTS, LossName
from server.engine.token_ids import TokenIds
from server.errors import InvalidRequest
from server.training.calls import Call, Compute, PackedDatum, Sample, SaveWeights
from server.training.config import TrainingConfig
from server.training.messages import Ready
from server.training.weights import AUTOSAVE

INPUTS = ("weights", "logprobs", "advantages")
FIELDS = {"tokens": "model_input", "targets": "loss_fn_inputs.target_tokens"}


def check(call: Call, config: TrainingConfig, ready: Ready | None) -> None:
    """`ready`: what the process knows of the base model, once it does. Raises InvalidRequest."""
    if isinstance(call, Compute):
        _check_compute(call, config, ready)
    if isinstance(call, Sample) and ready is not None:
        _check_vocabulary(call.prompt, ready.vocab_size, "prompt")
    if isinstance(call, SaveWeights) and call.name == AUTOSAVE:
        raise InvalidRequest(
            f"'{AUTOSAVE}' is the name under which the server saves models that it unloads: choose another one.",
            param="path",
        )


def _check_compute(call: Compute, config: TrainingConfig, ready: Ready | None) -> None:
    if call.num_tokens > config.max_call_tokens:
        raise InvalidRequest(
            f"The call has {call.num_tokens} tokens; at most {config.max_call_tokens} are taken at once: make several "
            "calls, their gradients are added.",
            param="data",
        )
    for index, datum in enumerate(call.data):
        place = f"data[{index}]"
        _check_inputs(datum, call.loss_fn, place)
        if ready is None:
            continue
        if len(datum.tokens) // 4 > ready.max_length:
            raise InvalidRequest(
                f"{place} has {len(datum.tokens) // 4} tokens; one sequence has at most {ready.max_length} here.",
                param=f"{place}.model_input",
            )
    if ready is not None and not all(_in_vocabulary(_all(call, name), ready.vocab_size) for name in FIELDS):
        for index, datum in enumerate(call.data):
            for name, field in FIELDS.items():
                _check_vocabulary(TokenIds(getattr(datum, name)), ready.vocab_size, f"data[{index}].{field}")


def _all(call: Compute, name: str) -> TokenIds:
    """Of all data: there may be thousands of a few tokens each."""
    return TokenIds(b"".join(getattr(datum, name) for datum in call.data))


def _check_inputs(datum: PackedDatum, loss_fn: LossName, place: str) -> None:
    for name in ("targets", *INPUTS):
        values: bytes | None = getattr(datum, name)
        field = FIELDS.get(name, f"loss_fn_inputs.{name}")
        if values is None:
            if name in REQUIRED_INPUTS[loss_fn]:
                raise InvalidRequest(f"Missing required parameter: '{place}.{field}'.", param=f"{place}.{field}")
        elif name in INPUTS and name not in ALLOWED_INPUTS[loss_fn]:
            raise InvalidRequest(f"{loss_fn} takes no {name}.", param=f"{place}.{field}")
        elif len(values) != len(datum.tokens):
            raise InvalidRequest(
                f"{place} has {len(datum.tokens) // 4} tokens in its model_input and {len(values) // 4} numbers in its "
                f"{field}: there must be one for each token.",
                param=f"{place}.{field}",
            )


def _in_vocabulary(token_ids: TokenIds, size: int) -> bool:
    return token_ids.largest() < size


def _check_vocabulary(token_ids: TokenIds, size: int, field: str) -> None:
    if not _in_vocabulary(token_ids, size):
        raise InvalidRequest(f"{field} names a token outside the vocabulary of {size} tokens.", param=field)
