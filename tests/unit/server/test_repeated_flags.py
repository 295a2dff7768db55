"""One flag with several values, as people have it in their scripts for vLLM."""

import pytest
import typer
from typer.core import TyperGroup

from server.cli import app
from server.repeated_flags import one_flag_each


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("m --port 1", "m --port 1"),
        ("--lora-modules a=x", "--lora-modules a=x"),
        ("--lora-modules a=x b=y c=z --port 1", "--lora-modules a=x --lora-modules b=y --lora-modules c=z --port 1"),
        ("--lora-modules=a=x b=y", "--lora-modules=a=x --lora-modules b=y"),
        ("--lora-modules a=x --lora-modules b=y c=z", "--lora-modules a=x --lora-modules b=y --lora-modules c=z"),
        ("--lora-modules a=x,b=y m", "--lora-modules a=x,b=y m"),
        ("--lora-modules a=x m b=y", "--lora-modules a=x m b=y"),
        ("--served-model-name a b=y", "--served-model-name a b=y"),
        ("m --lora-modules", "m --lora-modules"),
        ("--lora-modules a --port 1 b=y", "--lora-modules a --port 1 b=y"),
    ],
)
def test_each_value_has_a_flag(given: str, understood: str) -> None:
    assert list(one_flag_each(given.split())) == understood.split()


def test_the_command_takes_them() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    serve = command.commands["serve"]
    context = serve.make_context("serve", ["a-model", "--lora-modules", "a=x", "b=y", "--port", "1"])
    given = {name: context.params[name] for name in ("positional_model", "lora_modules", "port")}
    assert given == {"positional_model": "a-model", "lora_modules": ["a=x", "b=y"], "port": 1}
