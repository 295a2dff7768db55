"""What the benchmarks' command lines have in common. Knows no kernel."""

from pathlib import Path

import torch
import typer


def numbers(text: str) -> list[int]:
    """Of an option such as "64,128". Raises typer.BadParameter."""
    try:
        return [int(x) for x in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 64,128") from error


def positive(text: str) -> int:
    """Raises ValueError for what is none, as argparse wants it."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def write_out(out: Path, text: str) -> None:
    """To the file that an option names, in a folder that may be a new one: what was measured took minutes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)


def require_gpu() -> torch.device:
    """The device that is measured. Without one: says so, and ends with exit code 2."""
    if not torch.cuda.is_available():
        typer.echo("This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.", err=True)
        raise typer.Exit(2)
    return torch.device("cuda", torch.cuda.current_device())
