"""In a process of its own: what is imported stays imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from models.unused_packages import leave_out
leave_out()
import models.runner
import transformers.generation.candidate_generator
print("sklearn" in sys.modules)
"""


def test_what_no_engine_uses_is_not_imported_where_it_is_installed(tmp_path: Path) -> None:
    """transformers 5.17 would; 5.23 waits until it is used."""
    for path, text in {
        "sklearn/__init__.py": "", "sklearn/metrics.py": "roc_curve = None",
        "sklearn-1.7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sklearn\nVersion: 1.7.0\n",
        "sklearn-1.7.0.dist-info/top_level.txt": "sklearn\n",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
