"""Every operation of the API's own description, with data that fits it and data that does not: schemathesis's cases of
every keyword of a schema, and random ones. No answer is a 5xx, has an undocumented status or another shape than the
description's; wrong data is refused; and what openapi_checks.py says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_engine import LiveServer

#: Random cases of an operation, beside those that follow from its schema: as many as CI has time for.
EXAMPLES = 5
FEWEST_CASES = 1500
#: Whatever refuses wrong data is right. `positive_data_acceptance` is left out: a description cannot say which models,
#: files and jobs are there.
CONFIG = """
[checks.positive_data_acceptance]
enabled = false
[checks.negative_data_rejection]
expected-statuses = ["4xx"]
"""


@pytest.mark.timeout(1800)
def test_no_request_breaks_an_operation(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color", "--workers", "2",
        "--phases", "coverage,fuzzing", "--mode", "all", "--max-examples", str(EXAMPLES), "--seed", "1",
        "--continue-on-failure", "--request-timeout", "30",
    ]  # fmt: skip
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "openapi_checks", "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None, done.stdout[-2_000:]
    assert int(cases[1]) >= FEWEST_CASES
    assert server.lifecycle.is_ready
