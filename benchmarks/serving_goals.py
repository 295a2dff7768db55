"""What the serving cases have to reach, and the table that says whether they did. Pure: rows in, lines out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

OURS = "ours"
OFFLINE, HTTP = "offline", "http"


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's rows, by case."""

    engine: str
    variant: str
    driver: str
    rows: Mapping[str, Mapping[str, Any]]

    def figure(self, case: str, name: str) -> float | None:
        value = self.rows.get(case, {}).get(name)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of ours against `factor` times another: the best peer's, another case's, our engine's without HTTP, or
    1 (`absolute`). Without a factor it is only compared."""

    case: str
    figure: str
    sense: Literal["<=", ">="]
    factor: float | None = None
    of: Literal["peer", "absolute", "case", "offline"] = "peer"
    other: tuple[str, str] = ("", "")  # for `of="case"`: case and figure

    def is_met(self, value: float, against: float) -> bool | None:
        if self.factor is None:
            return None
        limit = self.factor * against
        return value <= limit if self.sense == "<=" else value >= limit


GOALS = (
    Goal("ttft_32k", "ms", "<=", 0.95),
    Goal("ttft_131k", "ms", "<=", 0.95),
    Goal("tpot_b1_1024", "p50", "<=", 0.82),
    Goal("tpot_b1_131072", "p50", "<=", 0.93),
    Goal("32x32k_128", "total_tok_s", ">=", 1.10),
    Goal("32x32k_128", "total_tok_s", ">=", 0.97, "offline"),
    Goal("32x32k_128", "itl_p50_tail", "<="),
    Goal("shared_100k_x64", "out_tok_s", ">=", 4.0),
    Goal("shared_100k_x64", "out_tok_s", ">=", 0.97, "offline"),
    Goal("shared_100k_x64", "itl_p50", "<=", 12.0, "absolute"),
    Goal("64x8k_256", "out_tok_s", ">=", 1.08),
    Goal("64x8k_256", "out_tok_s", ">=", 0.97, "offline"),
    Goal("256x1k_128", "out_tok_s", ">="),
    Goal("256x1k_128", "out_tok_s", ">=", 0.97, "offline"),
    Goal("chats_alone", "ttft_p99", "<="),
    Goal("chats_alone", "itl_p50", "<="),
    Goal("chats_alone", "tpot_p99", "<="),
    Goal("chats_under_131k_prefill", "ttft_p99", "<=", 400.0, "absolute"),
    Goal("chats_under_131k_prefill", "itl_p50", "<="),
    Goal("chats_under_131k_prefill", "itl_p99", "<="),
    Goal("chats_under_131k_prefill", "tpot_p99", "<=", 30.0, "absolute"),
    Goal("chats_under_131k_prefill", "long_ttft_ms", "<=", 1.1, "case", ("ttft_131k", "ms")),
    Goal("nested_prefixes", "out_tok_s", ">="),
    Goal("nested_prefixes", "itl_p50", "<="),
    Goal("start_cold", "s", "<=", 20.0, "absolute"),
    Goal("start_warm", "s", "<=", 10.0, "absolute"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    driver: str
    goal: Goal
    ours: float
    against: float | None  # None: what it is to be compared with was not measured
    against_name: str

    @property
    def ratio(self) -> float | None:
        return self.ours / self.against if self.against else None

    @property
    def text(self) -> str:
        met = None if self.against is None else self.goal.is_met(self.ours, self.against)
        return {True: "met", False: "MISSED", None: "-"}[met]


def verdicts(runs: Sequence[Run]) -> Iterator[Verdict]:
    """One for every goal whose case ours has run."""
    for run in runs:
        if run.engine != OURS:
            continue
        for goal in GOALS:
            value = run.figure(goal.case, goal.figure)
            if value is None or (goal.of == "offline" and run.driver != HTTP):
                continue
            yield Verdict(run.driver, goal, value, *_against(goal, run, runs))


def _against(goal: Goal, ours: Run, runs: Sequence[Run]) -> tuple[float | None, str]:
    if goal.of == "absolute":
        return 1.0, "a limit"
    if goal.of == "case":
        return ours.figure(*goal.other), goal.other[0]
    if goal.of == "offline":
        found = [(run, OFFLINE) for run in runs if run.engine == OURS and run.driver == OFFLINE]
    else:
        peers = [run for run in runs if run.engine != OURS and run.driver == ours.driver]
        found = [(run, f"{run.engine} {run.variant}".strip()) for run in peers]
    figures = [(value, name) for run, name in found if (value := run.figure(goal.case, goal.figure)) is not None]
    best = min if goal.sense == "<=" else max
    return best(figures) if figures else (None, "not measured")


def are_goals(options: Mapping[str, Any]) -> bool:
    """Whether a file's options are those that the goals are of: whole cases, the 8B model, a GPU."""
    return (options["scale"], options["model"], options["device"]) == (1.0, "8b", "cuda")


def table(runs: Sequence[Run], *, judged: bool = True) -> list[str]:
    """Lines for a terminal: ours, what it stands beside (the best of the peers' variants), their ratio, the goal; not
    `judged`: only what is compared."""
    lines = [f"{'':8}{'case':26}{'figure':14}{'ours':>11}{'against':>11}{'ratio':>8}  {'goal':16}{'':8}beside"]
    for verdict in verdicts(runs):
        goal = verdict.goal if judged else replace(verdict.goal, factor=None)
        beside = "-" if verdict.against is None or goal.of == "absolute" else f"{verdict.against:.2f}"
        ratio = "-" if verdict.ratio is None or goal.of == "absolute" else f"{verdict.ratio:.3f}"
        said = verdict.text if judged else "-"
        asked = "" if goal.factor is None else f"{goal.sense} {goal.factor:g}{'' if goal.of == 'absolute' else 'x'}"
        lines.append(
            f"{verdict.driver:8}{goal.case:26}{goal.figure:14}{verdict.ours:11.2f}{beside:>11}{ratio:>8}"
            f"  {asked:16}{said:8}{verdict.against_name}"
        )
    if not judged:
        lines.append("Goals are of the whole cases with the 8B model on a GPU: nothing is judged here.")
    return lines
