"""benchmarks/serving.py as it is run: its child processes, its file, its table."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import serving, serving_child
from benchmarks.serving import Size, json_objects, measure, model_folder_of, peers, rows_of
from benchmarks.serving_child import Plan
from benchmarks.serving_goals import GOALS, Goal, Run, are_goals, table, verdicts
from benchmarks.serving_peers import Peer, as_flags, why_not
from benchmarks.serving_results import Results
from models import loader, stored_weights
from models.registry import ModelSource

VLLM = {
    "__init__.py": """
__version__ = "0.26.0"
class AsyncEngineArgs(dict):
    pass
class SamplingParams:
    def __init__(self, **fields):
        self.__dict__.update(fields)
""",
    "sampling_params.py": "class RequestOutputKind:\n    DELTA = 1\n",
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/async_llm.py": """
from types import SimpleNamespace
class AsyncLLM:
    @classmethod
    def from_engine_args(cls, arguments):
        print("a line of a log on stdout")
        assert arguments["max_num_batched_tokens"] == 2048
        return cls()
    async def generate(self, prompt, sampling, request_id):
        assert len(prompt["prompt_token_ids"]) >= 16
        for _ in range(sampling.max_tokens):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])])
    def shutdown(self):
        pass
""",
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    folder, load_format = model_folder_of("small", None, Size(0.002), tmp_path)
    return Plan(
        model=str(folder),
        vocab_size=2048,
        load_format=load_format,
        dtype="float32",
        device="cpu",
        cases=("ttft_32k", "64x8k_256"),
        scale=0.002,
        spawned=0.0,
    )


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Peer:
    """A package of vLLM's names and signatures, as far as the driver uses them."""
    for name, text in VLLM.items():
        path = tmp_path / "site" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Peer("vllm", "2048", {"max_num_batched_tokens": 2048}, str(tmp_path / "site"))


def test_vllm_runs_the_same_cases_from_an_import_path_of_its_own(fake_vllm: Peer, plan: Plan, tmp_path: Path) -> None:
    rows = list(measure(fake_vllm, "offline", plan, tmp_path / "caches"))
    assert [row["case"] for row in rows] == ["start", "ttft_32k", "64x8k_256"]
    assert rows[0]["version"] == "0.26.0"
    assert not [row for row in rows if "error" in row]


@pytest.mark.thorough
def test_our_engine_runs_the_cases_after_a_cold_and_a_warm_start(plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, cases=("start_cold", "start_warm", "ttft_32k"))
    rows = list(measure(Peer("ours"), "offline", plan, tmp_path / "caches"))
    assert [row["case"] for row in rows] == ["start_cold", "start_warm", "ttft_32k"]
    assert not [row for row in rows if "error" in row]
    assert rows[0]["ready_s"] <= rows[0]["s"]


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_a_process_without_a_plan_ends_nobody_and_says_who_starts_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends its whole group when its stdin ends, which in a script is the script's."""
    monkeypatch.setattr(sys, "argv", ["serving_ours", *arguments])
    monkeypatch.setattr(serving_child, "end_with_parent", lambda: pytest.fail("it watches somebody's stdin"))
    with pytest.raises(SystemExit, match=r"benchmarks/serving.py starts this process"):
        serving_child.main(None)  # type: ignore[arg-type]


def test_random_weights_may_be_files_that_a_start_reads(tmp_path: Path) -> None:
    folder, load_format = model_folder_of("small", None, Size(0.002), tmp_path, weights=True)
    tensors = stored_weights.readable(folder)
    assert load_format == "auto"
    assert tensors is not None
    assert len({tensor.file for tensor in tensors}) == 4
    model = loader.load(ModelSource("small", folder=folder), dtype="bfloat16").model
    assert 0.01 < model.get_input_embeddings().weight.std() < 0.03


@pytest.mark.thorough
def test_starts_find_bytecode_where_python_may_write_none(plan: Plan, tmp_path: Path) -> None:
    environment = serving.compiled(Peer("ours"), plan, tmp_path / "caches")
    assert environment["PYTHONDONTWRITEBYTECODE"] == ""
    assert environment["LONGWAVE_CACHE_DIR"] == str(tmp_path / "caches" / "longwave")
    assert not (tmp_path / "caches").exists()
    assert list(Path(environment["PYTHONPYCACHEPREFIX"]).rglob("server/engine/production*.pyc"))


def test_a_process_that_fails_is_a_row_with_an_error(tmp_path: Path) -> None:
    rows = list(rows_of([sys.executable, "-c", 'print(\'{"case": "a"}\'); raise SystemExit(7)'], dict(os.environ)))
    assert rows == [{"case": "a"}, {"case": "exit", "error": "the process ended with code 7"}]


def test_results_are_in_the_file_after_every_row_and_later_runs_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    machine = {"gpu": "H", "commit": "abc"}
    first = Results(machine, {"scale": 1.0, "model": "8b"}, path)
    first.add("ours", "", "offline", {"case": "ttft_32k", "ms": 1.0})
    assert json.loads(path.read_text())["runs"][0]["rows"]["ttft_32k"]["ms"] == 1.0
    second = Results({"gpu": "H", "commit": "def"}, {"scale": 1.0, "model": "8b"}, path)
    second.merge(path)
    second.add("ours", "", "offline", {"case": "ttft_131k", "ms": 2.0})
    rows = json.loads(path.read_text())["runs"][0]["rows"]
    assert (rows["ttft_32k"]["commit"], rows["ttft_131k"]["commit"]) == ("abc", "def")
    with pytest.raises(ValueError, match="gpu H, this run has None"):
        Results({"gpu": None}, {"scale": 1.0, "model": "8b"}, path).merge(path)


def test_a_process_that_starts_again_takes_back_how_the_last_one_ended() -> None:
    results = Results({"gpu": None, "commit": "abc"}, {}, None)
    results.add("ours", "", "offline", {"case": "exit", "error": "the process ended with code 1"})
    assert results.errors == ["ours  offline exit: the process ended with code 1"]
    results.add("ours", "", "offline", {"case": "start", "s": 1.0})
    assert results.errors == []


def run_of(engine: str, rows: dict[str, dict[str, float]], driver: str = "offline", variant: str = "") -> Run:
    return Run(engine, variant, driver, rows)


def test_ours_is_measured_against_the_best_variant_of_the_peers() -> None:
    runs = [
        run_of("ours", {"ttft_32k": {"ms": 90.0}, "32x32k_128": {"total_tok_s": 120.0}}),
        run_of("vllm", {"ttft_32k": {"ms": 100.0}, "32x32k_128": {"total_tok_s": 90.0}}, variant="a"),
        run_of("vllm", {"ttft_32k": {"ms": 93.0}, "32x32k_128": {"total_tok_s": 100.0}}, variant="b"),
    ]
    first, second = verdicts(runs)
    assert (first.against, first.against_name, first.text) == (93.0, "vllm b", "MISSED")
    assert (second.against, second.text, second.ratio) == (100.0, "met", 1.2)


def test_http_is_measured_against_our_engine_alone() -> None:
    rows = {"256x1k_128": {"out_tok_s": 100.0}}
    runs = [run_of("ours", rows), run_of("ours", {"256x1k_128": {"out_tok_s": 96.0}}, "http")]
    found = [verdict for verdict in verdicts(runs) if verdict.goal.of == "offline"]
    assert [(verdict.driver, verdict.against, verdict.text) for verdict in found] == [("http", 100.0, "MISSED")]


def test_a_goal_without_its_other_side_is_not_judged() -> None:
    lines = table([run_of("ours", {"ttft_32k": {"ms": 90.0}})])
    assert "not measured" in lines[1]
    assert "met" not in lines[1]
    assert "MISSED" not in lines[1]


def test_the_long_prompt_is_measured_against_itself_alone() -> None:
    rows = {"ttft_131k": {"ms": 100.0}, "chats_under_131k_prefill": {"long_ttft_ms": 109.0}}
    found = {verdict.goal.figure: verdict for verdict in verdicts([run_of("ours", rows)])}
    assert found["long_ttft_ms"].text == "met"


def test_cases_that_are_scaled_down_are_not_judged() -> None:
    run = Run("ours", "", "offline", {"start_cold": {"s": 9.0}})
    whole, small = "\n".join(table([run])), "\n".join(table([run], judged=False))
    assert ("met" in whole, "<= 20" in whole) == (True, True)
    assert ("met" in small, "<= 20" in small, "nothing is judged" in small) == (False, False, True)
    assert are_goals({"scale": 1.0, "model": "8b", "device": "cuda"})
    assert not are_goals({"scale": 0.01, "model": "8b", "device": "cuda"})


def test_every_goal_is_of_a_case_that_exists() -> None:
    assert {goal.case for goal in GOALS} <= {*serving.CASES, *serving.STARTS}
    assert Goal("a", "b", "<=", 2.0).is_met(2.0, 1.0)
    assert not Goal("a", "b", ">=", 2.0).is_met(1.9, 1.0)


def test_arguments_become_flags() -> None:
    assert as_flags({"max_num_seqs": 4, "enforce_eager": True, "enable_x": False}) == [
        "--max-num-seqs",
        "4",
        "--enforce-eager",
        "--no-enable-x",
    ]


def test_a_set_of_arguments_is_a_variant() -> None:
    found = peers(["ours", "vllm"], json_objects(["{}"]), json_objects(['{"a": 1}', '{"a": 2}']), "/x")
    assert [(peer.engine, peer.variant, peer.import_path) for peer in found] == [
        ("ours", "", None),
        ("vllm", "a=1", "/x"),
        ("vllm", "a=2", "/x"),
    ]


def test_what_cannot_be_measured_says_why(plan: Plan, fake_vllm: Peer) -> None:
    assert why_not(Peer("sglang"), "http", plan) == "it is not installed"
    assert why_not(Peer("transformers"), "http", plan) is not None
    assert why_not(fake_vllm, "offline", plan) == "it is measured on a GPU only"
    assert why_not(Peer("ours"), "offline", plan) is None


def test_a_peer_that_lacks_a_package_is_found_out_before_anything_is_measured(plan: Plan, fake_vllm: Peer) -> None:
    on_a_gpu = replace(plan, device="cuda")
    assert why_not(fake_vllm, "offline", on_a_gpu) is None
    assert fake_vllm.import_path is not None
    package = Path(fake_vllm.import_path) / "vllm" / "__init__.py"
    package.write_text("def __getattr__(name):\n    import a_package_of_nobody\n")
    reason = "it cannot be imported: ModuleNotFoundError: No module named 'a_package_of_nobody'"
    assert why_not(fake_vllm, "offline", on_a_gpu) == reason


def test_a_named_peer_that_cannot_be_measured_is_an_error(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(serving.main)
    small = ["--model-shape", "small", "--scale", "0.01", "--device", "cpu", "--peers", "ours,sglang"]
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path / "results.json")])
    assert result.exit_code == 2
    assert "sglang (it is not installed)" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "results.json").exists()


def test_unknown_cases_are_refused() -> None:
    app = typer.Typer()
    app.command()(serving.main)
    result = CliRunner().invoke(app, ["--cases", "ttft_1k"])
    assert result.exit_code == 2
    assert "ttft_1k" in result.output


@pytest.mark.parametrize("option", ["--report", "--model", "--out"])
def test_a_file_that_holds_something_else_is_a_wrong_option(option: str, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(serving.main)
    other = tmp_path / "other.json"
    other.write_text("{}")
    merge = ["--merge", "--device", "cpu"] if option == "--out" else []
    result = CliRunner().invoke(app, [option, str(other), *merge])
    assert (result.exit_code, "Invalid value" in result.output) == (2, True)
