import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from scripted_engine import LiveServer, Script, live_server, tiny_tokenizer, wait_until
from typer.testing import CliRunner

from server.cli import _begin_log, app, serve
from server.terminal import Conversation, connect, talk

runner = CliRunner()


def test_bad_flags_are_listed_together_and_exit_3() -> None:
    result = runner.invoke(app, ["serve", "--port", "99999", "--kv-cache-dtype", "fp4", "--api-key", "changeme"])
    assert result.exit_code == 3
    assert [line.split(":")[1].strip() for line in result.stderr.splitlines()] == ["port", "api-key", "kv-cache-dtype"]


def test_a_model_that_does_not_exist_exits_3() -> None:
    result = runner.invoke(app, ["serve", "no-such-model"])
    assert result.exit_code == 3
    assert "no-such-model" in result.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "{path} is no JSON: "),
        ("[]", "{path} holds no object, but []"),
        ('{"hidden_size": 64}', "{path}: model_type is missing, and has to be the name of a family"),
        (
            '{"model_type": "llama", "hidden_size": "abc"}',
            '{path}: hidden_size is "abc", and has to be a whole number above 0',
        ),
    ],
)
def test_a_model_whose_config_is_nonsense_is_one_line_and_exits_3(tmp_path: Path, config: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(config)
    result = runner.invoke(app, ["serve", str(tmp_path)])
    assert result.exit_code == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("longwave: " + said.replace("{path}", str(path)))
    found = runner.invoke(app, ["doctor", "--model", str(tmp_path), "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)["problems"][-1] == line.removeprefix("longwave: ")


def test_a_chat_template_that_is_none_exits_3_beside_what_else_is_wrong(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }}")
    result = runner.invoke(app, ["serve", "no-such-model", "--chat-template", str(template)])
    assert result.exit_code == 3
    first, second, *_ = result.stderr.splitlines()
    assert first.startswith(f"longwave: chat-template: {template} is no template: line 2: ")
    assert "no-such-model" in second


def test_a_chat_template_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGWAVE_CHAT_TEMPLATE", str(tmp_path / "missing.jinja"))
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 3
    assert "missing.jinja' cannot be read: No such file or directory" in result.stderr


def test_a_taken_port_is_known_before_anything_loads(server: LiveServer) -> None:
    result = runner.invoke(app, ["serve", "--port", str(server.port)])
    assert result.exit_code == 1
    assert "cannot listen" in result.stderr


@pytest.mark.parametrize(("level", "told"), [("DEBUG", "WARNING"), ("WARNING", "WARNING"), ("CRITICAL", "CRITICAL")])
def test_libraries_tell_no_more_than_the_server_does(level: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("httpx", "uvicorn"):
        monkeypatch.setattr(logging.getLogger(library), "level", logging.NOTSET)
    monkeypatch.setattr("server.cli.begin_log", lambda _level: None)
    _begin_log(level)
    assert {logging.getLevelName(logging.getLogger(library).level) for library in ("httpx", "uvicorn")} == {told}


def test_every_name_of_a_flag_is_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = runner.invoke(app, ["serve", "--help"]).stdout
    for name in serve.__annotations__.keys() - {"ctx", "positional_model", "return"}:
        assert f"--{name.replace('_', '-')}" in text
    assert "Port to listen on. [8000]" in text
    assert "Serve LoRA adapters beside the model. [off]" in text


def test_the_version_is_one_line() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("longwave ")


def test_a_model_named_twice_is_refused() -> None:
    assert runner.invoke(app, ["serve", "one", "--model", "two"]).exit_code == 3


def test_chat_reads_a_pipe_and_keeps_the_conversation(server: LiveServer) -> None:
    result = runner.invoke(app, ["chat", "--url", server.url, "--system", "be brief"], input="hi\n\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "hello world\nhello world\n"
    first, second = [
        bytes(token for token in request.prompt_token_ids if token < 256) for request in server.engine.requests
    ]
    assert b"be brief" in first
    assert b"again" in second
    assert b"o world" in second


def test_chat_in_a_pipe_ends_with_a_word_and_tells_of_any_failure(server: LiveServer) -> None:
    result = runner.invoke(app, ["chat", "--url", server.url], input="hi\n/exit\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "hello world\n")
    assert len(server.engine.requests) == 1
    result = runner.invoke(app, ["chat", "--url", server.url], input=f"{'x' * 100_000}\nhi\n")
    assert result.exit_code == 1
    assert result.stdout.endswith("hello world\n")


def test_chat_replaces_what_is_no_utf_8(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", "surrogateescape"))  # LANG=C
    with connect(server.url, None) as client:
        conversation = Conversation(client, "tiny", messages=[{"role": "system", "content": "caf\udce9"}])  # a flag
        assert talk(conversation, Console(file=io.StringIO())) == 0
    assert conversation.messages[1]["content"] == "caf\ufffd"
    assert "caf?" in tiny_tokenizer().decode(server.engine.requests[0].prompt_token_ids)


def test_chat_says_what_the_server_refused_and_exits_1() -> None:
    with live_server(api_key="right") as server:
        result = runner.invoke(app, ["chat", "--url", server.url, "--api-key", "wrong"], input="hi\n")
        assert result.exit_code == 1
        assert "Incorrect API key" in result.stderr
        result = runner.invoke(app, ["chat", "--url", server.url + "/v1", "--api-key", "right"], input="hi\n")
        assert result.stdout == "hello world\n"


def test_chat_with_nobody_there_is_one_sentence() -> None:
    result = runner.invoke(app, ["chat", "--url", "http://127.0.0.1:1"], input="hi\n")
    assert result.exit_code == 1
    assert "cannot reach the server http://127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.output


def test_chat_reports_a_failure_in_the_middle(server: LiveServer) -> None:
    server.engine.script = Script(fail_after=5)
    result = runner.invoke(app, ["chat", "--url", server.url], input="hi\n")
    assert result.exit_code == 1
    assert result.stdout == "hello\n"
    assert "The engine stopped." in result.stderr


@contextmanager
def stranger(reply: bytes) -> Iterator[str]:
    """The URL of a server that answers everything with `reply`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("reply", [b"<html>", b"[1]", b'{"data": []}', b'{"models": []}'])
def test_chat_with_a_server_that_names_no_model_is_one_sentence(reply: bytes) -> None:
    with stranger(reply) as url:
        result = runner.invoke(app, ["chat", "--url", url], input="hi\n")
    assert result.exit_code == 1
    assert result.stderr == f"longwave: {url}/v1/models names no model: give --model, or the URL of another server\n"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("{broken", "the server sent what is no event of an answer: b'{broken'"),
        ("[1]", "the server sent what is no event of an answer: b'[1]'"),
        ('{"error": "no memory"}', "no memory"),
        ('{"error": {"code": 500}}', "{'code': 500}"),
    ],
)
def test_chat_says_what_another_server_sends_in_place_of_an_answer(event: str, said: str) -> None:
    with stranger(f"data: {event}\n\n".encode()) as url:
        result = runner.invoke(app, ["chat", "--url", url, "--model", "theirs"], input="hi\n")
    assert result.exit_code == 1, result.exception
    assert result.stderr == f"error: {said}\n"


def test_chat_reads_streams_of_servers_that_write_them_otherwise() -> None:
    events = ({"choices": [{"delta": None}], "error": None}, {"choices": [{"delta": {"content": "hey"}}]}, {"usage": 1})
    stream = "".join(f"data:{json.dumps(event)}\r\n\r\n" for event in events) + "data:[DONE]\r\n\r\n"
    with stranger(stream.encode()) as url:
        result = runner.invoke(app, ["chat", "--url", url, "--model", "theirs"], input="hi\n")
    assert result.stdout == "hey\n", result.exception


@pytest.mark.parametrize("flags", [["--url", "http://[::"], ["--api-key", "\u00e9"]])
def test_chat_refuses_what_cannot_be_sent_in_one_sentence(flags: list[str]) -> None:
    result = runner.invoke(app, ["chat", *flags], input="hi\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("longwave: "), result.exception


def test_chat_shows_an_answer_with_other_alphabets_line_ends(server: LiveServer) -> None:
    said = "one\u2028two\u2029three\u000bfour\x85five"
    server.engine.script = Script(text=said.encode())
    result = runner.invoke(app, ["chat", "--url", server.url], input="hi\n")
    assert result.exit_code == 0, result.exception
    assert result.stdout == "one\u2028two\u2029threefourfive\n"


def test_chat_takes_an_address_without_a_scheme_and_says_that_an_answer_was_cut(server: LiveServer) -> None:
    server.engine.script = Script(ends=False)
    result = runner.invoke(app, ["chat", "--url", server.url.removeprefix("http://")], input="hi\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(" [cut off: no tokens left]\n")


@pytest.mark.parametrize("word", ["/exit", "/bye"])
def test_a_person_leaves_with_a_word(server: LiveServer, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    typed = iter(["", "hi", f" {word} "])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    output = io.StringIO()
    with connect(server.url, None) as client:
        assert talk(Conversation(client, "tiny"), Console(file=output, width=120)) == 0
    greeting, answer = output.getvalue().splitlines()
    assert greeting.startswith("tiny. ")
    assert answer == "hello world"
    assert len(server.engine.requests) == 1


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setattr(Conversation, "ask", lambda *_: (piece for piece in ("a\x1b[2J\r\x9b2J", "\tb\nc\x07")))
    output = io.StringIO()
    with connect("http://127.0.0.1:1", None) as client:
        talk(Conversation(client, "tiny"), Console(file=output))
    assert output.getvalue() == "a[2J2J\tb\nc\n"


class _InterruptedOutput(io.StringIO):
    """Ctrl-C after some text."""

    def write(self, text: str) -> int:
        if self.getvalue().count("h") == 1 and text == "e":
            super().write(text)
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_not_the_program(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.engine.script = Script(ends=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    output = _InterruptedOutput()
    with connect(server.url, None) as client:
        conversation = Conversation(client, "tiny")
        assert talk(conversation, Console(file=output)) == 0
    assert output.getvalue() == "he [stopped]\n"
    assert conversation.messages == []
    wait_until(lambda: len(server.engine.aborted) == 1)


def test_doctor_works_without_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("server.doctor._layers", lambda *_model: [])  # the bundled model: tests/integration
    monkeypatch.setattr("server.doctor._fused", lambda *_model: "packed QKV")
    monkeypatch.setattr("server.adapter_report.report", lambda *_: {"LoRA": "4 slots"})
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    assert said["gpus"] == []
    assert any("no usable NVIDIA GPU" in problem for problem in said["problems"])
    assert any(line.startswith("cpu_reference") for line in said["kernels"])
    assert {"torch", "transformers", "cupy-cuda13x"} <= said["packages"].keys()
    shown = " ".join(runner.invoke(app, ["doctor"]).stdout.split())
    assert "There is no usable NVIDIA GPU" in shown
    assert "Fused: packed QKV" in shown


def test_doctor_names_variables_that_are_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGWAVE_BLOK_SIZE", "16")
    result = runner.invoke(app, ["doctor", "--json", "--model", "no-such-model"])
    assert "No such setting, and so not used: LONGWAVE_BLOK_SIZE." in json.loads(result.stdout)["problems"]


def test_doctor_reports_a_model_it_cannot_find() -> None:
    result = runner.invoke(app, ["doctor", "--json", "--model", "no-such-model"])
    assert result.exit_code == 1
    assert sum("no-such-model" in problem for problem in json.loads(result.stdout)["problems"]) == 1


def test_kernels_of_an_unknown_architecture_are_refused() -> None:
    result = runner.invoke(app, ["kernels", "build", "--arch", "sm_1"])
    assert result.exit_code == 1
    assert "sm_90a" in result.stderr


def test_kernels_are_not_built_where_there_can_be_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = runner.invoke(app, ["kernels", "build", "--arch", "sm_90a", "--out", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert result.stderr == f"longwave: {tmp_path}/file cannot be a folder of kernels: File exists\n"


def test_the_curl_line_works(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from server.announcement import announce

    before = set(threading.enumerate())
    with live_server() as server:
        announce(server.lifecycle, server.port)
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        assert command[0] == "curl"
        body = json.loads(command[command.index("-d") + 1])
        assert httpx.post(command[1], json=body).json()["choices"][0]["message"]["content"] == "hello world"
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
