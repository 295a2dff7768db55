"""One flag with several values, as people have it in their scripts for vLLM."""

import pytest

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
