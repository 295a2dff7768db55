"""What the README shows through OpenAI's client is what the bundled model answers."""

import re
from pathlib import Path

import pytest

from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

README = Path(__file__).parents[3] / "README.md"


def test_the_readmes_client_prints_what_the_readme_says(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python needs-server\n(.*?)```\n```\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert found is not None
    code, said = found.groups()
    bounded = code.replace("http://127.0.0.1:8000", server.url).replace("stream=True", "stream=True, max_tokens=40")

    exec(compile(bounded, "README.md", "exec"), {})

    assert capsys.readouterr().out == said.rstrip("\n")
