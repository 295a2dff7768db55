"""The measured tables of the README and of docs are what the result files say."""

from pathlib import Path

import pytest

from benchmarks import readme_tables


@pytest.mark.parametrize("page", readme_tables.PAGES, ids=lambda page: page.name)
def test_a_page_says_what_the_results_say(page: Path) -> None:
    text = page.read_text()
    assert readme_tables.rewritten(text) == text


def test_every_table_has_its_place() -> None:
    pages = "".join(page.read_text() for page in readme_tables.PAGES)
    for name in readme_tables.TABLES:
        assert pages.count(f"<!-- {name} -->\n") == 1


@pytest.mark.parametrize("argument", ["--chek", "--help"])
def test_an_argument_that_it_does_not_know_writes_nothing(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- linear -->\n<!-- /linear -->\n")
    monkeypatch.setattr(readme_tables, "PAGES", (page,))

    assert readme_tables.main([argument]) == 2
    assert page.read_text() == "<!-- linear -->\n<!-- /linear -->\n"
    assert readme_tables.main(["--check"]) == 1
    assert readme_tables.main([]) == 0
    assert readme_tables.main(["--check"]) == 0
