"""The two ways a Hugging Face model can be refused. Knows no model."""

from attention_backend import UnsupportedError


class UnsupportedModelError(NotImplementedError):
    """A model family that would bypass the patched attention, or run wrong through it. Raised at load."""


class UnsupportedCallError(UnsupportedError):
    """A model asked its attention or mask function for something that would not be computed exactly."""
