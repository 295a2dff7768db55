"""transformers draws progress bars on standard error, in the middle of a server's log. Knows nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Runs the block without them, then restores the user's choice."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
