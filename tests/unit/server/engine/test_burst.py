"""When a burst begins, who is of it, and when it is over."""

from models.batch import SamplingParams
from server.engine.burst import LEAST, TOGETHER, Burst
from server.engine.messages import AddRequest
from server.engine.request import Request
from server.engine.token_ids import TokenIds


def request(arrival: float, first_token: float = 0.0) -> Request:
    message = AddRequest("r", TokenIds([1]), SamplingParams(), b"a")
    made = Request(message, sequence_number=0, eos_token_ids=(), max_model_len=10, now=arrival)
    made.first_token_time = first_token
    return made


def at(burst: Burst, now: float, waiting: int, decoding: int = 0, others: int = 0, first: float = 1.0) -> Burst:
    """A look at tenant a with so many requests, and at another one with `others` that decode; the first of those that
    wait came at `first`."""
    counts = ({b"a": waiting}, {b"a": decoding, b"b": others})
    burst.look(*({tenant: n for tenant, n in count.items() if n} for count in counts), first, now)
    return burst


def test_a_burst_is_several_that_wait_and_more_than_decode() -> None:
    waits = request(1.0)
    assert waits in at(Burst(), 2.0, LEAST)
    assert waits not in at(Burst(), 2.0, LEAST - 1)
    assert waits not in at(Burst(), 2.0, 10, decoding=10)


def test_it_lasts_until_none_of_it_waits_however_many_decode_by_then() -> None:
    burst = at(Burst(), 2.0, 64)
    assert request(1.0, 3.0) in at(burst, 4.0, 1, 63)
    assert request(1.0, 3.0) not in at(burst, 5.0, 0, 64)
    assert request(1.0, 3.0) not in at(burst, 6.0, 1, 63), "it does not begin again"


def test_who_comes_later_does_not_keep_it_going() -> None:
    burst = at(Burst(), 2.0, 64)
    assert request(1.0, 3.0) in at(burst, 4.0, 2, 62)
    assert request(1.0, 3.0) not in at(burst, 5.0, 2, 64, first=3.0)


def test_neither_who_decoded_before_nor_who_came_after_is_of_it() -> None:
    burst = at(at(Burst(), 2.0, 64), 4.0, 16, 48)
    assert request(0.0, 1.5) not in burst
    assert request(0.0, 2.5) in burst, "who had waited until then"
    assert request(1.0, 2.5) in burst
    assert request(3.0) not in burst
    assert request(3.0) in at(burst, 5.0, 64, 48), "it grew"


def test_the_first_of_it_may_have_been_served_before_the_others_were_there() -> None:
    burst = at(Burst(), 2.0, 64)
    assert request(1.0 - TOGETHER, 1.5) in burst
    assert request(0.9 - TOGETHER, 1.5) not in burst


def test_there_is_none_while_anybody_else_is_there() -> None:
    burst = at(Burst(), 2.0, 64)
    assert request(1.0) not in at(burst, 3.0, 64, others=1)
    assert request(1.0) in at(burst, 4.0, 16, 48), "who was of it is again when the other has gone"
    burst.look({b"a": 64, b"b": 1}, {}, 1.0, 5.0)
    assert request(1.0) not in burst
    burst.look({b"b": 64}, {}, 1.0, 6.0)
    assert request(0.0, 2.5) not in burst, "that of another tenant"
