"""In a process of its own: what is imported stays imported."""

import os
import subprocess
import sys
from pathlib import Path

from models import registry

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
    assert run(PROGRAM, str(tmp_path)) == "False\n"


TEXT_ALONE = """
import sys
from models import registry
from models.unused_packages import leave_out_torch
source = registry.resolve("bundled")
source.fetch(weights=False)
leave_out_torch()
from models.descriptions import load_tokenizer, max_positions
from server.text.tokenizer import TextTokenizer
tokenizer = load_tokenizer(source)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
print(TextTokenizer(tokenizer).encode(chat)[-5:], max_positions(source), "torch" in sys.modules)
"""


def test_a_process_that_knows_text_alone_imports_no_torch(bundled_source: registry.ModelSource) -> None:
    bundled_source.fetch()  # a conversion would import it
    assert run(TEXT_ALONE) == "[4093, 198, 26843, 2, 198] 8192 False\n"


def test_torch_that_is_imported_stays() -> None:
    program = "import torch\nfrom models.unused_packages import leave_out_torch\nleave_out_torch()\n"
    assert run(program + "from transformers import utils\nprint(utils.is_torch_available())") == "True\n"


def run(program: str, *paths: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*paths, str(ROOT)))}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
