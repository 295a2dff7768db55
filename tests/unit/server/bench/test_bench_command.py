"""`longwave bench` against a real server on a socket: exit codes, files, refusals."""

import json
from pathlib import Path

import pytest
from scripted_engine import LiveServer, Script, live_server
from typer.testing import CliRunner

from server.cli import app

runner = CliRunner()
ENDLESS = Script(text=b"", ends=False)
SMALL = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "4", "--vocab-size", "250"]


def bench(server: LiveServer, *flags: str) -> "tuple[int, str]":
    result = runner.invoke(app, ["bench", "serve", "--base-url", server.url, *SMALL, *flags])
    return result.exit_code, result.output


def test_a_run_is_counted_and_saved(server: LiveServer, tmp_path: Path) -> None:
    server.engine.script = ENDLESS
    code, output = bench(
        server, "--result-filename", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"), "--save-detailed"
    )
    assert code == 0, output
    assert "completed" in output
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 24)
    assert result["model_id"] == "tiny"
    assert result["request_rate"] == "inf"
    assert len(result["ttfts"]) == 6
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert (tmp_path / "r.html").read_text().count("<svg") == 6
    prompts = [tuple(request.prompt_token_ids) for request in server.engine.requests]
    assert len(set(prompts)) == 6
    assert all(25 <= token < 250 for prompt in prompts for token in prompt)


def test_tokens_that_come_in_one_chunk_are_counted_where_the_server_is_asked_to_tell(
    server: LiveServer, tmp_path: Path
) -> None:
    """The first has two, one a byte."""
    server.engine.script = Script(text="\u00e4".encode(), ends=False)
    saved = ["--result-filename", str(tmp_path / "r.json")]
    code, output = bench(server, *saved)
    assert code == 0, output
    assert "in chunks of several tokens" not in output
    assert json.loads((tmp_path / "r.json").read_text())["requests_with_itl_by_chunk"] == 0
    own = ["--extra-body", '{"stream_options": {"include_usage": true}}']
    code, output = bench(server, *saved, *own)
    assert code == 0, output
    assert "6 answers came in chunks of several tokens" in " ".join(output.split())
    assert json.loads((tmp_path / "r.json").read_text())["requests_with_itl_by_chunk"] == 6


def test_warm_ups_are_not_measured_and_not_what_is_measured(server: LiveServer) -> None:
    server.engine.script = ENDLESS
    for seed in ("0", "1"):  # the next run's prompts are others, too: a prefix cache would know them
        code, output = bench(server, "--num-warmups", "2", "--max-concurrency", "1", "--seed", seed)
        assert code == 0, output
    prompts = [tuple(request.prompt_token_ids) for request in server.engine.requests]
    assert len(set(prompts)) == len(prompts) == 16


def test_an_answer_that_stops_early_fails_the_run_and_says_why(server: LiveServer) -> None:
    server.engine.script = Script(text=b"ab")
    code, output = bench(server)
    assert code == 1
    assert "6 failed: the answer has another length (3 instead of 4)" in " ".join(output.split())
    code, output = bench(server, "--no-ignore-eos")
    assert code == 0, output


def test_a_failure_in_the_middle_of_streams_fails_the_run(server: LiveServer) -> None:
    server.engine.script = Script(fail_after=2)
    code, output = bench(server)
    assert code == 1
    assert "6 failed: an error came in the stream (The engine stopped.)" in " ".join(output.split())


def test_a_refusal_is_counted_with_its_message(server: LiveServer) -> None:
    code, output = bench(server, "--model", "other")
    assert code == 1
    assert "6 failed: the server replied 404" in output


def test_conversations_and_shared_documents_are_sent(server: LiveServer) -> None:
    server.engine.script = ENDLESS
    assert bench(server, "--num-turns", "2", "--random-prefix-len", "7")[0] == 0
    lengths = sorted(len(request.prompt_token_ids) for request in server.engine.requests)
    assert lengths == [27] * 6 + [51] * 6
    server.engine.requests.clear()
    flags = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2"]
    sizes = ["--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "5"]
    assert bench(server, *flags, *sizes, "--prefix-repetition-output-len", "2")[0] == 0
    assert len({tuple(request.prompt_token_ids[:30]) for request in server.engine.requests}) == 2


def test_the_key_is_sent() -> None:
    with live_server(api_key="right") as server:
        server.engine.script = ENDLESS
        assert bench(server, "--api-key", "right")[0] == 0
        code, output = bench(server, "--api-key", "wrong")
        assert code == 1
        assert "401" in output


def test_nobody_there_is_one_sentence() -> None:
    result = runner.invoke(app, ["bench", "serve", "--base-url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "cannot ask http://127.0.0.1:1/v1/models" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "itl:5"],
        ["--request-rate", "0"],
        ["--percentile-metrics", "ttft,speed"],
        ["--metric-percentiles", "101"],
        ["--extra-body", "[1]"],
        ["--api-key", "\u00e4"],
        ["--api-key", "right\r\nx-more: 1"],
        ["--random-range-ratio", "0.5", "--random-sigma", "1"],
        ["--random-sigma", "inf"],
        ["--prompt-format", "text"],
        ["--dataset-name", "prefix_repetition", "--num-turns", "2"],
        ["--dataset-name", "prefix_repetition", "--random-prefix-len", "7"],
        ["--prefix-repetition-num-prefixes", "2"],
        ["--base-url", "ftp://x", "--model", "m"],
        ["--base-url", "ftp://x"],
        ["--base-url", "http://127.0.0.1:99999"],
        ["--extra-body", '{"temperature": NaN}'],
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_sent(server: LiveServer, flags: list[str]) -> None:
    code, output = bench(server, *flags)
    assert code == 2
    assert output.startswith("longwave: ")
    assert server.engine.requests == []


def test_flags_of_another_workload_are_named(server: LiveServer) -> None:
    code, output = bench(server, "--dataset-name", "prefix_repetition", "--num-turns", "2", "--random-prefix-len", "7")
    assert code == 2
    assert output == "longwave: without --dataset-name random there is no --random-prefix-len, --num-turns\n"


@pytest.mark.parametrize("flags", [["--request-rate", "-4"], ["--extra-body", "[1]"]])
def test_what_cannot_be_measured_is_refused_though_nobody_is_there(flags: list[str]) -> None:
    result = runner.invoke(app, ["bench", "serve", "--base-url", "http://127.0.0.1:1", *flags])
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize("flags", [["--html", "{}"], ["--result-filename", "{}/r.json"], ["--result-dir", "{}/x"]])
def test_results_that_could_not_be_written_are_refused_before_anything_is_measured(
    server: LiveServer, tmp_path: Path, flags: list[str]
) -> None:
    server.engine.script = ENDLESS
    (tmp_path / "file").touch()
    where = tmp_path if flags[0] == "--html" else tmp_path / "file"
    code, output = bench(server, "--save-result", *(flag.format(where) for flag in flags))
    assert code == 2, output
    assert output.startswith(f"longwave: the results cannot be written to {where}")
    assert server.engine.requests == []


def test_figures_of_the_engine_that_could_not_be_written_are_refused_before_it_starts(tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", "latency", "--output-json", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert result.stderr == f"longwave: the results cannot be written to {tmp_path}: it is a folder\n"


def test_the_folder_of_results_is_made_and_times_of_requests_are_asked_for_by_one_flag(
    server: LiveServer, tmp_path: Path
) -> None:
    server.engine.script = ENDLESS
    folder = tmp_path / "of" / "today"
    code, output = bench(server, "--save-detailed", "--result-dir", str(folder))
    assert code == 0, output
    (file,) = folder.iterdir()
    assert len(json.loads(file.read_text())["ttfts"]) == 6


def test_bad_settings_of_the_engine_exit_3() -> None:
    result = runner.invoke(app, ["bench", "latency", "--dtype", "float8"])
    assert result.exit_code == 3
    assert "dtype" in result.stderr
