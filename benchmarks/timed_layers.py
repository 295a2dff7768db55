"""What the benchmarks of layers share: calls as a CUDA graph, and how their results are kept and told."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer


def captured(work: Callable[[], Any], first: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The work as a graph, after `first` on a side stream, which loads kernels and takes memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def tell(content: dict[str, Any], table: str, errors: Sequence[str], out: Path | None) -> None:
    """Writes the content, prints the table and the errors. Raises typer.Exit(1) where there are some."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    typer.echo(f"{content['machine']['gpu']}\n{table}")
    typer.echo("\n".join(errors), nl=bool(errors))
    if errors:
        raise typer.Exit(1)
