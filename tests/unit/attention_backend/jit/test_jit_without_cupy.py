"""The CPU-only install."""

import subprocess
import sys
from pathlib import Path

IMPORTS = """
import sys

class NoCupy:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cupy", "cupy_backends"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoCupy())
import attention_backend
from attention_backend import jit

assert not any(name.startswith("cupy") for name in sys.modules)
(kernel,) = [path.stem for path in jit.KERNELS_DIR.glob("*.cuh")][:1]
try:
    jit.default_cache().get(jit.KernelVariant(kernel, "sm_80"))
except jit.CupyMissingError as error:
    print(error)
"""


def test_the_package_imports_and_the_first_kernel_names_the_extra_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[4],
        timeout=120,
    )
    assert "make install (where there is a GPU) or pip install -c constraints.txt -e '.[cuda]'" in done.stdout
    assert "No module named 'cupy'" in done.stdout


def test_importing_the_room_imports_no_cupy() -> None:
    statement = "import sys, attention_backend.jit; sys.exit('cupy' in sys.modules)"
    root = Path(__file__).resolve().parents[4]
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=root, timeout=120)
