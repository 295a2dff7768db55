"""An error of a trainer -> the process's last word: whether the job can never succeed, has no room, or may go right the
next time. Texts are for the job's owner: no paths and no details of ours; the log has the rest."""

import errno
import logging

from models.errors import ModelLoadError
from models.training import (
    DiskFullError,
    DivergedError,
    ModelTooLargeError,
    OtherRunError,
    OutOfMemoryError,
    PlanError,
)
from server.finetune.dataset import DatasetError
from server.finetune.messages import Crashed, NoRoom, Refused

logger = logging.getLogger(__name__)

OTHER_RUN = "The job's checkpoints do not fit it any more: its files or the server's base model have changed since then"


def last_word(error: Exception, *, answering: bool = False) -> Refused | NoRoom | Crashed:
    """`answering`: whether requests were open."""
    refused = _refusal(error)
    if refused is not None:
        return refused
    logger.error("the trainer failed", exc_info=error)
    return _no_room(error, answering) or Crashed(_reason(error))


def _refusal(error: Exception) -> Refused | None:
    """What will go wrong every time."""
    match error:
        case DatasetError(param=param):
            return Refused(f"invalid_{param}", str(error), param)
        case OtherRunError():  # its message names folders
            logger.error("%s", error)
            return Refused("checkpoint_mismatch", OTHER_RUN)
        case PlanError() | DivergedError():
            code = "training_diverged" if isinstance(error, DivergedError) else "invalid_hyperparameters"
            return Refused(code, str(error), "hyperparameters")
        case NotImplementedError():  # UnsupportedModelError is one, of a room that would bring torch along
            return Refused("unsupported_model", f"The base model cannot be trained on this server: {error}", "model")
    return None


def _no_room(error: Exception, answering: bool) -> NoRoom | None:
    if isinstance(error, ModelTooLargeError):
        return NoRoom(str(error), on_disk=False, answering=answering)
    if isinstance(error, OutOfMemoryError | MemoryError):
        what = getattr(error, "what", None)
        text = "The device has too little memory for the job" + ("" if what is None else f": {what}")
        return NoRoom(text, on_disk=False, answering=answering)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return NoRoom("The server's disk is full", on_disk=True) if full or isinstance(error, DiskFullError) else None


def _reason(error: Exception) -> str:
    if isinstance(error, ModelLoadError):
        return "The model could not be loaded"
    return f"The trainer failed ({type(error).__name__})"
