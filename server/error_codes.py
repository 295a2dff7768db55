"""From the code that crossed a process border back to the error: engine messages carry codes only."""

from server.errors import LongwaveError, RequestFailedError


def _by_code(root: type[LongwaveError]) -> dict[str, type[LongwaveError]]:
    table = {} if root.code is None else {root.code: root}
    for child in root.__subclasses__():
        table = {**_by_code(child), **table}
    return table


def from_code(code: str, message: str) -> LongwaveError:
    """RequestFailedError for a code that nobody knows."""
    known = _by_code(LongwaveError).get(code)
    if known is None or known is LongwaveError:
        return RequestFailedError(message)
    return known(message)
