"""Cases that meet something: where one has a name or an id that fits its schema, one that there is takes its place. A
description cannot say which models, files and jobs there are: without this nearly every reply is a refusal. Every
fourth case stays as it was made, but for those that ask for a stream: of an operation there may be one."""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import httpx
from openapi_bodies import FITTING
from openapi_things import JOBS, LIMIT, MODEL, PREFERENCE, TRAINING, Things
from schemathesis.core.parameters import ParameterLocation

LEFT = 4
LONGEST_ID = 64  # in a part that is wrong: the least that any schema allows, or the id might be what is wrong
HIGHEST_NUMBER = 2**53 - 1  # of a call
AT_ONCE = 8  # calls of a model that nobody waits for: with twice as many open, the server refuses more with 503
JOB = JOBS + "/{fine_tuning_job_id}"

Find = Callable[[], Any]


class Known:
    """What there is, by turns where there is more than one; what a call uses up is new."""

    def __init__(self, things: Things) -> None:
        self._things = things
        self._live: dict[str, str] = {}  # models, by operation: no other's calls take their numbers
        self._calls: Counter[str] = Counter()  # that were taken, by live model
        jobs = {job["status"]: str(job["id"]) for job in things.data(JOBS)}
        done = jobs["succeeded"]
        tuned = [card["id"] for card in things.data("/v1/models") if card["id"].startswith("ft:")]
        self._file, self._preferences = things.file(), things.file(PREFERENCE)
        new_job = partial(things.job, self._file)
        saved = things.saved_weights(things.live_model())
        a_file = cycle([file["id"] for file in things.data("/v1/files")]).__next__
        a_job = cycle([*jobs.values(), new_job()]).__next__
        an_event = cycle([event["id"] for event in things.data(f"{JOBS}/{done}/events")]).__next__
        a_checkpoint = cycle([checkpoint["id"] for checkpoint in things.data(f"{JOBS}/{done}/checkpoints")]).__next__
        self.in_path: dict[str, Find] = {
            "GET /v1/models/{model}": cycle([MODEL, things.adapter()]).__next__,
            "DELETE /v1/models/{model}": lambda: tuned.pop() if tuned else MODEL,
            "GET /v1/files/{file_id}": a_file,
            "GET /v1/files/{file_id}/content": a_file,
            "DELETE /v1/files/{file_id}": things.file,
            f"GET {JOB}": a_job,
            f"GET {JOB}/events": lambda: done,  # a stream lasts for as long as its job
            f"GET {JOB}/checkpoints": lambda: done,
            f"POST {JOB}/cancel": new_job,
            f"POST {JOB}/pause": new_job,
            f"POST {JOB}/resume": lambda: things.paused_job(self._file),
            f"DELETE {TRAINING}/models/{{model_id}}": things.live_model,
        }
        self.after: dict[str, Find] = {
            "GET /v1/files": a_file,
            f"GET {JOBS}": a_job,
            f"GET {JOB}/events": an_event,
            f"GET {JOB}/checkpoints": a_checkpoint,
        }
        self.in_headers: dict[str, Find] = {"idempotency-key": things.new_name, "last-event-id": an_event}
        self._in_bodies: dict[str, Find] = {
            "model": lambda: MODEL,
            "base_model": lambda: MODEL,
            "request_id": cycle(things.ended_calls()).__next__,
        }
        self._in_bodies_of: dict[str, dict[str, Find]] = {
            "POST /v1/load_lora_adapter": {"lora_name": things.new_name},
            "POST /v1/unload_lora_adapter": {"lora_name": things.adapter},
            f"POST {TRAINING}/unload_model": {"model_id": things.live_model, "seq_id": lambda: 1},
            f"POST {TRAINING}/load_weights": {"path": lambda: saved},
            f"POST {TRAINING}/delete_weights": {"path": lambda: things.saved_weights(self._live_model("deleting"))},
        }

    def in_body(self, name: str, body: dict[str, Any]) -> dict[str, Find]:
        """Of an operation; a file's kind goes with the job's method."""
        method = body.get("method")
        file = self._preferences if isinstance(method, dict) and method.get("type") == "dpo" else self._file
        found: dict[str, Find] = {
            "training_file": lambda: file,
            "validation_file": lambda: file,
            "model_id": lambda: self._live_model(name),
            "seq_id": lambda: self._calls[self._live_model(name)] + 1,
        }
        return found | self._in_bodies | self._in_bodies_of.get(name, {})

    def learn(self, future: dict[str, Any]) -> None:
        self._calls[future["model_id"]] = future["seq_id"]
        if future["seq_id"] % AT_ONCE == 0:
            self._things.end(future)

    def _live_model(self, name: str) -> str:
        if name not in self._live:
            self._live[name] = self._things.live_model()
        return self._live[name]


_known = Known(Things(httpx.Client(base_url=os.environ["FUZZED_SERVER"], timeout=LIMIT)))
_cases: Counter[str] = Counter()


def operation(case: Any) -> str:
    return f"{case.method} {case.path}"


def meet(case: Any) -> None:
    name = operation(case)
    _cases[name] += 1
    streams = isinstance(case.body, dict) and case.body.get("stream") is True
    if _cases[name] % LEFT == 0 and not streams:
        return
    is_wrong_at = case.meta.is_negative_at
    if name in _known.in_path and not is_wrong_at(ParameterLocation.PATH):
        case.path_parameters.update(dict.fromkeys(case.path_parameters, _known.in_path[name]()))
    if name in _known.after:
        _replace(case.query, {"after": _known.after[name]}, is_wrong=is_wrong_at(ParameterLocation.QUERY))
    _replace(case.headers, _known.in_headers, is_wrong=is_wrong_at(ParameterLocation.HEADER))
    if isinstance(case.body, dict):
        is_wrong = is_wrong_at(ParameterLocation.BODY)
        _replace(case.body, _known.in_body(name, case.body), is_wrong=is_wrong)
        if name in FITTING and not is_wrong:
            FITTING[name](case.body)


def learn(case: Any, response: Any) -> None:
    """From a future: how many calls its model has taken."""
    if case.path.startswith(TRAINING) and response.status_code == 200 and "seq_id" in (told := response.json()):
        _known.learn(told)


def _replace(part: Any, known: dict[str, Find], *, is_wrong: bool) -> None:
    """In a part of a case; what is wrong stays so."""
    for name, find in known.items():
        value = part.get(name)
        if value is not None and (not is_wrong or _fits(value)):
            part[name] = find()


def _fits(value: Any) -> bool:
    if type(value) is int:
        return 1 <= value <= HIGHEST_NUMBER
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_ID
