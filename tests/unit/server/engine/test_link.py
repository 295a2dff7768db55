"""Frames between the processes: what was sent is what comes, and what cannot be read is answered, not believed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.batch import SamplingParams
from server.engine.link import decode_to_engine, encode
from server.engine.messages import AbortRequests, AddRequest, LoadAdapter, RequestFailed, Shutdown, ToEngine
from server.engine.token_ids import TokenIds

SAMPLING = SamplingParams(max_tokens=7, logit_bias={3: -1.5}, seed=2**62, stop_token_ids=(1, 2))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.binary(max_size=40))
def test_a_request_comes_as_it_was_sent(ids: list[int], salt: bytes) -> None:
    sent = AddRequest("r", TokenIds(ids), SAMPLING, salt, "adapter")
    came = decode_to_engine(encode(sent))
    assert came == sent
    assert isinstance(came, AddRequest)
    assert isinstance(came.prompt_token_ids, TokenIds)
    assert list(came.prompt_token_ids) == ids


def test_a_prompt_crosses_in_four_bytes_a_token() -> None:
    frame = encode(AddRequest("r", TokenIds(range(100_000, 110_000)), SamplingParams()))
    assert len(frame) < 4 * 10_000 + 1000


@pytest.mark.parametrize("message", [AbortRequests(["a", "b"]), LoadAdapter(3, "name", "folder"), Shutdown()])
def test_other_messages_come_as_they_were_sent(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("prompt", [[1, 2], b"12345", "1234", None, {"1": 2}])
def test_a_prompt_that_is_no_integers_of_32_bits_fails_its_request_alone(prompt: object) -> None:
    fields = {"type": "AddRequest", "request_id": "r", "sampling": {}}
    failed = decode_to_engine(msgspec.msgpack.encode({**fields, "prompt_token_ids": prompt}))
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.code) == ("r", "server_error")
    came = decode_to_engine(msgspec.msgpack.encode({**fields, "prompt_token_ids": b"1234"}))
    assert isinstance(came, AddRequest)


def test_what_says_not_for_whom_it_is_is_dropped() -> None:
    assert decode_to_engine(b"\xc1") is None
    assert decode_to_engine(msgspec.msgpack.encode({"type": "AddRequest", "prompt_token_ids": b""})) is None
    assert decode_to_engine(msgspec.msgpack.encode([1])) is None
