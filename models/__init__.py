"""Models on batches: weights, patched attention, runner, sampler. Knows no HTTP, no users, no queue.

Importing this room is light: torch and transformers come in with the first call.
"""


def patch() -> None:
    """Makes `attn_implementation="longwave"` known to transformers (`models.patching.register`)."""
    from models.patching import register

    register()


__all__ = ["patch"]
