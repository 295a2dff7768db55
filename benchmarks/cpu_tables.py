"""The measured tables of a CPU, where the bundled model runs. Every function takes the folder of results."""

from pathlib import Path

from benchmarks.markdown import Facts, load, short, table
from benchmarks.serving_cases import Size
from benchmarks.serving_goals import OURS, Run
from benchmarks.serving_peers import TRANSFORMERS

ONE, EIGHT = "one_request", "8_requests"
#: Of the quick start, as the file and as the table names them.
CONTENDERS = {
    "ours": "ours",
    "transformers_eager": "generate, eager attention",
    "transformers_sdpa": "generate, SDPA",
}


def cpu(results: Path) -> str:
    """The quick start: the bundled model on two cores, beside transformers' generate."""
    facts = load(results / "quick_start_cpu.json")
    m, auto, dtypes = facts["machine"], facts["auto"], facts["dtypes"]
    rows = [
        [name, dtype, *(f"{found['tokens_per_s'][race][who]:.1f}" for who in CONTENDERS)]
        for race, name in ((ONE, "one"), (EIGHT, "eight at once"))
        for dtype, found in dtypes.items()
    ]
    rows += [
        ["a prompt of 512, ms", dtype, *(f"{found['prompt_of_512_ms'][who]:.0f}" for who in CONTENDERS)]
        for dtype, found in dtypes.items()
    ]
    one, eight = (_over_generate(dtypes, auto, race) for race in (ONE, EIGHT))
    same = [dtype for dtype, found in dtypes.items() if found["same_greedy_tokens"]]
    text = (
        f"The bundled model on {m['cores']} cores of an {m['cpu']}, tokens per second (and, in the last rows,\n"
        "milliseconds for a prompt): our model runner, without scheduler and server, beside transformers' own\n"
        f"generate; the best of {facts['options']['rounds']} rounds each. The server takes {auto} there: one request\n"
        f"runs {one:.2f} times as fast as generate's best of both dtypes and attentions, eight at once\n"
        f"{eight:.2f} times as fast as its best of eight in a batch\n"
        f"(greedy tokens the same in {' and '.join(same) or 'neither'};\n"
        f"torch {m['torch']}, transformers {m['transformers']}, commit {short(m['commit'])}, {m['date'][:10]}):\n\n"
    )
    return text + table(["requests", "dtype", *CONTENDERS.values()], rows)


def _over_generate(dtypes: Facts, auto: str, race: str) -> float:
    """How many times as fast as the best that generate reaches in the same race, in any dtype."""
    speeds = {dtype: found["tokens_per_s"][race] for dtype, found in dtypes.items()}
    best = max(speed for found in speeds.values() for who, speed in found.items() if who != "ours")
    return float(speeds[auto]["ours"] / best)


def _serving_rows(size: Size) -> list[tuple[str, str, str, int]]:
    """Case, figure, what a reader calls it, digits; the sizes are those that were run."""
    prompts, length = size.requests(32), size.tokens(32_768)
    questions, document = size.requests(64), size.tokens(100_000)
    many, short_length = size.requests(256), size.tokens(1024)
    chats, long = size.requests(36), size.tokens(131_072)
    return [
        ("ttft_32k", "ms", f"time to first token of {length:,} tokens, ms", 0),
        ("ttft_131k", "ms", f"time to first token of {long:,} tokens, ms", 0),
        ("tpot_b1_1024", "p50", "median gap between tokens, ms", 1),
        ("tpot_b1_131072", "p50", f"the same after {long:,} tokens, ms", 1),
        ("32x32k_128", "total_tok_s", f"{prompts} prompts of {length:,} at once: tokens/s, prompts included", 0),
        ("shared_100k_x64", "out_tok_s", f"{questions} questions on one {document:,}-token document: tokens/s", 1),
        ("shared_100k_x64", "ttft_p99", "the same: p99 time to first token, ms", 0),
        ("256x1k_128", "out_tok_s", f"{many} prompts of {short_length} at once: tokens/s", 0),
        ("chats_under_131k_prefill", "ttft_p99", f"{chats} chats beside {long:,}: p99 time to first token, ms", 0),
        ("chats_under_131k_prefill", "tpot_p99", "the same: p99 time per token, ms", 0),
        ("chats_under_131k_prefill", "long_ttft_ms", "the same: the long prompt's first token, ms", 0),
    ]  # fmt: skip


def serving_cpu(results: Path) -> str:
    """Our server beside `transformers serve`, over HTTP, the bundled model. Raises ValueError when the file has not
    exactly one run of ours."""
    facts = load(results / "serving_transformers_cpu.json")
    m, options = facts["machine"], facts["options"]
    runs = [Run(**run) for run in facts["runs"]]
    (ours,) = (run for run in runs if run.engine == OURS)
    theirs = [run for run in runs if run.engine == TRANSFORMERS]
    rows = [
        [name, *(_number(run.figure(case, figure), digits) for run in (ours, *theirs))]
        for case, figure, name, digits in _serving_rows(Size(options["scale"]))
    ]
    text = (
        f"Our server beside `transformers serve`, one after the other, over HTTP, the bundled model in\n"
        f"{options['dtype']} on {m['cores']} cores of an {m['cpu']}: the cases above, {options['scale']:g} as long,\n"
        "with fewer requests and shorter answers, each case once; a p99 of so few is the largest of them\n"
        f"(torch {m['torch']}, transformers {m['transformers']}, commit {short(m['commit'])}, {m['date'][:10]}):\n\n"
    )
    return text + table(["case", "ours", *(_called(run) for run in theirs)], rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _called(run: Run) -> str:
    return "transformers serve, one at a time" if run.variant else "transformers serve, continuous batching"
