"""The README's tables of a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import cpu_tables

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def test_the_quick_start_says_what_was_timed_and_from_which_commit(tmp_path: Path) -> None:
    facts = json.loads((RESULTS / "quick_start_cpu.json").read_text())
    facts["machine"]["commit"] = "0123456789abcdef with changes"
    facts["auto"] = "bfloat16"
    facts["dtypes"] = {
        dtype: {
            "same_greedy_tokens": dtype == "float32",
            "tokens_per_s": {
                "one_request": {"ours": ours, "transformers_eager": 10.0, "transformers_sdpa": sdpa},
                "8_requests": {"ours": 4 * ours, "transformers_eager": 60.0, "transformers_sdpa": 70.0},
            },
            "prompt_of_512_ms": {"ours": 9000 / ours, "transformers_eager": 700.0, "transformers_sdpa": 400.0},
        }
        for dtype, ours, sdpa in (("float32", 15.0, 20.0), ("bfloat16", 30.0, 18.0))
    }
    (tmp_path / "quick_start_cpu.json").write_text(json.dumps(facts))
    text = cpu_tables.cpu(tmp_path)

    assert "commit 0123456789 with changes, " in text
    assert "the best of 4 rounds each" in text
    assert "one request\nruns 1.50 times as fast as generate's best" in text
    assert "eight at once\n1.71 times as fast as its best of eight in a batch\n" in text
    assert "(greedy tokens the same in float32;" in text
    assert "| one | float32 | 15.0 | 10.0 | 20.0 |" in text
    assert "| eight at once | bfloat16 | 120.0 | 60.0 | 70.0 |" in text
    assert "| a prompt of 512, ms | bfloat16 | 300 | 700 | 400 |" in text


def test_the_server_stands_beside_every_variant_of_transformers_in_the_sizes_that_were_run(
    tmp_path: Path,
) -> None:
    def run(engine: str, variant: str, **rows: dict[str, float]) -> dict[str, object]:
        return {"engine": engine, "variant": variant, "driver": "http", "rows": rows}

    runs = [
        run("ours", "", ttft_32k={"ms": 279.6}, chats_under_131k_prefill={"tpot_p99": 12.0}),
        run("transformers", "", ttft_32k={"ms": 1298.7}),
        run("transformers", "continuous_batching=False", ttft_32k={"ms": 300.1}),
    ]
    machine = json.loads((RESULTS / "quick_start_cpu.json").read_text())["machine"]
    facts = {"machine": machine, "options": {"scale": 0.25, "dtype": "bfloat16"}, "runs": runs}
    (tmp_path / "serving_transformers_cpu.json").write_text(json.dumps(facts))
    text = cpu_tables.serving_cpu(tmp_path)
    assert "the cases above, 0.25 as long" in text
    assert "| case | ours | transformers serve, continuous batching | transformers serve, one at a time |" in text
    assert "| time to first token of 8,192 tokens, ms | 280 | 1,299 | 300 |" in text
    assert "| 18 chats beside 32,768: p99 time to first token, ms | - | - | - |" in text
    assert "| the same: p99 time per token, ms | 12 | - | - |" in text

    facts["runs"] = runs[1:]
    (tmp_path / "serving_transformers_cpu.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="not enough values"):
        cpu_tables.serving_cpu(tmp_path)
