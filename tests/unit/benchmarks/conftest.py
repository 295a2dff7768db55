"""Puts the checkout on the path: benchmarks/ is a folder of scripts, not an installed package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
