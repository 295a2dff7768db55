"""The serving results' file: written after every case, added to by later runs on the same machine. Knows no engine."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.serving_cases import Row
from benchmarks.serving_goals import Run

NAME = "serving"


class Results:
    """Rows by (engine, variant, driver) and case. A row says from which commit and when it is."""

    def __init__(self, machine: dict[str, Any], options: dict[str, Any], path: Path | None) -> None:
        self.content: dict[str, Any] = {"benchmark": NAME, "machine": machine, "options": options, "runs": []}
        self.path = path

    def merge(self, path: Path) -> None:
        """Begins with what an earlier run has written. Raises ValueError when that was another GPU or other cases."""
        earlier = read(path)
        for field, name in (("machine", "gpu"), ("options", "scale"), ("options", "model"), ("options", "dtype")):
            then, now = earlier[field].get(name), self.content[field].get(name)
            if then != now:
                raise ValueError(f"{path} has results with {name} {then}, this run has {now}")
        self.content["runs"] = earlier["runs"]

    def add(self, engine: str, variant: str, driver: str, row: Row) -> None:
        key = {"engine": engine, "variant": variant, "driver": driver}
        runs = self.content["runs"]
        run = next((run for run in runs if key.items() <= run.items()), None)
        if run is None:
            run = {**key, "rows": {}}
            runs.append(run)
        if row["case"].startswith("start"):
            run["rows"].pop("exit", None)  # how an earlier process of it ended
        at = {"commit": self.content["machine"]["commit"], "date": datetime.now(UTC).isoformat(timespec="seconds")}
        run["rows"][row["case"]] = {name: value for name, value in row.items() if name != "case"} | at
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = self.path.with_name(self.path.name + ".part")
            written.write_text(json.dumps(self.content, indent=1) + "\n")
            written.replace(self.path)

    @property
    def runs(self) -> list[Run]:
        return [Run(run["engine"], run["variant"], run["driver"], run["rows"]) for run in self.content["runs"]]

    @property
    def errors(self) -> list[str]:
        return [
            f"{run.engine} {run.variant} {run.driver} {case}: {row['error']}"
            for run in self.runs
            for case, row in run.rows.items()
            if "error" in row
        ]


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError when it is not a file of these."""
    content = json.loads(path.read_text())
    if content.get("benchmark") != NAME:
        raise ValueError(f"{path} holds no serving results")
    return dict(content)
