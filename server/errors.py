"""Every failure a caller can see, and the one table from it to status, type and code. Must not know FastAPI or tokens.

LongwaveError
├── InvalidRequest            400  invalid_request_error
│   ├── ContextLengthExceeded 400  context_length_exceeded
│   ├── UnsupportedParameter  400  unsupported_parameter
│   ├── InvalidFile           400  invalid_file
│   ├── InvalidAdapter        400  invalid_adapter
│   ├── NoChatTemplate        400  no_chat_template
│   ├── InvalidJobStatus      400  invalid_job_status
│   ├── InvalidApiKey         401  invalid_api_key
│   ├── ModelNotFound         404  model_not_found
│   ├── FileMissing           404
│   ├── JobMissing            404
│   ├── TrainingMissing       404
│   ├── RouteNotFound         404  unknown_url
│   ├── MethodNotAllowed      405  method_not_allowed
│   ├── AdapterExists         409  adapter_exists
│   ├── SequenceConflict      409  sequence_conflict
│   ├── TrainingDiverged      400  training_diverged
│   ├── RequestTimeout        408  request_timeout
│   ├── PayloadTooLarge       413  payload_too_large
│   ├── UnsupportedMediaType  415  unsupported_media_type
│   └── HeadersTooLarge       431  headers_too_large
├── QuotaExceeded             429  insufficient_quota
├── InsufficientStorage       507  insufficient_storage
│   └── StorageBusy           503  storage_is_busy        (+ Retry-After)
├── ServerOverloaded          503  server_is_overloaded   (+ Retry-After)
│   └── ServerDraining        503  server_is_draining     (+ Retry-After)
├── EngineUnavailable         503  engine_unavailable     (+ Retry-After)
├── TrainingModelLost         500  training_model_lost
├── TrainingOutOfMemory       500  out_of_memory
└── RequestFailedError        500  server_error
"""

import math
import random
from typing import ClassVar

MIN_RETRY_AFTER, MAX_RETRY_AFTER = 1, 10  # seconds
MAX_OBEYED = 119  # of a longer Retry-After OpenAI's client makes half a second


def jittered_retry_after() -> int:
    """Whole seconds, spread so that refused clients do not come back all at once."""
    return random.randint(MIN_RETRY_AFTER, MAX_RETRY_AFTER)


def retry_after_in(seconds: float) -> int:
    """Of what is expected to be there again in so many: whole seconds, spread."""
    return min(math.ceil(seconds), MAX_OBEYED - MAX_RETRY_AFTER) + jittered_retry_after()


class LongwaveError(Exception):
    """A failure with the shape OpenAI's clients expect. Class attributes are the defaults of the table above."""

    status: int = 500
    type: str = "server_error"
    code: str | None = "server_error"
    retries: ClassVar[bool] = False  # whether waiting helps: such an error carries Retry-After
    is_final: bool = False  # the same request fails again: OpenAI's client, which would send it, is told not to

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.status if status is None else status
        self.type = self.type if type is None else type
        self.code = self.code if code is None else code
        self.param = param
        self.retry_after = jittered_retry_after() if retry_after is None and self.retries else retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON reply: all four keys, always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.is_final:
            return {"x-should-retry": "false"}
        if self.retry_after is None:
            return {}
        # Whole seconds bring all who were refused in one moment back in the same ten; OpenAI's client reads this first.
        spread = 1000 * self.retry_after + random.randrange(1000)
        return {"retry-after": str(self.retry_after), "retry-after-ms": str(spread)}


class InvalidRequest(LongwaveError):  # noqa: N818 - reads as the reply does
    status = 400
    type = "invalid_request_error"
    code: str | None = None


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class InvalidFile(InvalidRequest):
    """An uploaded file that is not what its purpose needs; the message names the line."""

    code = "invalid_file"


class InvalidAdapter(InvalidRequest):
    """A LoRA adapter that cannot be served beside this model; the message says what is wrong with it."""

    code = "invalid_adapter"


class NoChatTemplate(InvalidRequest):
    """A chat with a model that has none: it takes plain prompts only."""

    code = "no_chat_template"


class InvalidJobStatus(InvalidRequest):
    """What cannot be done with a fine-tuning job in its present status."""

    code = "invalid_job_status"


class InvalidApiKey(InvalidRequest):
    status = 401
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class FileMissing(InvalidRequest):
    """No such file, or another key's: OpenAI gives no code."""

    status = 404


class JobMissing(InvalidRequest):
    """No such fine-tuning job, event or checkpoint, or another key's."""

    status = 404


class TrainingMissing(InvalidRequest):
    """No such model, future or saved weights of low-level training, or no longer, or another key's."""

    status = 404


class RouteNotFound(InvalidRequest):
    status = 404
    code = "unknown_url"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class AdapterExists(InvalidRequest):
    """The name is taken; or busy, which is not final."""

    status = 409
    code = "adapter_exists"
    is_final = True  # OpenAI's client takes 409 for a lock that somebody else lets go of


class SequenceConflict(InvalidRequest):
    """A seq_id, or an idempotency key, that has another call."""

    status = 409
    code = "sequence_conflict"
    is_final = True


class TrainingDiverged(InvalidRequest):
    """A loss or a gradient that is not finite: of what the caller sent, or has done to the weights."""

    code = "training_diverged"


class RequestTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


class PayloadTooLarge(InvalidRequest):
    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(InvalidRequest):
    status = 431
    code = "headers_too_large"


class QuotaExceeded(LongwaveError):  # noqa: N818
    """Waiting does not help: something has to be deleted, unloaded or cancelled."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    is_final = True


class InsufficientStorage(LongwaveError):  # noqa: N818
    status = 507
    code = "insufficient_storage"
    is_final = True


class StorageBusy(InsufficientStorage):
    """Another server on this data directory holds what this one has to write, for longer than it waits."""

    status = 503
    type = "service_unavailable_error"
    code = "storage_is_busy"
    retries = True
    is_final = False


class ServerOverloaded(LongwaveError):  # noqa: N818
    status = 503
    type = "service_unavailable_error"
    code = "server_is_overloaded"
    retries = True


class ServerDraining(ServerOverloaded):
    code = "server_is_draining"


class EngineUnavailable(LongwaveError):  # noqa: N818
    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"
    retries = True


class TrainingModelLost(LongwaveError):  # noqa: N818
    """Its process has ended. The message says from which saved weights to go on."""

    code = "training_model_lost"
    is_final = True


class TrainingOutOfMemory(LongwaveError):  # noqa: N818
    """The device has too little memory for this call; the model is as it was, without a gradient."""

    code = "out_of_memory"
    is_final = True


class RequestFailedError(LongwaveError):
    """The request was good and we failed it. The message is for the caller: no details of ours in it."""
