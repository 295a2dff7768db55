"""What this machine has, and which kernels would serve a model on it and why. Reports problems instead of raising them;
loads no weights, but looks whether their files are whole; must not know the server."""

import importlib
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from models.errors import ModelLoadError
from server import adapter_report
from server.diagnosis import Diagnosis, Gpu, Layers
from server.engine.config import EngineConfig
from server.engine.runner import CannotServeError

PACKAGES = ("torch", "transformers", "cupy-cuda13x", "nvidia-cuda-nvrtc", "fastapi", "uvicorn", "tokenizers")
PREFILL_ROWS = 256

T = TypeVar("T")


def diagnose(config: EngineConfig, lora_folders: Mapping[str, Path]) -> Diagnosis:
    from attention_backend import backward, dispatch

    problems: list[str] = []
    gpus = _gpus()
    if not gpus:
        problems.append("There is no usable NVIDIA GPU: models run on the CPU, by cpu_reference.")
    errors: list[str] = []  # what stops one look at the model stops the others
    _reported(lambda: _check_weights(config), None, errors)
    layers: list[Layers] = _reported(lambda: _layers(config), [], errors)
    fused = _reported(lambda: _fused(config), "", errors)
    adapters: dict[str, str] = _reported(lambda: adapter_report.report(config, lora_folders, problems), {}, errors)
    return Diagnosis(
        longwave=_version("longwave"),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        cuda=_cuda(),
        gpus=gpus,
        cache=_cache(),
        kernels=[*dispatch.describe(), *backward.describe()],
        model=config.model,
        layers=layers,
        fused=fused,
        adapters=adapters,
        servable=not errors,
        problems=list(dict.fromkeys([*problems, *errors])),
    )


def _reported(look: Callable[[], T], otherwise: T, errors: list[str]) -> T:
    try:
        return look()
    except (CannotServeError, ModelLoadError) as error:
        errors.append(str(error))
    except Exception as error:  # whatever is broken is what was asked for
        errors.append(f"{type(error).__name__}: {error}")
    return otherwise


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> dict[str, str]:
    """Versions of what compiles and runs kernels, or what is wrong with it."""
    import torch

    from attention_backend.jit import bindings

    return {
        "torch built for CUDA": torch.version.cuda or "no",
        "driver supports CUDA": _asked(lambda: _runtime().driverGetVersion()),
        "runtime": _asked(lambda: _runtime().runtimeGetVersion()),
        "NVRTC": _asked(lambda: bindings.nvrtc().getVersion()),
    }


def _runtime() -> Any:
    return importlib.import_module("cupy.cuda.runtime")


def _asked(ask: Callable[[], Any]) -> str:
    try:
        answer = ask()
    except Exception as error:  # CuPy raises its own kinds for what is missing
        return f"not usable ({type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]})"
    if isinstance(answer, tuple):
        return ".".join(map(str, answer))
    return f"{answer // 1000}.{answer % 1000 // 10}" if answer else "no driver"


def _gpus() -> list[Gpu]:
    import torch

    from attention_backend.jit import UnsupportedArchError, arch_for

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        try:
            arch = arch_for(capability)
        except UnsupportedArchError as error:
            arch = str(error)
        memory = round(properties.total_memory / 2**30, 1)
        gpus.append(Gpu(properties.name, f"{capability[0]}.{capability[1]}", memory, arch))
    return gpus


def _cache() -> dict[str, str]:
    """The kernel cache: where it is, and whether it will be trusted."""
    from attention_backend.jit import CacheDirectoryError, default_cache, list_variants
    from attention_backend.jit.environment import JitEnvironment

    place = JitEnvironment.read().cache_directory
    state = {"directory": str(place)}
    if not place.exists():
        return state | {"state": "empty: kernels are compiled when first used, or by `longwave kernels build`"}
    archs = [gpu.kernels_for for gpu in _gpus()]
    try:
        cache = default_cache()
        wanted = list_variants(archs) if archs else []
        found = sum(cache.find(variant) is not None for variant in wanted)
    except CacheDirectoryError as error:
        return state | {"state": f"refused: {error}"}
    except Exception as error:  # no NVRTC, no headers: keys cannot be computed
        return state | {"state": f"cannot be read: {error}"}
    return state | {"state": f"{found} of {len(wanted)} kernels for this GPU are compiled" if archs else "present"}


def _source(config: EngineConfig) -> Any:
    from models import registry

    image_dir = None if config.model_image_dir is None else Path(config.model_image_dir)
    return registry.resolve(config.model, image_dir=image_dir)


def _check_weights(config: EngineConfig) -> None:
    """Of those that are here. Raises models.errors."""
    from models.stored_weights import check_files

    folder = _source(config).fetch(weights=False)
    if config.load_format == "auto" and any(folder.glob("*.safetensors")):
        check_files(folder)


def _without_weights(config: EngineConfig) -> tuple[Any, Any, Any]:
    """The model, and the device and the dtype in which it would run. Raises what loading would raise: models.errors,
    CannotServeError."""
    import torch

    from models import loader
    from models.descriptions import read_config

    usable = torch.cuda.is_available()
    if config.device == "cuda" and not usable:
        raise CannotServeError("device is 'cuda', but torch finds no usable GPU")
    device = torch.device("cuda", 0) if usable and config.device != "cpu" else torch.device("cpu")
    source = _source(config)
    dtype = loader.choose_dtype(config.dtype, read_config(source.fetch(weights=False)), device)
    return loader.load(source, device="meta", load_format="dummy"), device, dtype


def _fused(config: EngineConfig) -> str:
    from models.fusing import foretell

    loaded, device, _ = _without_weights(config)
    return str(foretell(loaded.model, device))


def _layers(config: EngineConfig) -> list[Layers]:
    """Builds the model without weights, finds its attention layers, and asks dispatch about each kind.

    Raises what loading would raise, and UnsupportedModelError.
    """
    from models.attention_sites import find_attention_sites
    from models.kv_pool import kv_cache_dtype
    from models.patching import check_supported_for_serving

    loaded, device, dtype = _without_weights(config)
    check_supported_for_serving(loaded.model)
    sites = [replace(site, layer_idx=0) for site in find_attention_sites(loaded.model)]
    kv_dtype = kv_cache_dtype(config.kv_cache_dtype, dtype, sites, device)
    return [
        Layers(
            layer_type=site.layer_type,
            count=count,
            num_heads=site.num_heads,
            num_kv_heads=site.num_kv_heads,
            head_dim=site.head_dim,
            prefill=_kernel(site, PREFILL_ROWS, config.block_size, dtype, kv_dtype, device),
            decode=_kernel(site, 1, config.block_size, dtype, kv_dtype, device),
        )
        for site, count in Counter(sites).items()
    ]


def _kernel(site: Any, rows: int, block_size: int, dtype: Any, kv_dtype: Any, device: Any) -> str:
    import torch

    from attention_backend import dispatch, fp8_pages
    from attention_backend.problem import AttentionArgs

    def pages(head_dim: int) -> torch.Tensor:
        pool = torch.empty(8, site.num_kv_heads, block_size, head_dim, dtype=kv_dtype, device=device)
        return pool.transpose(1, 2)  # [num_blocks, block_size, num_kv_heads, head_dim]

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    scale = torch.ones(site.num_kv_heads, device=device) if kv_dtype == torch.float8_e4m3fn else None
    args = AttentionArgs(
        q=torch.empty(rows, site.num_heads, site.head_dim, dtype=dtype, device=device),
        k=pages(site.head_dim),
        v=pages(site.head_dim_v),
        softmax_scale=site.softmax_scale,
        cu_seqlens_q=int32(0, rows),
        max_seqlen_q=rows,
        max_seqlen_k=rows,
        seqused_k=int32(rows),
        block_table=torch.zeros(1, 8, dtype=torch.int32, device=device),
        sinks=torch.zeros(site.num_heads, device=device) if site.has_sinks else None,
        window_left=site.window - 1,
        window_right=0,
        chunk_size=site.chunk_size,
        softcap=site.softcap,
        k_scale=scale,
        v_scale=scale,
    )
    try:
        if scale is not None and fp8_pages.is_copied(args):
            return fp8_pages.kernel(args)
        return str(dispatch.select(args))
    except dispatch.UnsupportedError as error:
        return f"refused: {error}"
