"""Every operation of the API's own description, with data that fits it and data that does not: schemathesis's cases of
every keyword of a schema, and random ones, most of which meet what there is on the server (openapi_cases.py). No answer
is a 5xx, has an undocumented status or another shape than the description's; wrong data is refused; every operation has
succeeded, in every media type that it is said to have; and what openapi_checks.py says."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_things import PAIR, WRONG_PAIR, Things
from scripted_engine import MODEL, LiveServer, live_server

from server.finetune import TrainerConfig
from server.finetune.leases import Leases
from server.settings import Settings
from server.training import TrainingConfig

sys.path.append(str(Path(__file__).parent.parent / "finetune"))  # the processes follow the rooms' own tests' scripts
sys.path.append(str(Path(__file__).parent.parent / "training"))

from working import CONFIG as TRAINER

#: Random cases of an operation, beside those that follow from its schema: as many as CI has time for.
EXAMPLES = 5
FEWEST_CASES, FEWEST_SUCCESSES = 3000, 700
ANY = ""  # media type, of a reply that is said to have no content
#: Whatever refuses wrong data is right. `positive_data_acceptance` is left out: a description cannot say which models,
#: files and jobs are there. What replies have told is not drawn again: a case must not use up what others' are for.
CONFIG = """
max-stream-events = 10000
[checks.positive_data_acceptance]
enabled = false
[checks.negative_data_rejection]
expected-statuses = ["4xx"]
[phases.coverage.extra-data-sources]
responses = false
[phases.fuzzing.extra-data-sources]
responses = false
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """With every route, and two jobs that have ended: one has made a model, the other has failed."""
    training = Settings.training_config

    def scripted(settings: Settings) -> TrainingConfig:
        return replace(training(settings), worker="scripted_training_worker")

    monkeypatch.setattr(Settings, "trainer_config", lambda _: TrainerConfig(MODEL, **TRAINER))
    monkeypatch.setattr(Settings, "training_config", scripted)
    for name in ("FINE_TUNING_SCRIPT", "TRAINING_SCRIPT"):
        monkeypatch.setenv(name, str(tmp_path / "script.json"))
    (tmp_path / "script.json").write_text("{}")
    flags: dict[str, Any] = {
        "enable_lora": True, "allow_runtime_lora_updating": True, "lora_dir": tmp_path,
        "max_fine_tuning_jobs": 10_000, "max_training_models": 1024, "max_saved_weights": 10_000,
    }  # fmt: skip
    with live_server(data_dir=tmp_path / "data", **flags) as server:
        with server.client() as client:
            things = Things(client)
            for content in (PAIR * 2, PAIR + WRONG_PAIR):
                things.job(things.file(content))
            things.end_jobs()
        monkeypatch.setattr(Leases, "claim", lambda *_: None)  # nobody works on those of the fuzz
        yield server


def described_successes(description: dict[str, Any]) -> set[tuple[str, str]]:
    """(operation, media type)"""
    return {
        (f"{method.upper()} {path}", media)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
        for status, reply in operation["responses"].items()
        if status.startswith("2")
        for media in reply.get("content", [ANY])
    }


@pytest.mark.timeout(1800)
def test_no_request_breaks_an_operation(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    # One worker: of two threads, hypothesis's sources now and then fail to parse in Python 3.11; nor would runs repeat.
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color", "--workers", "1",
        "--phases", "coverage,fuzzing", "--mode", "all", "--max-examples", str(EXAMPLES), "--seed", "1",
        "--continue-on-failure", "--request-timeout", "30",
    ]  # fmt: skip
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "openapi_checks", "PYTHONPATH": str(Path(__file__).parent),
        "FUZZED_SERVER": server.url, "FUZZED_REPLIES": str(tmp_path / "replies.json"),
    }  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None, done.stdout[-2_000:]
    assert int(cases[1]) >= FEWEST_CASES
    replies = [tuple(reply) for reply in json.loads((tmp_path / "replies.json").read_text())]
    successes = Counter({(name, media): count for name, status, media, count in replies if status < 300})
    assert successes.total() >= FEWEST_SUCCESSES
    described = described_successes(httpx.get(f"{server.url}/openapi.json").json())
    assert described - {*successes, *((name, ANY) for name, _ in successes)} == set()
    assert server.lifecycle.is_ready
