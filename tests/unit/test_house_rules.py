"""The conventions that no linter knows: what must not be in the source, and where the environment may be read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("server", "models", "attention_backend")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
#: The settings; the kernel cache, which works without a server; engine and trainer, which inherit the environment.
READERS_OF_THE_ENVIRONMENT = {
    "server/child_process.py",
    "server/environment.py",
    "attention_backend/jit/environment.py",
}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "joblib.load"}
FORBIDDEN_STEMS = {"utils", "util", "helpers", "common", "misc"}
FORBIDDEN_ENDINGS = ("Manager", "Helper", "Service")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@pytest.fixture(params=SOURCES, ids=name)
def source(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_module_says_what_it_does(source: Path) -> None:
    docstring = ast.get_docstring(ast.parse(source.read_text()))

    assert docstring or not source.read_text().strip()


def test_no_pickle_and_no_code_from_data(source: Path) -> None:
    for node in nodes(source):
        match node:
            case ast.Import(names=names):
                assert not FORBIDDEN_MODULES & {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                assert module.split(".")[0] not in FORBIDDEN_MODULES
            case ast.Call(func=function, keywords=keywords):
                assert ast.unparse(function) not in FORBIDDEN_CALLS
                for keyword in keywords:
                    if keyword.arg == "trust_remote_code":
                        assert ast.unparse(keyword.value) == "False"


def test_no_wait_swallows_a_cancellation(source: Path) -> None:
    """asyncio.wait_for of Python 3.11 does, where what it waits for ends just then; asyncio.timeout does not."""
    assert not [
        node for node in nodes(source) if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]


def test_the_environment_is_read_in_one_place_a_room(source: Path) -> None:
    reads = [node for node in nodes(source) if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ"]
    calls = [node for node in nodes(source) if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.getenv"]

    assert not calls
    assert not reads or name(source) in READERS_OF_THE_ENVIRONMENT


def test_names_say_what_things_are(source: Path) -> None:
    assert source.stem not in FORBIDDEN_STEMS
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(FORBIDDEN_ENDINGS)


def test_kernels_include_no_torch_headers() -> None:
    kernels = sorted((ROOT / "attention_backend" / "kernels").rglob("*.cuh"))

    assert kernels
    for kernel in kernels:
        includes = [line for line in kernel.read_text().splitlines() if line.lstrip().startswith("#include")]
        assert not [line for line in includes if "torch" in line or "ATen" in line or "c10" in line], name(kernel)


def test_every_room_has_its_contents_declared() -> None:
    for room in ROOMS:
        tree = ast.parse((ROOT / room / "__init__.py").read_text())
        assigned = [target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        assert not tree.body[1:] or "__all__" in assigned, room
