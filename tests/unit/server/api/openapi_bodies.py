"""Valid bodies of the fuzz whose fields are made to go together, and to ask for little: what a JSON schema cannot say.
Pure; knows no server."""

from collections.abc import Callable
from typing import Any

from openapi_things import JOBS, PAIR, TRAINING

from models.training import ALLOWED_INPUTS, REQUIRED_INPUTS, LossName

MOST = 8  # tokens of a prompt or an answer, lines of a batch
VOCABULARY = 100  # the scripted trainer's; the tokenizer's is larger
MOST_RANK = 16

Body = dict[str, Any]


def _generation(body: Body) -> None:
    _lower(body, n=2, max_tokens=MOST, max_completion_tokens=MOST, min_tokens=1)
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = _known_tokens(body["stop_token_ids"])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(token) % VOCABULARY): bias for token, bias in body["logit_bias"].items()}
    body.pop("prompt_logprobs" if body.get("stream") else "stream_options", None)


def _chat(body: Body) -> None:
    _generation(body)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)


def _completion(body: Body) -> None:
    _generation(body)
    body["prompt"] = _known_tokens(body["prompt"])
    if body.get("max_tokens") == 0:
        body["echo"] = True


def _text_or_messages(body: Body) -> None:
    if body.get("prompt") is not None:
        body.pop("messages", None)
    elif body.get("messages") is not None:
        body.pop("add_special_tokens", None)
    else:
        body["prompt"] = "a"


def _token_ids(body: Body) -> None:
    body["tokens"] = _known_tokens(body["tokens"])


def _upload(form: Body) -> None:
    form["file"] = PAIR * MOST
    if "expires_after[seconds]" in form or "expires_after[anchor]" in form:
        form.setdefault("expires_after[seconds]", 3600)
        form["expires_after[anchor]"] = "created_at"


def _job(body: Body) -> None:
    method = body.get("method")
    if method is None:
        _hyperparameters(body.get("hyperparameters"))
        return
    body.pop("hyperparameters", None)
    method.pop("dpo" if method["type"] == "supervised" else "supervised", None)
    _hyperparameters((method.get(method["type"]) or {}).get("hyperparameters"))


def _hyperparameters(given: Body | None) -> None:
    if given is None:
        return
    if given.get("learning_rate") is not None:
        given.pop("learning_rate_multiplier", None)
    if given.get("training_type") == "full":
        given.pop("lora", None)
    _lower(given.get("lora") or {}, rank=MOST_RANK)


def _new_model(body: Body) -> None:
    lora = body.get("lora_config") or {}
    _lower(lora, rank=MOST_RANK)
    if body.get("seed") is not None:
        lora.pop("seed", None)


def _compute(body: Body) -> None:
    loss: LossName = body.get("loss_fn", "cross_entropy")
    if loss != "ppo":
        body.pop("loss_fn_config", None)
    body["data"] = body["data"][:MOST]
    for datum in body["data"]:
        given = datum["model_input"] = _known_tokens(datum["model_input"])
        chunks = [given] if isinstance(given, list) else [chunk["tokens"] for chunk in given["chunks"]]
        length = sum(map(len, chunks))
        inputs = {name: given for name, given in datum["loss_fn_inputs"].items() if given is not None}
        inputs = {name: inputs[name] for name in inputs if name == "target_tokens" or name in ALLOWED_INPUTS[loss]}
        inputs |= {name: [-0.5] for name in REQUIRED_INPUTS[loss] if name not in inputs}
        inputs["target_tokens"] = _known_tokens(inputs["target_tokens"])
        datum["loss_fn_inputs"] = {name: _of_length(given, length) for name, given in inputs.items()}


def _sample(body: Body) -> None:
    _lower(body, num_samples=2)
    _lower(body.get("sampling_params") or {}, max_tokens=MOST)
    body["prompt"] = _known_tokens(body["prompt"])


def _of_length(given: Any, length: int) -> Any:
    """Numbers in a list, or in Tinker's tensor."""
    if isinstance(given, list):
        return (given * length)[:length]
    shape = {"shape": [length]} if given.get("shape") is not None else {}
    data = [int(number) for number in given["data"]] if given.get("dtype") == "int64" else given["data"]
    return given | {"data": _of_length(data, length)} | shape


def _lower(body: Body, **most: int) -> None:
    for name, value in most.items():
        if body.get(name) is not None:
            body[name] = min(body[name], value)


def _known_tokens(given: Any) -> Any:
    """In any form: text (some), token ids (to a JSON schema 1.0 is an integer), Tinker's chunks and tensors, lists."""
    if isinstance(given, list):
        return [_known_tokens(one) for one in given[:MOST]]
    if isinstance(given, dict):
        return given | {name: _known_tokens(given[name]) for name in ("chunks", "tokens", "data") if name in given}
    return int(given) % VOCABULARY if isinstance(given, int | float) else given or "a"


FITTING: dict[str, Callable[[Body], None]] = {
    "POST /v1/chat/completions": _chat,
    "POST /v1/completions": _completion,
    "POST /tokenize": _text_or_messages,
    "POST /detokenize": _token_ids,
    "POST /v1/files": _upload,
    f"POST {JOBS}": _job,
    f"POST {TRAINING}/create_model": _new_model,
    f"POST {TRAINING}/forward": _compute,
    f"POST {TRAINING}/forward_backward": _compute,
    f"POST {TRAINING}/sample": _sample,
}
