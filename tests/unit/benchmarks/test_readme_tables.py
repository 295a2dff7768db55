"""The README's measured tables are what the result files say."""

from benchmarks import readme_tables


def test_the_readme_says_what_the_results_say() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.rewritten(text) == text
