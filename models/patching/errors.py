"""The two ways a Hugging Face model can be refused. Knows no model."""

from collections.abc import Iterator
from contextlib import contextmanager

from attention_backend import UnsupportedError


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
