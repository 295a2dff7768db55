"""The door: what it refuses, and that it counts what it lets in."""

from contextlib import ExitStack, suppress
from typing import Any

import pytest

from server.engine.admission import Admission
from server.engine.config import EngineConfig
from server.errors import ContextLengthExceeded, InvalidRequest, ServerOverloaded


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(99, None, True), (100, None, False), (60, 40, True), (61, 40, False), (1, 99, True), (1000, 1, False)],
)
def test_only_what_can_fit_passes(prompt: int, max_tokens: int | None, fits: bool) -> None:
    admission = Admission(1, max_model_len=100)
    if fits:
        admission.check(prompt, max_tokens)
        return
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens") as refused:
        admission.check(prompt, max_tokens)
    assert refused.value.status == 400
    assert refused.value.code == "context_length_exceeded"


def test_a_full_server_refuses_at_once_and_says_when_to_come_back() -> None:
    admission = Admission.of(EngineConfig(model="fake", max_num_seqs=2, max_queued_requests=1))
    with admission.reserve(2):
        with admission.reserve():
            with pytest.raises(ServerOverloaded) as refused, admission.reserve():
                pytest.fail("there was no room")
            assert refused.value.retry_after is not None
        with pytest.raises(ServerOverloaded), admission.reserve(2):
            pytest.fail("there was no room for two")
    assert admission.num_requests == 0


def test_what_no_waiting_makes_possible_is_not_told_to_come_back() -> None:
    admission = Admission(3)
    with pytest.raises(InvalidRequest, match="at most 3") as refused, admission.reserve(4):
        pytest.fail("there is never room for four")
    assert (refused.value.status, refused.value.param, refused.value.retry_after) == (400, "n", None)
    with admission.reserve(3):
        assert admission.num_requests == 3


def test_one_keys_flood_does_not_shut_out_another_key() -> None:
    admission = Admission(8)
    with ExitStack() as open_ones:
        for _ in range(8):
            open_ones.enter_context(admission.reserve(1, b"flood"))
        for _ in range(4):  # an equal part
            open_ones.enter_context(admission.reserve(1, b"quiet"))
        open_ones.enter_context(admission.reserve(2, b"third"))  # 8 / 3 of it
        for tenant in (b"flood", b"quiet", b"third", b""):
            with pytest.raises(ServerOverloaded, match="14 requests are open"), admission.reserve(3, tenant):
                pytest.fail(f"there was no room for {tenant!r}")
    assert admission.num_requests == 0
    with admission.reserve(8, b"flood"):
        assert admission.num_requests == 8


def test_however_many_keys_come_the_room_is_bounded() -> None:
    admission = Admission(12)
    with ExitStack() as open_ones:
        for number in range(100):
            tenant = b"%d" % number
            with suppress(ServerOverloaded):
                while True:
                    open_ones.enter_context(admission.reserve(1, tenant))
        assert admission.num_requests == 12 + 6 + 4 + 3 + 2 + 2 + 1 + 1 + 1 + 1 + 1 + 1


def test_a_failed_request_gives_its_place_back() -> None:
    admission = Admission(1)
    with pytest.raises(ValueError), admission.reserve():
        raise ValueError
    with admission.reserve():
        assert admission.num_requests == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 48},
        {"max_num_seqs": 0},
        {"max_num_seqs": 512, "max_num_batched_tokens": 256},
        {"gpu_memory_utilization": 0.0},
        {"max_model_len": 1},
        {"num_gpu_blocks_override": 1},
        {"queue_timeout": 0.0},
        {"runner": "nowhere"},
    ],
)
def test_a_configuration_that_can_not_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineConfig(model="fake", **wrong)


def test_a_step_has_fewer_rows_on_a_cpu_unless_asked_for_and_has_room_for_every_sequence() -> None:
    assert EngineConfig(model="m").step_tokens("cuda") == 8192
    assert EngineConfig(model="m").step_tokens("cpu") == 2048
    assert EngineConfig(model="m", max_num_seqs=3000).step_tokens("cpu") == 3000
    assert EngineConfig(model="m", max_num_batched_tokens=4096).step_tokens("cpu") == 4096


def test_streams_are_protected_from_prompts_as_the_device_can_or_as_it_was_asked_for() -> None:
    of_a_gpu, of_a_cpu = EngineConfig(model="m").tpot_target("cuda"), EngineConfig(model="m").tpot_target("cpu")
    assert [of_a_gpu.of(floor) for floor in (0.005, 0.02)] == [0.028, pytest.approx(0.06)]
    assert [of_a_cpu.of(floor) for floor in (0.03, 1.5)] == [0.06, 3.0]
    for device in ("cuda", "cpu"):
        assert EngineConfig(model="m", tpot_target_ms=50.0).tpot_target(device).of(0.03) == 0.05
    with pytest.raises(ValueError, match="tpot_target_ms"):
        EngineConfig(model="m", tpot_target_ms=0.0)
