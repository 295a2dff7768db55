"""The faults: what is sent, in which field, and what OpenAI's contract makes of it. Knows no server and no outcome.

A request that OpenAI refuses by a documented bound must be refused. Where a server can do what is asked without harm
(fewer stops, a temperature of 3, one model that needs no name), an answer is right as well.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import fault_clients as clients
from benchmarks.fault_clients import Target
from benchmarks.fault_outcomes import Expected, Reply

HUGE = 50 * 2**20  # bytes
NO_TOKEN = 2**31 - 2
REFUSED = Expected()
EITHER = Expected(answer=True)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: Callable[[Target], Reply]
    expected: Expected
    param: str | None = None  # which an error should name
    is_request: bool = True  # an answer of its own, in OpenAI's shape or not; else a good request's, beside the fault
    quick: bool = True
    ends_server: bool = False


def body(target: Target, changes: dict[str, Any], without: str | None = None) -> dict[str, Any]:
    """A good small request, but for some fields."""
    return {name: value for name, value in (target.good_body() | changes).items() if name != without}


def field(name: str, param: str, value: Any, expected: Expected = REFUSED, **more: Any) -> Fault:
    """One field has a value that it must not have."""
    return Fault(name, lambda t: clients.post(t, json.dumps(body(t, {param: value, **more})).encode()), expected, param)


def missing(name: str, param: str, expected: Expected) -> Fault:
    return Fault(name, lambda t: clients.post(t, json.dumps(body(t, {}, param)).encode()), expected, param)


def literal(name: str, param: str, text: str, expected: Expected = REFUSED) -> Fault:
    """One field has a value that json.dumps would not write, and what is no JSON has no fields to name."""

    def act(target: Target) -> Reply:
        whole = json.dumps(body(target, {param: "HERE"}))
        return clients.post(target, whole.replace('"HERE"', text).encode())

    return Fault(name, act, expected)


def says(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def too_long(target: Target) -> Reply:
    prompt = "wave " * (target.context + target.context // 8)
    return clients.post(target, json.dumps(body(target, {"messages": says(prompt)})).encode())


def good(within_ms: float) -> Expected:
    """Of the good request beside a fault."""
    return Expected(frozenset(), answer=True, within_ms=within_ms)


def faults(soon_ms: float) -> tuple[Fault, ...]:
    """All, in the order in which they are sent. `soon_ms`: within which a good request must be answered beside a
    client that misbehaves."""
    name_of_none = "no-such-model"
    text = r'[{"role": "user", "content": "Say hello%s."}]'
    found = (
        Fault("a body that is no JSON", lambda t: clients.post(t, b'{"model": '), REFUSED),
        Fault("a JSON array as body", lambda t: clients.post(t, b"[1, 2, 3]"), REFUSED),
        replace(field("a body of 50 MB (in metadata)", "metadata", {"padding": "x" * HUGE}), param=None),
        missing("no model", "model", Expected(frozenset({400, 404, 422}), answer=True)),
        field("an unknown model", "model", name_of_none, Expected(frozenset({400, 404}))),
        missing("no messages", "messages", REFUSED),
        field("empty messages", "messages", []),
        field("an unknown role", "messages", says("Hi.", "wizard")),
        field("a number as content", "messages", says(7)),
        field("temperature -1", "temperature", -1),
        field("temperature 3", "temperature", 3, EITHER),
        field('temperature "hot"', "temperature", "hot"),
        field("top_p 0", "top_p", 0, EITHER, temperature=1),
        field("top_p 2", "top_p", 2, temperature=1),
        field("max_tokens 0", "max_tokens", 0),
        field("max_tokens -1", "max_tokens", -1),
        field("max_tokens 10**9", "max_tokens", 10**9, EITHER),
        field("n 0", "n", 0),
        field("20 stop strings", "stop", [f"zq{number}" for number in range(20)], EITHER),
        field("logit_bias for no token", "logit_bias", {str(NO_TOKEN): 50}),
        literal("NaN in the JSON", "temperature", "NaN"),
        literal("Infinity in the JSON", "temperature", "Infinity"),
        literal("half a surrogate pair", "messages", text % r"\ud800", EITHER),
        literal("a NUL character", "messages", text % r"\u0000", EITHER),
        Fault("an unknown URL", lambda t: clients.post(t, b"{}", "/v1/nowhere"), Expected(frozenset({404}))),
        Fault("GET on a POST route", clients.get, Expected(frozenset({404, 405}))),
        field("a stream of max_tokens -1", "max_tokens", -1, stream=True),
        Fault("a prompt beyond the context", too_long, REFUSED, "context"),
    )
    bystanders = (
        ("half a body, then silence", clients.beside_half_a_body, True),
        ("64 connections that say nothing", clients.beside_silence, True),
        ("four clients leave in their streams", clients.after_left_streams, False),
        ("a client leaves in a long prompt", clients.after_left_prompt, False),
    )
    ends = Expected(frozenset(), answer=True, exit_codes=frozenset({0, -15, 143}))  # 15 is SIGTERM's own
    return (
        *found,
        *(Fault(name, act, good(soon_ms), is_request=False, quick=quick) for name, act, quick in bystanders),
        Fault("SIGTERM in a stream", clients.ended, ends, is_request=False, quick=False, ends_server=True),
    )
