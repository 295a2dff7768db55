"""What `longwave doctor` says of LoRA: which layers adapters could change, what their slots cost, and whether the
configured ones can be served. Loads the adapters' weights and no model's; must not know the server."""

from collections.abc import Mapping
from pathlib import Path

from server.engine.config import EngineConfig


def report(config: EngineConfig, folders: Mapping[str, Path], problems: list[str]) -> dict[str, str]:
    """Lines by name; adapters that cannot be served become problems. Raises what loading the model would raise."""
    import torch

    from models import loader, registry
    from models.adapters import LoraLimits, find_linears, open_folder, read_weights
    from models.adapters.slots import memory_bytes
    from models.adapters.weights import max_weight_bytes
    from models.descriptions import read_config
    from models.errors import AdapterError

    if not config.enable_lora:
        return {"LoRA": "not served"}
    image_dir = None if config.model_image_dir is None else Path(config.model_image_dir)
    source = registry.resolve(config.model, image_dir=image_dir)
    loaded = loader.load(source, device="meta", load_format="dummy")
    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    dtype = loader.choose_dtype(config.dtype, read_config(source.fetch(weights=False)), device)
    linears = find_linears(loaded.model)
    size = memory_bytes(linears, LoraLimits(config.max_loras, config.max_lora_rank), dtype) / 2**20
    slots = f"{config.max_loras} slots of rank {config.max_lora_rank} on {len(linears)} linear layers: {size:.1f} MiB"
    lines = {"LoRA": slots}
    for name, folder in folders.items():
        try:
            files = open_folder(str(folder), max_weight_bytes(linears, config.max_lora_rank))
            facts = read_weights(files, linears, max_rank=config.max_lora_rank, dtype=dtype, pin_memory=False).facts
        except AdapterError as error:
            problems.append(f"The adapter {name} cannot be served: {error}.")
        else:
            lines[f"adapter {name}"] = f"rank {facts.rank}, {facts.num_layers} layers, SHA-256 {facts.digest[:12]}..."
    return lines
