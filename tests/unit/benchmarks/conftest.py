"""Puts benchmarks/ on the path: it is a folder of scripts, not a package to install."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
