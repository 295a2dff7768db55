"""transformers' report of weights that it could not convert, as one sentence: it logs a traceback for each of them, and
raises without a reason. Knows no weights."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

_ENTRY = re.compile(r"\n(?P<reason>.+)\nError: (?P<where>.+)")


class LoadReport(logging.Filter):
    """Keeps the first entry of a report of failed conversions, which is logged no more."""

    failure: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        entry = _ENTRY.search(text) if "CONVERSION" in text else None
        if entry is None:
            return True
        self.failure = f"{entry['reason']} ({entry['where']})"
        return False


@contextmanager
def read_report() -> Iterator[LoadReport]:
    """Of a model that is loaded inside."""
    report, transformers = LoadReport(), logging.getLogger("transformers.modeling_utils")
    transformers.addFilter(report)
    try:
        yield report
    finally:
        transformers.removeFilter(report)
