"""What `longwave doctor` says: as data, and in a terminal. Looks at nothing itself."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: str
    memory_gib: float
    kernels_for: str  # architecture, or why there is none


@dataclass(frozen=True, slots=True)
class Layers:
    """One kind of attention layer of a model, and who serves it."""

    layer_type: str
    count: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    prefill: str
    decode: str


@dataclass(slots=True)
class Diagnosis:
    longwave: str
    python: str
    packages: dict[str, str]
    cuda: dict[str, str]
    gpus: list[Gpu]
    cache: dict[str, str]
    kernels: list[str]  # the capability table in words
    model: str
    layers: list[Layers]
    fused: str  # the layers around attention that are
    adapters: dict[str, str]  # LoRA
    servable: bool  # whether the model could be looked at, and its weights are whole
    problems: list[str] = field(default_factory=list)  # what will not work, in sentences

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """To standard output, as it stands: brackets in a message (longwave[cuda]) are no markup."""
    console = Console(markup=False)
    facts = Table(show_header=False, box=None)
    facts.add_row("longwave", diagnosis.longwave)
    facts.add_row("python", diagnosis.python)
    for name, text in (diagnosis.packages | diagnosis.cuda).items():
        facts.add_row(name, text)
    for gpu in diagnosis.gpus:
        facts.add_row("GPU", f"{gpu.name}, {gpu.memory_gib} GiB, {gpu.capability}, kernels for {gpu.kernels_for}")
    for name, text in diagnosis.cache.items():
        facts.add_row(f"kernel cache {name}", text)
    console.print(facts)
    titles = ("layers", "type", "heads", "kv heads", "head_dim", "prefill", "decode")
    layers = Table(
        *(Column(title, overflow="fold") for title in titles), title=diagnosis.model, box=None, pad_edge=False
    )
    for layer in diagnosis.layers:
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        layers.add_row(str(layer.count), layer.layer_type, *map(str, sizes), layer.prefill, layer.decode)
    if diagnosis.layers:
        console.print(layers)
    if diagnosis.fused:
        console.print(f"Fused: {diagnosis.fused}")
    adapters = Table(show_header=False, box=None, pad_edge=False)
    for name, text in diagnosis.adapters.items():
        adapters.add_row(name, text)
    console.print(adapters)
    console.print("Kernels, in order of preference:")
    for line in diagnosis.kernels:
        console.print(f"  {line}")
    for problem in diagnosis.problems:
        console.print(f"! {problem}", style="yellow")
