"""The README's tables of whole models, from results of more than one form."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_tables
from benchmarks.readme_tables import RESULTS

Rows = dict[str, dict[str, Any]]
AT = {"commit": "0123456789abcdef", "date": "2026-11-20T10:00:00+00:00"}


def serving_table(folder: Path, ours: Rows, vllm: Rows, *others: dict[str, Any]) -> dict[str, list[str]]:
    """The cells of each line of the table, by its first cell."""
    facts = json.loads((RESULTS / "serving_h200.json").read_text())
    ours, vllm = ({case: AT | row for case, row in rows.items()} for rows in (ours, vllm))
    facts["runs"] = [
        {"engine": "vllm", "variant": "a=1", "driver": "offline", "rows": vllm},
        {"engine": "ours", "variant": "", "driver": "offline", "rows": ours},
        *others,
    ]
    (folder / "serving_h200.json").write_text(json.dumps(facts))
    lines = [line for line in engine_tables.serving(folder).splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in (line[2:-2].split(" | ") for line in lines)}


def test_starts_are_one_row_or_two_and_times_to_the_first_token(tmp_path: Path) -> None:
    one = serving_table(tmp_path, {"start": {"s": 36.0, "ready_s": 35.0}}, {"start": {"s": 81.0, "version": "1"}})
    two = serving_table(
        tmp_path,
        {"start_cold": {"s": 21.0}, "start_warm": {"s": 9.0}},
        {"start_cold": {"s": 90.0, "version": "1"}, "start_warm": {"s": 40.0, "version": "1"}},
    )

    assert one["process started to its first token, s"][:3] == ["36", "81", "0.44"]
    cold = "process started to its first token, weights drawn, no kernels cached, s"
    assert two[cold] == ["21", "90", "0.23", "≤ 20", "no"]
    assert two["the same again, s"] == ["9", "40", "0.23", "≤ 10", "yes"]
    assert "process started to its first token, s" not in two
    three = serving_table(
        tmp_path, {"start_cold": {"s": 21.0}, "start": {"s": 30.0}}, {"start": {"s": 81.0, "version": "1"}}
    )
    assert "process started to its first token, s" not in three


def test_a_ratio_is_not_rounded_to_the_other_side_of_its_goal(tmp_path: Path) -> None:
    name = "32 prompts of 32,768 at once: tokens/s, prompts included"
    for rate, cells in ((1099.6, ["1.0996", "≥ 1.1 x", "no"]), (1100.4, ["1.10", "≥ 1.1 x", "yes"])):
        ours, vllm = {"total_tok_s": rate}, {"total_tok_s": 1000.0, "version": "1"}
        rows = serving_table(tmp_path, {"32x32k_128": ours}, {"32x32k_128": vllm})
        assert rows[name][2:] == cells


def test_rows_of_a_later_run_are_marked_with_its_commit(tmp_path: Path) -> None:
    later = {"commit": "feedfeedfeed", "date": "2026-11-22T10:00:00+00:00"}
    first, rate = {"start_cold": {"s": 9.0}, "ttft_32k": {"ms": 1.0}}, {"tpot_b1_1024": {"p50": 4.0} | later}
    found = serving_table(tmp_path, first | rate, {"tpot_b1_1024": {"p50": 5.0, "version": "1"} | later})
    text = engine_tables.serving(tmp_path)

    assert found["median gap between tokens after 1,024 tokens, ms *"][:3] == ["4.00", "5.00", "0.80"]
    assert "time to first token of 32,768 tokens, ms" in found
    assert "commit 0123456789, 2026-11-20; * commit feedfeedfe, 2026-11-22)." in text
    serving_table(tmp_path, first | rate, {"tpot_b1_1024": {"p50": 5.0, "version": "1"}})
    two = "in two runs: ours commit feedfeedfe, 2026-11-22, vLLM commit 0123456789, 2026-11-20"
    assert f"2026-11-20; * {two})." in engine_tables.serving(tmp_path)


def test_a_row_is_marked_where_only_the_peers_is_of_another_commit(tmp_path: Path) -> None:
    later = {"commit": "feedfeedfeed", "date": "2026-11-22T10:00:00+00:00"}
    found = serving_table(tmp_path, {"ttft_32k": {"ms": 1.0}}, {"ttft_32k": {"ms": 2.0, "version": "1"} | later})

    assert found["time to first token of 32,768 tokens, ms *"][:3] == ["1", "2", "0.50"]
    two = "in two runs: ours commit 0123456789, 2026-11-20, vLLM commit feedfeedfe, 2026-11-22"
    assert f"; * {two})." in engine_tables.serving(tmp_path)


def test_each_commit_has_a_mark_of_its_own(tmp_path: Path) -> None:
    def row(commit: str, **figures: float) -> dict[str, Any]:
        return figures | {"commit": commit, "date": "2026-11-22T10:00:00+00:00"}

    rows = {"start_cold": {"s": 9.0}, "start_warm": {"s": 5.0}, "ttft_32k": {"ms": 1.0}}
    later = {"ttft_131k": row("feedfeedfeed", ms=2.0), "tpot_b1_1024": row("beadbeadbead", p50=4.0)}
    later |= {"tpot_b1_131072": row("feedfeedfeed", p50=4.0)}
    found = serving_table(tmp_path, rows | later, {"ttft_32k": {"ms": 1.0, "version": "1"}})
    marks = {name.split()[-1] for name in found}
    assert {"*", "†"} <= marks
    assert "median gap between tokens after 131,072 tokens, ms *" in found
    assert "median gap between tokens after 1,024 tokens, ms †" in found
    text = engine_tables.serving(tmp_path)
    assert "; * commit feedfeedfe, 2026-11-22; † commit beadbeadbe, 2026-11-22)." in text


def test_chats_are_judged_by_their_time_per_token_with_the_gaps_beside_it(tmp_path: Path) -> None:
    mine = {"itl_p50": 22.0, "itl_p99": 31.0, "tpot_p99": 29.0, "long_ttft_ms": 120.0}
    version = {"start": {"s": 1.0, "version": "1"}}
    found = serving_table(
        tmp_path,
        {"chats_under_131k_prefill": mine, "ttft_131k": {"ms": 100.0}},
        {"chats_under_131k_prefill": {"itl_p99": 62.0}, **version},
    )

    assert found["the same: median gap, ms"][:3] == ["22.0", "-", "-"]
    assert found["the same: p99 gap, ms"] == ["31.0", "62.0", "0.50", "-", ""]
    assert found["the same: p99 time per token, ms"][3:] == ["≤ 30", "yes"]
    assert found["the same: the long prompt's first token, ms"][3:] == ["≤ 1.1 x alone", "no"]


def test_only_the_engines_alone_are_compared_and_each_once(tmp_path: Path) -> None:
    rows, version = {"256x1k_128": {"out_tok_s": 900.0}}, {"start": {"s": 1.0, "version": "1"}}
    http = {"engine": "ours", "variant": "", "driver": "http", "rows": {"256x1k_128": {"out_tok_s": 1.0}}}
    again = {"engine": "vllm", "variant": "a=2", "driver": "offline", "rows": version}

    assert serving_table(tmp_path, rows, version, http)["256 prompts of 1,024 at once: tokens/s"][0] == "900"
    with pytest.raises(ValueError, match="too many values"):
        serving_table(tmp_path, rows, version, again)


def recorded_servings() -> list[Path]:
    return [
        file for file in sorted(RESULTS.glob("*.json")) if json.loads(file.read_text()).get("benchmark") == "serving"
    ]


@pytest.mark.parametrize("file", recorded_servings(), ids=lambda file: file.name)
def test_recorded_chats_name_gaps_as_gaps(file: Path) -> None:
    """Files of before had the gaps' percentiles under the name of the time per token."""
    chats = [
        row for run in json.loads(file.read_text())["runs"] for name, row in run["rows"].items() if "chats" in name
    ]

    assert all("itl_p99" in row for row in chats if "error" not in row)
