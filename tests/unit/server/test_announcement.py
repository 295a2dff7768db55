"""What a server prints once it serves."""

import subprocess
from types import SimpleNamespace
from typing import cast

import pytest

from server.announcement import announce
from server.client_settings import ClientSettings
from server.lifecycle import Lifecycle

WARNING = "No API key is set"


def said(capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[str, str]:
    ready = SimpleNamespace(kernels={"full_attention/decode": "k"}, device="cpu", dtype="float32", max_model_len=64)
    lifecycle = SimpleNamespace(
        settings=SimpleNamespace(**{"model_names": ["tiny"], "api_key": ()} | settings),
        generator=SimpleNamespace(ready=ready),
    )
    announce(cast(Lifecycle, lifecycle), 8000)
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "somewhere"])
def test_who_listens_beyond_this_machine_without_a_key_is_told(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{WARNING}: whoever reaches {host} port 8000 is answered" in said(capsys, host=host)[1]
    assert not said(capsys, host=host, api_key=("secret",))[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_on_this_machine_alone_nothing_is_said_of_keys(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not said(capsys, host=host)[1]


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("192.0.2.7", "http://192.0.2.7:8000")],
)
def test_the_address_is_one_that_can_be_asked(host: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, host=host, api_key=("secret",))

    assert f"serves tiny on {url} (cpu" in out
    assert f"curl {url}/v1/chat/completions" in out
    assert "secret" not in out


@pytest.mark.parametrize("variable", ["one", "one,two", "one, two"])
def test_a_shell_finds_the_first_key_where_the_keys_come_from_the_variable(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGWAVE_API_KEY", variable)
    command = said(capsys, host="127.0.0.1", api_key=ClientSettings().api_key)[0].splitlines()[-1]
    sent = subprocess.check_output(
        ["sh", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}; {command}"], text=True
    ).splitlines()

    assert "one" not in command
    assert "Authorization: Bearer one" in sent


def test_no_variable_is_named_where_the_keys_do_not_come_from_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ClientSettings(api_key="flag").api_key
    for variable in ("", "other"):
        monkeypatch.setenv("LONGWAVE_API_KEY", variable)
        assert '-H "Authorization: Bearer <key>"' in said(capsys, host="127.0.0.1", api_key=keys)[0]
