"""Each in a process of its own: what is imported stays imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.registry import ModelSource

ROOT = Path(__file__).parents[3]
BEFORE = """
import sys
import torch
from models.compiler_stand_in import stand_in
stand_in()
import torch._dynamo
"""


def is_real(program: str, *arguments: str) -> bool:
    """Whether torch._dynamo was imported after the program."""
    says = "\nprint(sys.modules['torch._dynamo'].__name__, 'torch._dynamo.convert_frame' in sys.modules)"
    command = [sys.executable, "-c", BEFORE + program + says, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    name, real = done.stdout.splitlines()[-1].split()
    assert name == "torch._dynamo"
    return real == "True"


DECORATED = """
def double(number):
    return 2 * number
for decorate in (torch.compiler.disable, torch.compiler.disable(recursive=False), torch._dynamo.disable,
                 torch._dynamo.allow_in_graph, torch._dynamo.assume_constant_result):
    assert decorate(double)(3) == 6
class Layer(torch.nn.Linear):
    @torch.compiler.disable
    def forward(self, rows):
        return super().forward(rows)
assert Layer(2, 2)(torch.ones(1, 2)).shape == (1, 2)
with torch.device("meta"):
    torch.nn.Linear(2, 2)  # torch's own mark, which imports torch._dynamo when it is called
assert not hasattr(torch._dynamo, "__wrapped__")
"""


def test_decorators_do_without_the_compiler() -> None:
    assert not is_real(DECORATED)


WHO_WANTS_IT = {
    "attribute": "torch._dynamo.reset()",
    "submodule": (
        "from torch._dynamo.utils import counters\nimport torch._dynamo.utils\n"
        "assert torch._dynamo.utils.counters is counters is sys.modules['torch._dynamo.utils'].counters"
    ),
    "class for masks": (
        "from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex\n"
        "with TransformGetItemToIndex():\n    pass\n"
        "from torch._dynamo import _trace_wrapped_higher_order_op as real\n"
        "assert TransformGetItemToIndex is not real.TransformGetItemToIndex"
    ),
    "compile": (
        "double = torch.compile(lambda x: 2 * x, backend='eager')\nassert double(torch.ones(1)).item() == 2\n"
        "assert torch._dynamo.utils.counters['frames']['ok'] == 1"
    ),
    "submodule after a decorator": (
        "assert torch._dynamo.disable(lambda: 3)() == 3\nimport torch._dynamo.config as one\n"
        "from torch._dynamo import config\nassert one is config and torch._dynamo.disable(lambda: 3)() == 3"
    ),
}
#: Each program in a copy of a process that has imported torch, which takes as long as all else.
FORKED = """
import os
for program in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            exec(program, globals())
            print(sys.modules['torch._dynamo'].__name__, 'torch._dynamo.convert_frame' in sys.modules, flush=True)
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


def test_who_wants_the_compiler_gets_it() -> None:
    command = [sys.executable, "-c", BEFORE + FORKED, *WHO_WANTS_IT.values()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch._dynamo True"] * len(WHO_WANTS_IT), done.stderr


@pytest.mark.thorough
def test_one_that_is_imported_stays() -> None:
    before = "import sys, torch\nimport torch._dynamo as real\n"
    program = before + "from models.compiler_stand_in import stand_in\nstand_in()\n"
    command = [sys.executable, "-c", program + "assert sys.modules['torch._dynamo'] is real"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


PLACE = """
from pathlib import Path
from models.unused_packages import leave_out
folder = Path(sys.argv[1])
leave_out(folder)
from models import patching
from models.descriptions import read_config
from models.placing import place
from models.stored_weights import readable
from models.weight_reading import WeightReading
patching.register()
cpu = torch.device("cpu")
reading = WeightReading(readable(folder), cpu)
assert place(reading.finish(), read_config(folder), torch.bfloat16, cpu, patching.LONGWAVE_PAGED) is not None
assert "sympy" not in sys.modules
"""


def test_a_model_is_made_without_the_compiler_and_what_it_brings(bundled_source: ModelSource) -> None:
    assert not is_real(PLACE, str(bundled_source.fetch()))


ENGINE = """
from models.stages import Stages
from server.engine.config import EngineConfig
from server.engine.loading import load
import time
config = EngineConfig(model=sys.argv[1], device="cpu", max_model_len=256, enable_lora=True)
loaded = load(config, Stages(time.monotonic()))
loaded.runner.warm_up()
"""


def test_an_engine_starts_without_the_compiler(bundled_source: ModelSource) -> None:
    assert not is_real(ENGINE, str(bundled_source.fetch()))
