"""The measured table of trials of our server, from the results of benchmarks/faults.py."""

from pathlib import Path

from benchmarks.markdown import Facts, load, short, table

FILE = "faults_cpu.json"


def trials(results: Path) -> str | None:
    """A line for each trial, with every number that has a goal; None where no trial was recorded."""
    rows: list[Facts] = list(load(results / FILE).get("trials", {}).values())
    if not rows:
        return None
    places = sorted({_place(row["machine"]) for row in rows})
    lines = [[row["trial"], row["what"], _numbers(row), _met(row)] for row in rows]
    model = "a model of two layers where no other is named"
    where = f"Our server alone, with {model} ({'; '.join(places)}). In brackets what was to be reached:"
    return f"{where}\n\n{table(['trial', 'what', 'measured', 'goals met'], lines)}"


def _place(machine: Facts) -> str:
    at = f"commit {short(machine['commit'])}, {machine['date'][:10]}"
    return f"{machine['cores']} cores, {machine['cpu']}, {at}"


def _numbers(row: Facts) -> str:
    """Counts that say how much was done, and what has a goal."""
    said = [
        f"{one['measure']} {_number(one['value'])}" + ("" if one["goal"] is None else f" ({_sign(one['goal'])})")
        for one in row["measures"]
    ]
    return "; ".join(said)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _sign(goal: str) -> str:
    return "0" if goal == "<= 0" else goal.replace(">=", "≥").replace("<=", "≤")


def _met(row: Facts) -> str:
    if row["failure"] is not None:
        return f"it failed: {row['failure']}"
    goals = [one["met"] for one in row["measures"] if one["met"] is not None]
    missed = [one["measure"] for one in row["measures"] if one["met"] is False]
    return f"{sum(goals)} of {len(goals)}" + (f"; not: {', '.join(missed)}" if missed else "")
