"""What the documents say is so: code runs, flags and variables exist, tables of errors and metrics are complete."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from exported_metrics import exported_families

from server import errors
from server.cli import app
from server.settings import Settings
from server.vllm_command_line import apart, refused
from server.vllm_flags import FLAGS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ATTENTION, CONFIGURATION = ((ROOT / "docs" / name).read_text() for name in ("attention.md", "configuration.md"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Variables of the compose file and of the kernel cache, which settings do not know.
OTHER_VARIABLES = {
    "LONGWAVE_CACHE_DIR", "LONGWAVE_KERNEL_IMAGE_DIR", "LONGWAVE_CPUS", "LONGWAVE_MEMORY", "LONGWAVE_VERSION"
}  # fmt: skip
#: Flags of other programs in the documents.
OTHER_FLAGS = {"--env-file", "--profile", "--build", "--no-deps", "--since", "--strict"}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def flags(command: Any) -> set[str]:
    """Of a click command and its subcommands. (typer may bring its own copy of click: so by attribute.)"""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    children = getattr(command, "commands", {}).values()
    return own.union({"--help"}, *(flags(child) for child in children))


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README + ATTENTION, flags=re.DOTALL))
def test_code_that_needs_no_server_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "a page", "exec"), {})

    assert capsys.readouterr().out.startswith("torch.Size")


@pytest.mark.parametrize("block", re.findall(r"```python needs-server\n(.*?)```", README, flags=re.DOTALL))
def test_code_that_needs_a_server_compiles(block: str) -> None:
    compile(block, "README.md", "exec")


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def from_vllm() -> str:
    """The section of the one page that names vLLM's flags."""
    section = re.search(r"^## Coming from vLLM\n.*?(?=^## )", CONFIGURATION, flags=re.DOTALL | re.MULTILINE)
    assert section is not None
    return section[0]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_flags_exist(page: Path) -> None:
    named = flags_in(page.read_text().replace(from_vllm(), "")) - OTHER_FLAGS

    assert named <= flags(typer.main.get_command(app))


def test_flags_for_people_who_come_from_vllm_are_ours_or_are_answered() -> None:
    named = flags_in(from_vllm().replace("--no-", "--"))

    assert named <= flags(typer.main.get_command(app)) | FLAGS.keys()
    assert named & FLAGS.keys()


def test_vllms_flags_that_the_documents_call_accepted_are() -> None:
    [accepted] = re.findall(r"^- \*\*Accepted.*?(?=^- )", from_vllm(), flags=re.DOTALL | re.MULTILINE)
    forms = [form for form in re.findall(r"`(-[^`]+)`", accepted) if "=" not in form]

    assert len(forms) >= 10
    for form in forms:
        _, given = apart(shlex.split(form), ())
        assert given, form
        assert not refused(given, "MODEL"), form


def test_vllms_flags_that_the_documents_call_refused_are() -> None:
    rows = re.findall(r"^\| (`-.*?) \|", from_vllm(), flags=re.MULTILINE)
    forms = [form for row in rows for form in re.findall(r"`(-[^`]+)`", row)]

    assert len(forms) >= 10
    for form in forms:
        _, given = apart(shlex.split(form), ())
        assert len(refused(given, "MODEL")) == 1, form


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_variables_exist(page: Path) -> None:
    settings = {f"LONGWAVE_{field.upper()}" for field in Settings.model_fields}
    named = set(re.findall(r"LONGWAVE_[A-Z_]+", page.read_text())) - OTHER_VARIABLES

    assert named <= settings


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())

    assert not [target for target in targets if not (page.parent / target).exists()]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_into_pages_lead_to_headings(page: Path) -> None:
    targets = re.findall(r"\]\(((?!https?://)[^)#]*)#([^)]+)\)", page.read_text())

    assert not [(name, part) for name, part in targets if part not in anchors(page.parent / name if name else page)]


@pytest.mark.parametrize(("page", "least"), [(README, 2), (CONFIGURATION, 9)], ids=["README.md", "configuration.md"])
def test_defaults_in_the_flag_tables_are_the_settings(page: str, least: int) -> None:
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]+) \|", page, flags=re.MULTILINE)
    fields = Settings.model_fields
    checked = 0
    for names, defaults in rows:
        named = [name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", names)]
        written = [value.strip().removesuffix(" s") for value in defaults.split(",")]
        for name, value in zip(named, written, strict=len(named) == len(written)):
            default = fields[name].default if name in fields else None
            if isinstance(default, int | float) and not isinstance(default, bool):
                assert float(value) == default, name
                checked += 1
    assert checked >= least


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    for page in PAGES:
        assert set(re.findall(r"\bmake ([a-z-]+)(?=[`\n ]*(?:`|#|$))", page.read_text())) <= targets, page_name(page)
    assert {"serve", "test", "test-gpu", "lint", "bench"} <= targets


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)

    assert sorted(rows) == sorted(exported_families())


def test_every_error_is_documented_and_every_documented_one_exists() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\w+) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)

    assert sorted(rows) == sorted(declared_errors(errors.LongwaveError))


def declared_errors(root: type[errors.LongwaveError]) -> set[tuple[str, str, str]]:
    own = {(str(root.status), root.type, root.code or "null")}
    return own.union(*(declared_errors(child) for child in root.__subclasses__()))


def test_every_promise_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "SECURITY.md").read_text())

    assert len(named) >= 8
    assert not [path for path in named if not (ROOT / path).exists()]
