"""What schemathesis checks of every reply beside its own checks; test_fuzzed_openapi.py gives it this file."""

import re
from typing import Any

import schemathesis

#: Of the server's own code and memory. Clients' text comes back in messages, so it must not look like these.
_LEAKS = re.compile(r"Traceback|site-packages|/server/|0x[0-9a-f]{8,}")
_ERROR = {"message", "type", "param", "code"}


@schemathesis.check
def errors_are_openais(_context: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400 and case.method != "HEAD":
        error = response.json()["error"]
        assert set(error) == _ERROR, f"another shape than OpenAI's: {error}"
        assert isinstance(error["message"], str), error
        assert isinstance(error["type"], str), error


@schemathesis.check
def nothing_leaks(_context: Any, response: Any, _case: Any) -> None:
    found = _LEAKS.search(response.text)
    assert found is None, f"a reply shows {found and found[0]!r}"
