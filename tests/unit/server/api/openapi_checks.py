"""What schemathesis checks of every reply beside its own checks, and a count of the replies. test_fuzzed_openapi.py
gives it this file."""

import atexit
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import openapi_cases
import schemathesis

#: Of the server's own code and memory. Clients' text comes back in messages, so it must not look like these.
_LEAKS = re.compile(r"Traceback|site-packages|/server/|0x[0-9a-f]{8,}")
_ERROR = {"message", "type", "param", "code"}
#: What every event of a stream is, and has: the description speaks of whole replies alone.
_CHUNK = {"id", "created", "model", "choices"}
_EVENTS = {
    "/v1/chat/completions": ("chat.completion.chunk", _CHUNK),
    "/v1/completions": ("text_completion", _CHUNK),
    openapi_cases.JOB + "/events": ("fine_tuning.job.event", {"id", "created_at", "level", "message", "type", "data"}),
}

_replies: Counter[tuple[str, int, str]] = Counter()


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    openapi_cases.meet(case)


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    openapi_cases.learn(case, response)
    _replies[openapi_cases.operation(case), response.status_code, _media_type(response)] += 1


@atexit.register
def _tell_the_test() -> None:
    replies = [[*reply, count] for reply, count in _replies.items()]
    Path(os.environ["FUZZED_REPLIES"]).write_text(json.dumps(replies))


@schemathesis.check
def errors_are_openais(_context: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400 and case.method != "HEAD":
        error = response.json()["error"]
        assert set(error) == _ERROR, f"another shape than OpenAI's: {error}"
        assert isinstance(error["message"], str), error
        assert isinstance(error["type"], str), error


@schemathesis.check
def streams_are_whole(_context: Any, response: Any, case: Any) -> None:
    if _media_type(response) == "text/event-stream":
        kind, fields = _EVENTS[case.path]
        *events, end = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert end == "[DONE]", end
        for event in map(json.loads, events):
            assert event.get("object") == kind, event
            assert fields <= set(event), event


@schemathesis.check
def nothing_leaks(_context: Any, response: Any, _case: Any) -> None:
    found = _LEAKS.search(response.text)
    assert found is None, f"a reply shows {found and found[0]!r}"


def _media_type(response: Any) -> str:
    value: str = response.headers.get("content-type", [""])[0]
    return value.partition(";")[0]
