"""All trials by name, in the order in which they run, and a way to run one. Knows no file and no table."""

import time
import traceback

from benchmarks.agreement import in_bfloat16, in_float32
from benchmarks.cache_timing import cache_timing
from benchmarks.chaos import chaos
from benchmarks.disconnects import disconnects
from benchmarks.drain import drain
from benchmarks.egress import egress
from benchmarks.endless_template import endless_template
from benchmarks.engine_kills import engine_kills
from benchmarks.largest_prompts import largest_prompts
from benchmarks.overload import overload
from benchmarks.raw_http import raw_http
from benchmarks.retry_storm import retry_storm
from benchmarks.slow_clients import slow_clients
from benchmarks.soak import soak
from benchmarks.stalled_readers import stalled_readers
from benchmarks.trial import Row, Scale, Trial
from benchmarks.two_keys import two_keys

TRIALS = {
    trial.name: trial
    for trial in (
        Trial("overload", "five times as many requests as are answered, at their own times", overload),
        Trial("keys", "one API key floods the server with long answers, another asks short questions", two_keys),
        Trial("retries", "OpenAI's client and its five retries: a full server, a restarting engine", retry_storm),
        Trial(
            "disconnects",
            "clients leave: while queued, in prompts, in streams, before whole answers",
            disconnects,
        ),
        Trial("drain", "SIGTERM under load", drain),
        Trial("kills", "SIGKILL to the engine under load", engine_kills),
        Trial("chaos", "processes killed and stopped, connections reset, at random", chaos),
        Trial("egress", "requests of every kind, a fine-tuning job among them; who is connected to", egress),
        Trial("raw_http", "bytes that are hardly ever a right request, from 40 connections at once", raw_http),
        Trial("slow_clients", "a body without end, large headers, many connections of a byte a second", slow_clients),
        Trial("stalled_readers", "clients that never read their streams, and others that do", stalled_readers),
        Trial(
            "largest_prompts",
            "a hundred prompts as long as the model takes, and some of 4 MB",
            largest_prompts,
        ),
        Trial("cache_timing", "one API key tries to tell by the time what another one's prompts were", cache_timing),
        Trial("agreement_float32", "greedy answers of the bundled model alone and among others", in_float32),
        Trial("agreement_bfloat16", "the same in 16 bits", in_bfloat16),
        Trial("template", "a chat template without an end, and one that doubles a text for ever", endless_template),
        Trial("soak", "mixed traffic", soak),
    )
}


def run(name: str, scale: Scale) -> Row:
    """What was measured, and whether all goals were met. What raises is a trial that failed."""
    trial, begin = TRIALS[name], time.monotonic()
    failure, measures = None, []
    try:
        measures = [measure.row() for measure in trial.run(scale)]
    except (Exception, SystemExit) as error:  # the latter: a server that was not ready in time
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    return {
        "trial": trial.name,
        "what": trial.design,
        "seconds": round(time.monotonic() - begin, 1),
        "met": failure is None and all(row["met"] is not False for row in measures),
        "failure": failure,
        "measures": measures,
    }


def report(row: Row) -> str:
    """One trial in words, a line for each measure."""
    lines = [f"{row['trial']}: {row['what']} ({row['seconds']:.0f} s)"]
    for one in row["measures"]:
        goal = "" if one["goal"] is None else f" ({one['goal']}, {'met' if one['met'] else 'NOT MET'})"
        lines.append(f"    {one['measure']}: {one['value']:g}{goal}")
    return "\n".join([*lines, *filter(None, [row["failure"]]), ""])
