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
