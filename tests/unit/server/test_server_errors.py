import pytest

from server import errors
from server.error_codes import from_code
from server.errors import LongwaveError


def tree(root: type[LongwaveError]) -> list[type[LongwaveError]]:
    return [root, *(error for child in root.__subclasses__() for error in tree(child))]


@pytest.mark.parametrize("kind", tree(LongwaveError), ids=lambda kind: kind.__name__)
def test_every_error_has_openais_four_keys(kind: type[LongwaveError]) -> None:
    body = kind("what happened").body()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == "what happened"


@pytest.mark.parametrize("kind", tree(LongwaveError), ids=lambda kind: kind.__name__)
def test_the_docstring_draws_the_tree(kind: type[LongwaveError]) -> None:
    assert kind.__name__ in str(errors.__doc__)
    if kind is not LongwaveError:
        line = next(line for line in str(errors.__doc__).splitlines() if f" {kind.__name__} " in line)
        assert str(kind.status) in line


@pytest.mark.parametrize("kind", tree(LongwaveError), ids=lambda kind: kind.__name__)
def test_only_503_says_when_to_come_back(kind: type[LongwaveError]) -> None:
    headers = kind("x").headers()
    assert ("retry-after" in headers) == (kind("x").status == 503)


@pytest.mark.parametrize("kind", tree(LongwaveError), ids=lambda kind: kind.__name__)
def test_what_is_final_sends_nobody_back(kind: type[LongwaveError]) -> None:
    assert kind("x").headers().get("x-should-retry") == ("false" if kind.is_final else None)
    error = kind("x")
    error.is_final = True
    assert "retry-after" not in error.headers()


@pytest.mark.parametrize("kind", [kind for kind in tree(LongwaveError) if kind.status == 409])
def test_a_conflict_is_final_since_openais_client_would_send_it_again(kind: type[LongwaveError]) -> None:
    assert kind("x").headers() == {"x-should-retry": "false"}


def test_retry_after_is_spread() -> None:
    waits = {errors.ServerOverloaded("x").retry_after for _ in range(500)}
    assert waits == set(range(1, 11))


def test_openais_client_obeys_whatever_it_is_told() -> None:
    """Up to two minutes, with the part of a second that is added."""
    assert {errors.retry_after_in(0.2) for _ in range(500)} == set(range(2, 12))
    assert {errors.retry_after_in(0) for _ in range(500)} == set(range(1, 11))
    assert max(errors.retry_after_in(1e6) for _ in range(500)) + 1 == 120


def test_who_was_refused_in_one_moment_does_not_come_back_in_another() -> None:
    """Nor before the seconds are over that other clients read."""
    headers = [errors.ServerOverloaded("x").headers() for _ in range(2000)]
    waits = sorted(int(one["retry-after-ms"]) for one in headers)
    assert all(0 <= int(one["retry-after-ms"]) - 1000 * int(one["retry-after"]) < 1000 for one in headers)
    assert all(later - earlier > 50 for earlier, later in zip(waits, waits[40:], strict=False)), "2 % within 50 ms"


@pytest.mark.parametrize("kind", tree(LongwaveError)[1:], ids=lambda kind: kind.__name__)
def test_a_code_that_crossed_a_process_border_gives_the_error_back(kind: type[LongwaveError]) -> None:
    if kind.code is not None and kind is not errors.RequestFailedError:
        assert type(from_code(kind.code, "x")) is kind


def test_unknown_codes_are_failures_of_ours() -> None:
    assert type(from_code("server_error", "x")) is errors.RequestFailedError
    assert type(from_code("never heard of", "x")) is errors.RequestFailedError
