"""In a process of its own: what is imported stays imported."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from models import registry

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from models.unused_packages import leave_out
leave_out()
import models.runner
import transformers.generation.candidate_generator
import transformers.loss.loss_utils
print([name for name in ("sklearn", "torchvision", "scipy", "torch.distributed.tensor") if name in sys.modules])
"""


def test_what_no_engine_uses_is_not_imported_where_it_is_installed(tmp_path: Path) -> None:
    """transformers 5.17 would; 5.23 waits until it is used."""
    write(tmp_path, {
        "sklearn/__init__.py": "", "sklearn/metrics.py": "roc_curve = None",
        "sklearn-1.7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sklearn\nVersion: 1.7.0\n",
        "sklearn-1.7.0.dist-info/top_level.txt": "sklearn\n",
        "torchvision/__init__.py": "", "torchvision/io.py": "",
        "torchvision/transforms.py": "class InterpolationMode: pass",
        "torchvision-0.30.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.30.0\n",
        "torchvision-0.30.0.dist-info/top_level.txt": "torchvision\n",
        "scipy/__init__.py": "", "scipy/optimize.py": "linear_sum_assignment = None",
        "scipy-1.17.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: scipy\nVersion: 1.17.0\n",
        "scipy-1.17.0.dist-info/top_level.txt": "scipy\n",
    })  # fmt: skip
    assert run(PROGRAM, str(tmp_path)) == "[]\n"


TORCHAO = """
import sys
from pathlib import Path
from models.unused_packages import leave_out
leave_out(Path(sys.argv[1]))
from transformers.utils import is_torchao_available
print(is_torchao_available())
"""
FAKE_TORCHAO = {
    "torchao/__init__.py": "",
    "torchao-0.99.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchao\nVersion: 0.99\n",
}


@pytest.mark.parametrize("method", ["torchao", "fp8"])
def test_torchao_is_there_for_its_own_models_alone(tmp_path: Path, method: str) -> None:
    write(tmp_path, FAKE_TORCHAO)
    write(tmp_path, {"model/config.json": json.dumps({"quantization_config": {"quant_method": method}})})
    said = run(TORCHAO, str(tmp_path), arguments=[str(tmp_path / "model")])
    assert said == f"{method == 'torchao'}\n"


# What bitsandbytes does when it is imported on a CPU: PEFT is enough for that.
FETCHES = {
    "kernels/__init__.py": "def get_kernel(*_, **__): raise SystemExit('code came from the hub')",
    "kernels-0.17.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n",
    "bitsandbytes/__init__.py": """
__version__ = "0.50.2"
try:
    from kernels import get_kernel
    get_kernel("kernels-community/quantization-bitsandbytes", version=1)
except ImportError:
    print("without")
from bitsandbytes import nn
""",
    "bitsandbytes/nn.py": "Linear8bitLt = Linear4bit = Params4bit = None",
    "bitsandbytes-0.50.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.50.2\n",
}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            "from models.unused_packages import leave_out, without_hub_kernels\nleave_out()\n"
            "with without_hub_kernels():\n    pass\nimport bitsandbytes",
            marks=pytest.mark.thorough,
        ),
        "from models.training import Trainer",
        pytest.param(
            "from models.unused_packages import without_hub_kernels\n"
            "with without_hub_kernels():\n    import bitsandbytes\nimport kernels",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_nothing_fetches_kernels_from_the_hub_where_the_package_for_it_is_installed(
    tmp_path: Path, program: str
) -> None:
    write(tmp_path, FETCHES)
    assert run(program, str(tmp_path)) == "without\n"


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


@pytest.mark.thorough
def test_torch_that_is_imported_stays() -> None:
    program = "import torch\nfrom models.unused_packages import leave_out_torch\nleave_out_torch()\n"
    assert run(program + "from transformers import utils\nprint(utils.is_torch_available())") == "True\n"


def write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(text)


def run(program: str, *paths: str, arguments: Sequence[str] = ()) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*paths, str(ROOT)))}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
