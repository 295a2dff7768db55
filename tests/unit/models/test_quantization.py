"""Quantised checkpoints: which are served and as what, that their weights arrive, and what is refused.

bitsandbytes is not installed with the other packages of tests: 125 MB, nearly all of it CUDA libraries. Its tests run
where somebody installed it (`pip install -c constraints.txt bitsandbytes`), and are skipped in CI. So are torchao's.
"""

import importlib.metadata
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from quantized_folders import auto_fp8, compressed_int8, fp8, mxfp4, quantized, say_quantized, unquantized
from safetensors.torch import load_file, save_file
from tiny_models import random_model, tiny_config
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from attention_backend.kernels import device
from models import loader
from models.batch import SamplingParams, ScheduledSeq, StepBatch
from models.errors import ModelLoadError
from models.fusing import foretell
from models.loader import LoadedModel, load, load_for_training
from models.packed_linear import PackedLinear
from models.patching import UnsupportedModelError
from models.quantization import Quantization, QuantizedLinear, settle
from models.registry import ModelSource
from models.runner import ModelRunner

Written = tuple[ModelSource, dict[str, Tensor]]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_torchao = pytest.mark.skipif(not _installed("torchao"), reason="needs torchao")
needs_bitsandbytes = pytest.mark.skipif(not _installed("bitsandbytes"), reason="needs bitsandbytes")
needs_compressed_tensors = pytest.mark.skipif(
    not _installed("compressed-tensors") or Version(importlib.metadata.version("transformers")) < Version("5.23"),
    reason="needs compressed-tensors, and transformers 5.23",
)


def _torchao(name: str) -> TorchAoConfig:
    import torchao.quantization

    return TorchAoConfig(getattr(torchao.quantization, name)())


def _bitsandbytes_8(_name: str) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_8bit=True)


def _bitsandbytes_4(kind: str) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=kind == "nf4",
    )


KEPT = [
    pytest.param(_torchao, "Int8WeightOnlyConfig", "QuantizedLinear", marks=needs_torchao),
    pytest.param(_torchao, "Int8DynamicActivationInt8WeightConfig", "QuantizedLinear", marks=needs_torchao),
    pytest.param(_torchao, "Float8WeightOnlyConfig", "QuantizedLinear", marks=needs_torchao),
    pytest.param(_bitsandbytes_8, "int8", "Linear8bitLt", marks=needs_bitsandbytes),
    pytest.param(_bitsandbytes_4, "nf4", "Linear4bit", marks=needs_bitsandbytes),
    pytest.param(_bitsandbytes_4, "fp4", "Linear4bit", marks=needs_bitsandbytes),
]
DEQUANTISED = [
    pytest.param(fp8, id="fp8"),
    pytest.param(mxfp4, id="mxfp4"),
    pytest.param(compressed_int8, id="compressed-tensors", marks=needs_compressed_tensors),
]
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def _runner(loaded: LoadedModel, **options: Any) -> ModelRunner:
    """Runs the self-test: Hugging Face's eager attention against the paged path, over the same quantised layers."""
    return ModelRunner(
        loaded,
        block_size=16,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_blocks=9,
        **options,
    )


def _greedy(runner: ModelRunner, prompt: list[int], *, first: int = 0) -> int:
    """The next token. `first`: tokens of the prompt that a step of their own computes."""
    runner.add_request(0, SamplingParams(temperature=0.0), prompt)
    if first:
        assert runner.execute(StepBatch((ScheduledSeq(0, prompt[:first], 0, [1, 2], sample=False),))).token_ids == []
    return runner.execute(StepBatch((ScheduledSeq(0, prompt[first:], first, [1, 2], sample=True),))).token_ids[0]


@pytest.mark.parametrize(("config", "name", "kind"), KEPT)
@pytest.mark.parametrize("made_in", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("device", DEVICES)
def test_layers_that_stay_quantised_serve_through_the_engines_path(
    tmp_path: Path, config: Callable[[str], Any], name: str, kind: str, made_in: torch.dtype, device: str
) -> None:
    loaded = load(quantized(tmp_path, config(name), made_in), device=device)
    layers = [module for path, module in loaded.model.named_modules() if path.endswith("_proj")]
    assert len(layers) == 3 * 7
    assert {type(layer).__name__ for layer in layers} == {kind}
    assert loaded.dtype == made_in  # not float32 because it is a CPU: quantised layers keep theirs
    runner = _runner(loaded)
    assert f"packed QKV not: they are {kind}" in runner.fused
    assert "residual + RMSNorm" in runner.fused
    runner.warm_up()
    prompt = list(range(3, 23))
    with torch.inference_mode():
        loaded.model.set_attn_implementation("eager")
        top = loaded.model(torch.tensor([prompt], device=device)).logits[0, -1].topk(2)
        loaded.model.set_attn_implementation("longwave_paged")
    token = _greedy(runner, prompt)
    assert token in top.indices.tolist()
    assert _greedy(runner, prompt, first=13) in top.indices.tolist()  # a chunk of which no row is sampled goes first


@pytest.mark.parametrize(("config", "name", "kind"), KEPT)
def test_quantised_weights_take_the_memory_that_they_promise(
    tmp_path: Path, config: Callable[[str], Any], name: str, kind: str
) -> None:
    loaded = load(quantized(tmp_path, config(name)))
    stored = (tmp_path / "model.safetensors").stat().st_size
    plain = (tmp_path / "plain" / "model.safetensors").stat().st_size
    assert stored < 0.85 * plain  # embeddings and the head are not quantised
    weight: Any = loaded.model.model.layers[0].mlp.up_proj.weight
    inner = getattr(weight, "qdata", weight)
    assert inner.element_size() == 1


@pytest.mark.parametrize("write", DEQUANTISED)
@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
@pytest.mark.parametrize("device", DEVICES)
def test_dequantised_weights_are_what_the_checkpoint_means(
    tmp_path: Path,
    write: Callable[[Path], Written],
    dtype: Any,
    expected: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "pack_linears", lambda _model: 0)
    source, meant = write(tmp_path)
    loaded = load(source, dtype=dtype, device=device)
    parameters = dict(loaded.model.named_parameters())
    assert parameters.keys() == meant.keys()
    for name, parameter in parameters.items():
        assert parameter.dtype == expected, name
        torch.testing.assert_close(parameter.cpu(), meant[name].to(expected), rtol=1e-2, atol=1e-6, msg=name)
    runner = _runner(loaded)
    assert "they are" not in runner.fused  # nothing is left of quantised layers
    runner.warm_up()


@pytest.mark.parametrize("write", DEQUANTISED)
def test_dequantised_weights_can_be_trained_and_random_ones_made(
    tmp_path: Path, write: Callable[[Path], Written]
) -> None:
    source, _meant = write(tmp_path)
    model = load_for_training(source, dtype="float32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    loss = model(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss
    loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "q_proj" in name)
    made = load(source, load_format="dummy").model
    assert not getattr(made, "is_quantized", False)
    assert getattr(made.config, "quantization_config", None) is None


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_nothing_trains_on_quantised_weights_nor_makes_random_ones(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind)
    settings = _torchao("Int8WeightOnlyConfig") if kind == "torchao" else _bitsandbytes_8("")
    source = quantized(tmp_path, settings)
    with pytest.raises(UnsupportedModelError, match=rf"quantised \({kind}\), and nothing trains on quantised weights"):
        load_for_training(source, dtype="bfloat16")
    with pytest.raises(ModelLoadError, match=f"random weights are not quantised, but the config says {kind}"):
        load(source, load_format="dummy")
    with pytest.raises(ModelLoadError, match=r"dtype is float16, but .* served in the dtype .* made with: bfloat16"):
        load(source, dtype="float16")


@pytest.mark.parametrize(
    ("kind", "skips"), [("torchao", "modules_to_not_convert"), ("bitsandbytes", "llm_int8_skip_modules")]
)
def test_what_stays_quantised_is_foretold_without_weights(
    tmp_path: Path, kind: str, skips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(kind)
    monkeypatch.setattr(device, "arch", lambda _: "sm_80")  # of whatever GPU
    settings = _torchao("Int8WeightOnlyConfig") if kind == "torchao" else _bitsandbytes_8("")
    setattr(settings, skips, ["model.layers.1.self_attn", "lm_head"])
    source = quantized(tmp_path, settings)
    without_weights = load(source, device="meta", load_format="dummy", dtype="float32").model
    told = foretell(without_weights, torch.device("cuda"))
    assert told.unfused == {
        "packed QKV": "they are QuantizedLinear (2 of 3)",
        "packed gate/up": "they are QuantizedLinear",
        "layers' chain of few rows": "they are QuantizedLinear",
        "linears of few rows": "they are QuantizedLinear (10 of 12)",
        "gates of many rows": "they are QuantizedLinear",
    }
    layers = load(source).model.named_modules()
    plain = {name for name, layer in layers if type(layer) in (nn.Linear, PackedLinear)}
    assert plain == {"lm_head", *(f"model.layers.1.self_attn.{part}_proj" for part in "qkvo")}


@needs_torchao
@pytest.mark.parametrize("error", [NotImplementedError, AttributeError])  # of torch; of int4 without its package mslk
def test_a_layer_that_does_not_run_here_is_refused_at_load(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quantized(tmp_path, _torchao("Int8WeightOnlyConfig"))

    def no_kernel(_self: nn.Module, _x: Tensor) -> Tensor:
        raise error("no kernel of this layout for the CPU")

    monkeypatch.setattr(QuantizedLinear, "forward", no_kernel)
    with pytest.raises(ModelLoadError, match=r"QuantizedLinear over Int8Tensor does not run on cpu: no kernel"):
        load(source)


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, settings: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "5.23.0"

    monkeypatch.setattr("models.quantization.version", installed)
    say_quantized(unquantized(tmp_path), settings)
    with pytest.raises(ModelLoadError, match=rf"\({package}\): that needs the package {package}, which is not inst"):
        load(ModelSource(name="quantised", folder=tmp_path))


def test_a_transformers_that_leaves_layers_wrapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.quantization.version", lambda _name: "5.17.0")
    say_quantized(unquantized(tmp_path), {"quant_method": "compressed-tensors", "config_groups": {}})
    with pytest.raises(ModelLoadError, match=r"needs transformers 5\.23 or newer, and 5\.17\.0 is installed"):
        load(ModelSource(name="quantised", folder=tmp_path))


@pytest.mark.parametrize("method", ["awq", "gptq", "eetq", "made-up"])
def test_a_method_that_is_not_served_is_refused_by_name(tmp_path: Path, method: str) -> None:
    say_quantized(unquantized(tmp_path), {"quant_method": method, "bits": 4})
    with pytest.raises(ModelLoadError) as refused:
        load(ModelSource(name="quantised", folder=tmp_path))
    said = str(refused.value)
    assert said.startswith(f"the weights are quantised ({method}), which is not served: ")
    assert said.endswith(
        "served are bitsandbytes, compressed-tensors, fp8, mxfp4, torchao, and weights that are not quantised"
    )
    assert ("downloaded from the hub" in said) == (method == "eetq")


@pytest.mark.parametrize(("scheme", "reason"), [("psychic", "psychic"), (None, "'NoneType' object has no attribute")])
def test_settings_that_transformers_rejects_are_told(tmp_path: Path, scheme: str | None, reason: str) -> None:
    say_quantized(unquantized(tmp_path), {"quant_method": "fp8", "activation_scheme": scheme})
    with pytest.raises(ModelLoadError, match=rf"quantised \(fp8\), which cannot run on cpu: .*{reason}"):
        load(ModelSource(name="quantised", folder=tmp_path))


def test_scales_that_do_not_fit_their_weights_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, _meant = fp8(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 2)
    save_file(weights, path, metadata={"format": "pt"})
    caplog.clear()
    with pytest.raises(
        ModelLoadError, match=r"transformers cannot load .*: Weight shape .* not divisible .*Fp8Dequant"
    ):
        load(source)
    assert caplog.records == []  # one sentence, and no traceback for each weight


def test_weights_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    """transformers would take 96 rows with 2 scales, of 64 rows each, for two blocks of 48."""
    source, _meant = fp8(tmp_path, tiny_config(intermediate_size=96))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith("scale_inv")]:
        weights[name] = weights[name][::2, ::2].contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    say_quantized(tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]})
    with pytest.raises(ModelLoadError, match=r"in blocks of 64 x 64, and .* is not made of whole ones"):
        load(source)


@pytest.mark.parametrize("loads", [load, partial(load_for_training, dtype="float32")], ids=["serving", "training"])
def test_scales_that_transformers_does_not_know_are_refused(tmp_path: Path, loads: Callable[..., Any]) -> None:
    """Its weights would be codes up to 448, and eager attention would agree with ours over them."""
    with pytest.raises(
        ModelLoadError, match=r"holds \S+_proj\.weight_scale, and by its config\.json nothing is multipl"
    ):
        loads(auto_fp8(tmp_path))


@pytest.mark.parametrize("write", [fp8, compressed_int8])
def test_quantised_weights_without_a_word_in_the_config_are_refused(
    tmp_path: Path, write: Callable[[Path], Written]
) -> None:
    source, _meant = write(tmp_path)
    say_quantized(tmp_path, None)
    with pytest.raises(ModelLoadError, match=r"_proj\.weight_scale.* or quantization_config is missing"):
        load(source)


def test_whole_numbers_without_scales_or_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    """They were cast, and served as if they were the weights."""
    path = unquantized(tmp_path) / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = (weights[name] * 100).to(torch.int8)
    weights["model.layers.9.mlp.up_proj.weight"] = weights[name].clone()  # of a layer that is not read
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} is whole numbers \(I8\), .* no quantization_config"):
        load(ModelSource(name="quantised", folder=tmp_path))
    save_file({**weights, name: weights[name].bfloat16()}, path, metadata={"format": "pt"})
    load(ModelSource(name="quantised", folder=tmp_path))


def test_scales_of_layers_that_are_not_read_are_nobodys(tmp_path: Path) -> None:
    """Layers that predict more tokens are left out with their weights."""
    source, _meant = fp8(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if "layers.2." in name]:
        weights[name.replace("layers.2.", "layers.3.")] = weights[name].clone()
    weights["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)  # of a cache in 8 bits
    save_file(weights, path, metadata={"format": "pt"})
    load(source)


@pytest.mark.parametrize(
    "write", [fp8, pytest.param(compressed_int8, id="compressed-tensors", marks=needs_compressed_tensors)]
)
def test_weights_without_their_scales_are_refused(tmp_path: Path, write: Callable[[Path], Written]) -> None:
    source, _meant = write(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    lacking = "model.layers.1.mlp.up_proj.weight"
    weights = {name: weight for name, weight in weights.items() if not name.startswith(f"{lacking}_scale")}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"the weights are quantised, and {re.escape(lacking)} has no scales"):
        load(source)


@needs_bitsandbytes
def test_bitsandbytes_does_not_warn_in_every_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = _runner(load(quantized(tmp_path, _bitsandbytes_8(""))))
    caplog.clear()
    _greedy(runner, [3, 4, 5])
    assert caplog.records == []


@needs_bitsandbytes
@pytest.mark.parametrize(("threshold", "expected"), [(6.0, False), (0.0, True)])
def test_layers_that_wait_for_the_host_are_known(tmp_path: Path, threshold: float, expected: bool) -> None:
    settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    assert load(quantized(tmp_path, settings)).capturable is expected


def test_plain_weights_can_be_captured(tmp_path: Path) -> None:
    assert load(ModelSource(name="plain", folder=unquantized(tmp_path))).capturable


@needs_torchao
def test_pickled_quantised_weights_are_refused(tmp_path: Path) -> None:
    source = quantized(tmp_path, _torchao("Int8WeightOnlyConfig"))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"only pytorch_model\.bin: weights are read from \*\.safetensors alone"):
        load(source)


@pytest.mark.parametrize(
    ("dtype", "float32"),
    [
        (torch.bfloat16, {"gate_proj"}),
        (torch.float16, {"gate_proj", "up_proj"}),
        (torch.float32, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_what_transformers_keeps_in_float32_by_patterns_stays_so(dtype: torch.dtype, float32: set[str]) -> None:
    model = random_model(tiny_config())
    model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules = {"mlp.gate_proj.weight"}, {"mlp.up*weight"}
    settle(model, Quantization("fp8", stays=False, settings={}), dtype)
    mlp = model.model.layers[1].mlp
    kept = {name for name, weight in mlp.named_parameters() if weight.dtype == torch.float32}
    assert kept == {f"{name}.weight" for name in float32}
