"""What a request has to be, beside its files, so that this server makes a job of it; why there is no place for one.
Pure; knows no HTTP."""

from server.engine.adapter_registry import NAME as ADAPTER_NAME
from server.errors import InvalidRequest, QuotaExceeded, UnsupportedParameter
from server.finetune.config import TrainerConfig
from server.finetune.records import JobRequest
from server.finetune.results import model_name


def check(request: JobRequest, job_id: str, config: TrainerConfig) -> None:
    """Raises InvalidRequest, UnsupportedParameter."""
    name = model_name(request.model, request.suffix, job_id)
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequest(
            f"`{name:.300}` would be no name for a model: at most 256 letters, digits and . : @ / + - _ are. Serve "
            "the base model under another name (--served-model-name).",
            param="model",
        )
    if (request.hyperparameters.rank or 0) > config.max_rank:
        raise InvalidRequest(
            f"lora.rank is {request.hyperparameters.rank}; this server serves adapters up to rank "
            f"{config.max_rank} (--max-lora-rank).",
            param=f"{request.place}.lora.rank",
        )
    if request.is_full and config.max_full_parameters == 0:
        raise UnsupportedParameter(
            "training_type 'full' is turned off on this server (--fine-tuning-max-full-parameters 0).",
            param=f"{request.place}.training_type",
        )


def too_many_models(config: TrainerConfig) -> QuotaExceeded:
    return QuotaExceeded(
        f"The server keeps {config.max_full_models} fully tuned models (with those that are being made), which is its "
        "limit: delete one first."
    )


def too_many_jobs(most: int) -> QuotaExceeded:
    return QuotaExceeded(f"The server has {most} fine-tuning jobs that have not ended, which is its limit.")
