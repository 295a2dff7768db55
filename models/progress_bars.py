"""transformers draws progress bars on standard error, in the middle of a server's log. Knows nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod

from tqdm.std import tqdm
from transformers.utils import logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Runs the block without them, then restores the user's choice."""
    shown = logging.is_progress_bar_enabled()
    draw = tqdm.__init__
    logging.disable_progress_bar()
    tqdm.__init__ = partialmethod(draw, disable=True)  # what reads GGUF files asks tqdm itself
    try:
        yield
    finally:
        tqdm.__init__ = draw
        if shown:
            logging.enable_progress_bar()
