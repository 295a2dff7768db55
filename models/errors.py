"""Why a model cannot be loaded. Messages are written for the person who started the server."""

#: What transformers' classes raise for a config.json that makes no model.
WRONG_CONFIG = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)


class ModelLoadError(RuntimeError):
    """The model exists but cannot be served as it is; the message says why and what to do."""


class ModelNotFoundError(ModelLoadError):
    """No bundled model, folder or hub repository of that name."""


class AdapterError(RuntimeError):
    """The adapter cannot be served beside this model; the message says why. Nothing has changed."""
