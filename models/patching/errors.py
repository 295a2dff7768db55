"""The two ways a Hugging Face model can be refused. Knows no model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attention_backend import UnsupportedError
from models.errors import WRONG_CONFIG


class UnsupportedModelError(NotImplementedError):
    """A model family that would bypass the patched attention, or run wrong through it. Raised at load."""


class UnsupportedCallError(UnsupportedError):
    """A model asked its attention or mask function for something that would not be computed exactly."""


@contextmanager
def refusing_calls(model: object) -> Iterator[None]:
    """At load: a model whose calls are refused is one that is not served."""
    try:
        yield
    except UnsupportedCallError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {error}") from error


@contextmanager
def refusing_failures(model: object) -> Iterator[None]:
    """At load, around transformers' own forwards: a configuration that it made a model of may be none that it can run.
    What a device lacks, or how it fails, is no fault of that."""
    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (*WRONG_CONFIG, RuntimeError) as error:  # RuntimeError: of sizes that do not go together
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run as its config.json has it: {reason}"
        ) from error
