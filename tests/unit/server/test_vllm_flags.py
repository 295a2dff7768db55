"""A command line written for `vllm serve`: what asks for nothing new is accepted, and the rest is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner
from typer.core import TyperGroup

from server import cli
from server.configuration import load_settings
from server.settings import Settings
from server.vllm_command_line import apart
from server.vllm_flags import FLAGS, MODEL, OFF, ON, TABLE

runner = CliRunner()
COMMAND = typer.main.get_command(cli.app)  # made once, not by every call
NAMES = sorted(FLAGS)
ACCEPTING = [name for name in NAMES if FLAGS[name].accepted]


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What would have been served."""
    import os

    for name in [name for name in os.environ if name.startswith("LONGWAVE_")]:
        monkeypatch.delenv(name)
    served: list[Settings] = []
    monkeypatch.setattr(cli, "_serve", served.append)
    return served


def own_flags() -> set[str]:
    assert isinstance(COMMAND, TyperGroup)
    parameters = COMMAND.commands["serve"].params
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}


def spellings(name: str, value: str) -> Iterator[list[str]]:
    yield [name, value]
    yield [f"{name}={value}"]
    if name.startswith("--"):
        yield ["--" + name[2:].replace("-", "_"), value]
        yield ["--" + name[2:].replace("-", "_") + f"={value}"]


def switched(name: str, state: tuple[str, ...]) -> Iterator[list[str]]:
    yield from spellings(name, "true" if state == ON else "False")
    if state == ON:
        yield [name]
    elif name.startswith("--"):
        yield ["--no-" + name[2:]]
        yield ["--no_" + name[2:].replace("-", "_")]


def refusal(*args: str) -> list[str]:
    result = runner.invoke(COMMAND, ["serve", *args])
    assert result.exit_code == 3, result.output
    lines = result.stderr.splitlines()
    assert all(line.startswith("longwave: ") for line in lines)
    return [line.removeprefix("longwave: ") for line in lines]


@pytest.mark.parametrize("name", ACCEPTING)
def test_a_value_that_asks_for_nothing_new_changes_nothing(name: str, served: list[Settings]) -> None:
    flag = FLAGS[name]
    values = ("a/model",) if flag.accepted == MODEL else flag.accepted
    forms = switched(name, flag.accepted) if flag.is_switch else (s for value in values for s in spellings(name, value))
    for args in forms:
        result = runner.invoke(COMMAND, ["serve", *args, "a/model", "--port", "1234"])
        assert result.exit_code == 0, (args, result.output)
        assert served.pop() == load_settings({"model": "a/model", "port": 1234}), args


@pytest.mark.parametrize("name", NAMES)
def test_any_other_value_is_refused_with_what_there_is_instead(name: str, served: list[Settings]) -> None:
    flag = FLAGS[name]
    forms = switched(name, OFF if flag.accepted == ON else ON) if flag.is_switch else spellings(name, "another")
    for args in forms:
        [line] = refusal("a/model", *args)
        named, said = line.split(": ", 1)
        assert named in (name, "--no-" + name[2:]), args
        assert said.startswith(flag.instead.replace("{value}", "another"))
        assert flag.is_switch or all(value in said for value in flag.accepted)
    assert not served


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("-tp 2", "-tp: one GPU, or the CPU, serves the model (accepted: 1)"),
        ("--tensor_parallel_size=8", "--tensor-parallel-size: one GPU, or the CPU, serves the model (accepted: 1)"),
        ("--revision dev", "--revision: the revision is part of the model's name: --model owner/name@dev"),
        ("--trust-remote-code", "--trust-remote-code: code that comes with a model is never run: leave it out"),
        ("--tokenizer other", "--tokenizer: the tokenizer is the one in the model's folder "
         "(accepted: the model itself)"),
        ("--tool-call-parser hermes", "--tool-call-parser: there is no tool calling: requests with tools are refused"),
        ("--swap-space 4", "--swap-space: KV blocks that the device gives up go where --kv-offload-gb and "
         "--kv-offload-dir say (accepted: 0)"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill: prompts are always computed in pieces; "
         "--max-num-batched-tokens and --tpot-target-ms bound the pieces of prompts"),
        ("--scheduling-policy fcfs", "--scheduling-policy: the order is Longwave's own: API keys in turn, and of one "
         "the prompts that are soonest done, with ageing"),
        ("--seed -1", "--seed: seeds are the requests' own, and one without gets a random one: leave it out"),
    ],
)  # fmt: skip
def test_the_line_names_the_flag_as_it_was_given(given: str, line: str) -> None:
    assert refusal("a/model", *given.split()) == [line]


def test_all_of_them_are_refused_at_once_beside_other_settings() -> None:
    lines = refusal("m", "--seed", "1", "-tp", "2", "--port", "99999", "--seed", "2", "--tokenizer", "other")
    assert [line.split(":")[0] for line in lines] == ["--seed", "-tp", "port"]  # m is not known to be the model yet


def test_a_value_that_may_be_secret_is_not_printed() -> None:
    assert "hf_abc" not in "".join(refusal("m", "--hf-token", "hf_abc"))


def test_the_tokenizer_may_be_that_of_a_model_that_a_variable_names(
    monkeypatch: pytest.MonkeyPatch, served: list[Settings]
) -> None:
    monkeypatch.setenv("LONGWAVE_MODEL", "a/model")
    assert runner.invoke(COMMAND, ["serve", "--tokenizer", "a/model"]).exit_code == 0
    assert [settings.model for settings in served] == ["a/model"]
    assert len(refusal("--tokenizer", "b/model")) == 1


def test_a_command_line_of_vllm_is_understood(served: list[Settings]) -> None:
    line = (
        "a/model --max_model_len 4096 -tp=1 --enable-chunked-prefill --disable-log-requests --no-trust-remote-code "
        "--gpu_memory_utilization=0.8 --swap-space 0.0 --served_model_name x --no-enable_prefix_caching --task generate"
    )
    result = runner.invoke(COMMAND, ["serve", *line.split()])
    assert result.exit_code == 0, result.output
    told = {"max_model_len": 4096, "gpu_memory_utilization": 0.8, "served_model_name": "x"}
    assert served == [load_settings({"model": "a/model", "enable_prefix_caching": False, **told})]


@pytest.mark.parametrize("flag", ["--no-such-flag", "--no-tokenizer", "--no-seed", "--no-enable-dbo=true", "-x"])
def test_a_flag_of_nobody_is_no_option(flag: str) -> None:
    result = runner.invoke(COMMAND, ["serve", flag])
    assert result.exit_code == 2
    assert f"No such option: {flag.partition('=')[0]}" in result.stderr


@pytest.mark.parametrize(
    ("given", "ours", "theirs"),
    [
        ("--api-key --seed 1", "--api-key --seed 1", []),
        ("--api-key=--seed m", "--api-key=--seed m", []),
        ("--api_key=a_b --chat_template c_d e_f", "--api-key=a_b --chat-template c_d e_f", []),
        ("m -- --seed", "m -- --seed", []),
        ("--lora_modules a_b=x c=y", "--lora-modules a_b=x c=y", []),
        ("--seed 1 m", "m", ["1"]),
        ("--seed --port 1", "--port 1", [""]),
        ("m --seed", "m", [""]),
        ("--cudagraph-capture-sizes 1 2 4 --port 1", "--port 1", ["1 2 4"]),
        ("--speculative-config.method ngram m", "m", ["ngram"]),
        ("--speculative_config.method=ngram m", "m", ["ngram"]),
        ("-O3 m", "m", ["3"]),
        ("-O 3 m", "m", ["3"]),
        ("-O.mode 3 m", "m", ["3"]),
        ("-O.mode=3 m", "m", ["3"]),
        ("--async-scheduling m", "m", ["on"]),
        ("--async-scheduling false m", "m", ["off"]),
        ("--async-scheduling=maybe m", "m", ["maybe"]),
    ],
)
def test_what_belongs_to_a_flag_goes_with_it(given: str, ours: str, theirs: list[str]) -> None:
    left, taken = apart(given.split(), {"--api-key", "--chat-template", "--lora-modules", "--port"})
    assert (left, [one.value for one in taken]) == (ours.split(), theirs)


def test_no_flag_of_vllm_in_the_table_is_a_flag_of_ours() -> None:
    assert not own_flags() & {form for name in NAMES for form in (name, name.replace("--", "--no-", 1))}


def test_every_flag_is_in_the_table_once_and_spelt_as_it_is_looked_up() -> None:
    names = [name.removesuffix("+") for row, _, _ in TABLE for name in row.split()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*|-[a-zO]+", name) for name in names)


def test_what_there_is_instead_exists() -> None:
    root = Path(__file__).parents[3]
    for name, flag in FLAGS.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", flag.instead)) <= own_flags(), name
        for page in re.findall(r"[\w/]+\.md", flag.instead):
            assert (root / page).is_file(), name
