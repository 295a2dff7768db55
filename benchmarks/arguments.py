"""What the benchmarks' command lines have in common. Knows no kernel."""

import torch
import typer


def numbers(text: str) -> list[int]:
    """Of an option such as "64,128". Raises typer.BadParameter."""
    try:
        return [int(x) for x in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 64,128") from error


def require_gpu() -> torch.device:
    """The device that is measured. Without one: says so, and ends with exit code 2."""
    if not torch.cuda.is_available():
        typer.echo("This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.", err=True)
        raise typer.Exit(2)
    return torch.device("cuda", torch.cuda.current_device())
