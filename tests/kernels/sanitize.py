"""The kernels under compute-sanitizer: a small fixed grid, every kernel and every way of addressing at least once.

    python -m tests.kernels.sanitize [memcheck] [racecheck] [synccheck] [initcheck]     all four without a name
    python -m tests.kernels.sanitize racecheck --only layers,gradients                  of parts of the grid alone
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize --grid all      one, by hand

Run from the checkout. Expected on an H100: a minute a tool, and another for the compiler. Exit code 0: no tool found
anything, but for the reports of KNOWN; 1: one did; 2: compute-sanitizer or the GPU is missing. The problems are so
small that a block of a persistent kernel has one tile: rings of keys and rows go round, those of tiles do not.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated
from unittest import mock

import torch
import typer
from torch import Tensor

import attention_backend
from attention_backend import backward, block_patterns, dispatch, layers
from attention_backend.fp8_pages import dequantize_pages_op
from attention_backend.heuristics.gated_linear import GatedConfig
from attention_backend.heuristics.skinny_linear import SkinnyConfig
from attention_backend.heuristics.sm90 import BY_HEADS, BY_ROWS
from attention_backend.jit import compiler
from attention_backend.kernels.gated_linear import gated_linear as many_gates
from attention_backend.kernels.skinny_linear import skinny_linear
from attention_backend.layer_chain import (
    ChainOptions,
    ChainWeights,
    NextAttention,
    OwnAttention,
    layer_chain,
    layer_chain_to_pages,
    refuses,
)
from attention_backend.linears import gated_linear, linear
from attention_backend.metadata import KVPages, PagedMetadata
from attention_backend.page_copy import PageCopy
from attention_backend.token_choice import choose_tokens

from .compile_ahead import compile_ahead
from .error_rule import filled_memory
from .problems import Case, build
from .test_dropout import with_dropout
from .test_kv_store import check_store

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_FLAGS = "SANITIZE_FLAGS"  # of the compiler, for the process under a tool
FOUND = 99  # the exit code we ask of compute-sanitizer when it found something

#: Races that are none: a write, and what else a report of it names, as (function, file). racecheck does not follow
#: an order that goes from many threads over a barrier of theirs to the one that arrives at an mbarrier for them.
KNOWN = (
    # A stage's values past the sequence's end become zeros. Converters fill the stage again when its consumers, who did
    # that and met, have said that it is empty.
    (("clear_values", "forward_masks.cuh"), {("store_shared", "forward_convert.cuh")}),
    # A slot that described a tile says that there is no more work, when all warps that read it have left it.
    (("draw", "forward_work.cuh"), {("next_tile", "flash_fwd_sm90.cuh"), ("for_tiles", "forward_loads.cuh")}),
    # By turns both consumers leave sums of dQ in one place, when the warp that adds them has read what was there.
    (("store_sums", "backward_dq.cuh"), {("store_sums", "backward_dq.cuh")}),
    # The first of those stores has the line of the wait in front of it, which writes nothing.
    (("wgmma_wait", "wgmma_sm90.cuh"), {("wgmma_wait", "wgmma_sm90.cuh")}),
)
_RACE = "Race reported between"
_ACCESS = re.compile(r"access at (?:\w+ )*(?:\w+::)?(\w+)[(<+].* in ([\w.]+):\d+")

GRID = (
    Case(128, 217, batch=2),
    Case(150, 203, batch=6, layout="varlen", mask="sliding", dtype="fp16"),
    Case(130, 140, batch=2, layout="padded", dim=72, dim_v=40),
    Case(130, 140, batch=2, dim=128, dim_v=128, mask="window", score="softcap_alibi", keys="key_mask", sinks=True),
    Case(130, 140, batch=2, dim=256, dim_v=256),
    Case(130, 140, batch=2, dim=192, dim_v=128, keys="leftpad"),
    Case(130, 140, batch=2, dim=96, dim_v=96, mask="full", keys="bias_float"),
    Case(130, 140, batch=2, dim=32, dim_v=32, mask="full", keys="bias_element", layout="bhsd"),
    Case(130, 140, batch=4, mask="full", keys="mask_desc"),
    Case(130, 300, batch=6, layout="paged_varlen", page=64, mask="chunk"),
    Case(130, 300, batch=3, layout="paged", page=1, hnd=False, dim=128, dim_v=128),
    Case(64, 100, batch=2, dtype="fp32", score="softcap"),
    Case(1, 900, batch=6, layout="paged", page=64, dim=128, dim_v=128, heads=8, kv_heads=2),
    Case(1, 900, batch=3, layout="paged", page=16, dim=128, dim_v=128, heads=8, kv_heads=1, num_splits=3, sinks=True),
    Case(5, 300, batch=3, layout="paged_varlen", page=48, dim=72, dim_v=72, mask="sliding", dtype="fp16"),
    Case(2, 300, batch=3, heads=16, kv_heads=1, dim=256, dim_v=256, keys="leftpad", num_splits=1),
    Case(40, 700, batch=2, layout="paged", page=64, heads=8, kv_heads=2, dim=128, dim_v=128),  # packed rows
    Case(40, 900, batch=2, layout="paged_varlen", page=32, heads=4, kv_heads=2, dim=64, dim_v=64, num_splits=3),
    Case(300, 400, batch=2, dim=80, dim_v=80),
)


#: By the kernels of GPUs before Hopper, on a Hopper, too, where they serve what the TMA does not bring.
FEW_ROWS = (
    Case(1, 900, batch=6, layout="paged", page=8, dim=128, dim_v=128, heads=8, kv_heads=2),
    Case(1, 900, batch=3, layout="paged", page=64, dim=64, dim_v=64, heads=8, kv_heads=1, num_splits=3, sinks=True),
    Case(5, 300, batch=3, layout="paged_varlen", page=4, dim=72, dim_v=72, mask="sliding", dtype="fp16"),
    Case(2, 300, batch=3, heads=16, kv_heads=1, dim=256, dim_v=256, keys="key_mask", num_splits=1),
)
MANY_ROWS = (*GRID[:7], Case(40, 700, batch=2, layout="paged", page=8, heads=8, kv_heads=2, dim=128, dim_v=128))

GRADIENTS = (
    Case(130, 140, batch=2, dim=128, dim_v=128, heads=4, kv_heads=2),
    Case(150, 203, batch=6, layout="varlen", mask="sliding", dtype="fp16", dim=64, dim_v=64),
    Case(130, 140, batch=1, dim=256, dim_v=256, mask="full", sinks=True),
    Case(130, 140, batch=2, dim=72, dim_v=72, keys="key_mask", score="softcap_alibi", dtype="fp16"),
    Case(140, 200, batch=2, dim=128, dim_v=128, heads=4, kv_heads=2, mask="chunk", score="softcap", sinks=True),
)
#: Of GRADIENTS, those that run once more with dropout.
DROPPED = (0, 2)


def run_gradients(device: torch.device) -> int:
    """Runs the backward of every kernel that serves, in both modes; returns how many ran."""
    ran = 0
    problems = [build(case, device) for case in GRADIENTS]
    for args in (*problems, *(with_dropout(problems[i], 0.2) for i in DROPPED)):
        out, lse = dispatch.run(args)
        for line in backward.TABLE:
            if line.refuses(args) is not None:
                continue
            for deterministic in (False, True):
                problem = replace(args, deterministic=deterministic)
                gradients = backward.run(problem, out, lse, torch.randn_like(out), kernel=line.kernel)
                assert all(bool(x.isfinite().all()) for x in (gradients.dq, gradients.dk, gradients.dv)), line.kernel
                ran += 1
    return ran


def run_grid(device: torch.device) -> int:
    """Runs every case and the store once; returns how many problems ran."""
    for case in GRID:
        out, _ = dispatch.run(build(case, device))
        assert bool(out.isfinite().all()), f"{case} gave NaN or Inf"
    for dims in ((64, 64), (80, 80), (192, 128)):
        check_store(70, 16, dims, torch.bfloat16, device)
    return len(GRID) + 3


def run_generic(device: torch.device) -> int:
    """The kernels of GPUs before Hopper, whatever serves these problems here."""
    from attention_backend.kernels import flash_decode, flash_fwd

    for case in (*FEW_ROWS, *MANY_ROWS):
        args = build(case, device)
        if device.type != "cuda":
            out, _ = dispatch.run(args)
        elif case in FEW_ROWS:
            out, _ = flash_decode.forward(args, tma=False)
        else:
            out, _ = flash_fwd.forward(args)
        assert bool(out.isfinite().all()), f"{case} gave NaN or Inf"
    return len(FEW_ROWS) + len(MANY_ROWS)


def run_tiles(device: torch.device) -> int:
    """Tiles of the Hopper forward that problems as small as these would not get: blocks that load keys for each other,
    warpgroups that own keys, tiles of many keys; on other devices the same problems by the kernel that serves them."""
    from attention_backend.kernels import flash_fwd_sm90

    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    dense = Case(520, 330, batch=2, heads=4, kv_heads=2, mask="full")
    by_rows, by_heads = ({"cluster": kind} for kind in (BY_ROWS, BY_HEADS))
    runs = [(how, replace(dense, dim=dim, dim_v=dim)) for how in (by_rows, by_heads) for dim in (128, 256)]
    runs += [(how, replace(dense, dim=128, dim_v=128, mask="causal")) for how in (by_rows, by_heads)]
    runs += [({"own": True}, replace(dense, mask="causal", dim=dim, dim_v=dim)) for dim in (64, 128, 256)]
    kinds = ((64, "full"), (96, "causal"), (128, "causal"))
    runs += [({"tall": True}, replace(dense, dim=dim, dim_v=dim, mask=mask)) for dim, mask in kinds]
    paged = replace(dense, layout="paged_varlen", page=64, mask="causal", dim=128, dim_v=128)
    runs += [(by_heads, paged), ({**by_heads, "tall": True}, paged), ({"tall": True}, paged)]
    with mock.patch.object(flash_fwd_sm90, "LONG", 1):
        wide = [replace(dense, dim=128, dim_v=128), paged, replace(paged, sq=40, page=32, num_splits=3)]
        for how, case in (*runs, *(({}, case) for case in wide)):
            args = build(case, device)
            out, _ = flash_fwd_sm90.forward(args, **how) if hopper else dispatch.run(args)
            assert bool(out.isfinite().all()), f"{case} gave NaN or Inf"
    return len(runs) + len(wide)


def run_features(device: torch.device) -> int:
    """What is not an attention problem of `dispatch`, once each; returns how many ran."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    q, k, v = normal(2, 300, 4, 128), normal(2, 300, 2, 128), normal(2, 300, 2, 128)
    pages = [normal(12, 64, 2, 128) for _ in range(2)]
    tables = torch.arange(12, dtype=torch.int32, device=device)
    window = block_patterns.sliding_window(300, window=(99, 0), device=device)
    results = [
        attention_backend.flash_attn_func(q, k, v, dropout_p=0.2, causal=True),
        attention_backend.block_sparse_attention(q, k, v, window),
        attention_backend.linear_attention(q, k, v, causal=True),
        attention_backend.linear_attention(q, k, v),
        attention_backend.shared_prefix_attention(
            normal(4, 1, 4, 128), *pages, prefix_block_table=tables[:8], prefix_len=500,
            suffix_block_table=tables[8:].view(4, 1), suffix_lens=torch.full_like(tables[:4], 40),
        ),
    ]  # fmt: skip
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        many_keys = [normal(2, 2600, 2, 128) for _ in range(2)]  # of which tiles are cut into parts
        results.append(attention_backend.flash_attn_fp8_func(q, k, v, causal=True))
        results.append(attention_backend.flash_attn_fp8_func(q, *many_keys))
    for out in results:
        assert isinstance(out, Tensor)
        assert bool(out.isfinite().all())
    return len(results)


def run_layers(device: torch.device) -> int:
    """What an engine's step does beside attention, and its float8 pages; returns how many ran."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    rows, heads, kv_heads, dim, page = 70, 8, 2, 128, 16
    x, weight = normal(rows, 520), normal(520)
    packed = normal(rows, heads + 2 * kv_heads, dim)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=1)
    tables = [torch.randn(rows, dim // 2, device=device) for _ in range(2)]
    slots = torch.arange(rows, device=device)
    pages = [torch.zeros(6, kv_heads, page, dim, device=device, dtype=torch.bfloat16) for _ in range(2)]
    small = [x.to(torch.float8_e4m3fn) for x in pages]
    scales = {name: torch.full((kv_heads,), 0.5, device=device) for name in ("k_scale", "v_scale")}
    results = [
        layers.rms_norm(x, weight, 1e-6),
        *layers.add_rms_norm(x, x.clone(), weight, 1e-6, unit_offset=True),
        layers.gated_activation(x[:, :256], x[:, 256:512], "silu"),
        layers.rotary_store(q, k, v, *pages, slots, *tables, q_norm=normal(dim), k_norm=normal(dim), eps=1e-6),
        layers.rotary_store(q, k, v, *small, slots, *tables, **scales),
    ]
    table = torch.arange(5, device=device, dtype=torch.int32)[None]
    for new in (1, rows):  # a decode and a prefill, over the pages or a copy of them
        ends = torch.tensor([0, new, rows], device=device, dtype=torch.int32)
        step = PagedMetadata(ends[:2], ends[2:], table, slots[:new], int(new == 1), new, rows)
        results.append(
            attention_backend.paged_attention(q[:new], None, None, *small, step, softmax_scale=0.1, **scales)
        )
    lens = torch.tensor([rows], device=device, dtype=torch.int32)
    results += dequantize_pages_op(*small, *scales.values(), table, lens, None, 1, -1, torch.bfloat16)
    copy = PageCopy(pages)
    host = torch.empty(2, copy.row_bytes, device=device, dtype=torch.uint8)
    blocks = torch.tensor([4, 1], device=device, dtype=torch.int32)
    copy.gather(blocks, host)
    copy.scatter(host, blocks)
    results.append(pages[0])
    if refuses(device, torch.bfloat16, attended_width=520, width=520, gated_width=1544) is None:
        chain = ChainWeights(
            normal(520, 520), weight, normal(3088, 520), normal(520, 1544), weight, normal(260, 520), normal(260)
        )
        options = ChainOptions("silu", 1e-6, 1e-6)
        results += layer_chain(x[:3], x[3:6], chain, options)
        front = (normal(3, 8, 64), normal(5, 2, 16, 64), normal(5, 2, 16, 64), normal(520, 512))
        table = torch.tensor([[1, 4], [2, 0], [3, 3]], device=device, dtype=torch.int32)
        own = OwnAttention(
            KVPages(*front[1:3]), table, torch.tensor([17, 16, 1], device=device, dtype=torch.int32), 0.1
        )
        results += layer_chain(front[0], x[3:6], replace(chain, out=front[3]), options, own=own)
        chain = replace(chain, next=normal((heads + 2 * kv_heads) * dim, 520), next_bias=None)
        for kept in (KVPages(*pages), KVPages(*small, **scales)):
            following = NextAttention(heads, kept, slots[:3], tables[0][:3], tables[1][:3])
            results += layer_chain_to_pages(x[:3], x[3:6], chain, options, following)
    if device.type == "cuda":
        keys = torch.arange(2 * rows, device=device, dtype=torch.int32).view(rows, 2)
        token_ids, finite = choose_tokens(x, torch.linspace(0, 2, rows, device=device), keys)
        assert bool(finite.all())
        results.append(token_ids.float())
    for out in results:
        assert isinstance(out, Tensor)
        assert bool(out.isfinite().all())
    return len(results)


def run_linears(device: torch.device) -> int:
    """Layers of few rows, whose tiles they do not fill, and gates of many; on Hopper by their kernels, whose tiles
    these are."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    configs = (SkinnyConfig(64, 2), SkinnyConfig(224), SkinnyConfig(224, gated=True), SkinnyConfig(128, 2, gated=True))
    for config in configs:
        rows = torch.randn(21, 1160, device=device, dtype=torch.bfloat16)
        weight = torch.randn(400, 1160, device=device, dtype=torch.bfloat16)
        bias = None if config.gated else torch.randn(400, device=device, dtype=torch.bfloat16)
        if hopper:
            activation, blocks = "silu" if config.gated else None, 16 if config.cluster > 1 else 1
            out = skinny_linear(rows, weight, bias, config, activation=activation, blocks=blocks)
        else:
            out = gated_linear(rows, weight, "silu") if config.gated else linear(rows, weight, bias)
        assert bool(out.isfinite().all())
    for many in (GatedConfig(), GatedConfig(cluster=1, outputs=112, band=1)):
        rows = torch.randn(300, 328, device=device, dtype=torch.bfloat16)
        weight = torch.randn(2 * 264, 328, device=device, dtype=torch.bfloat16)
        out = many_gates(rows, weight, many, "silu", blocks=2) if hopper else gated_linear(rows, weight, "silu")
        assert bool(out.isfinite().all())
    return len(configs) + 2


PARTS: dict[str, Callable[[torch.device], int]] = {
    "attention": run_grid,
    "generic": run_generic,
    "tiles": run_tiles,
    "features": run_features,
    "layers": run_layers,
    "linears": run_linears,
    "gradients": run_gradients,
}


def unknown_races(output: str) -> int | None:
    """How many of racecheck's reports KNOWN does not have. None where its summary counts other reports than these."""
    reports: list[set[tuple[str, str]]] = []
    unread = 0
    for line in output.splitlines():
        if _RACE in line:
            reports.append(set())
        if _RACE in line or " and " in line[:24]:
            access = _ACCESS.search(line)
            unread += access is None
            if access is not None and reports:
                reports[-1].add((access[1], access[2]))
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    if unread or summary is None or int(summary[1]) != len(reports):
        return None
    return sum(not any(_is_known(places, *known) for known in KNOWN) for places in reports)


def _is_known(places: set[tuple[str, str]], write: tuple[str, str], others: set[tuple[str, str]]) -> bool:
    return write in places and ((places - {write}) or {write}) <= others


def verdict(tool: str, code: int, output: str) -> str | None:
    """What is wrong, if anything."""
    if tool == "racecheck" and code == FOUND and unknown_races(output) == 0:
        return None
    return None if code == 0 else f"exit code {code}"


def run_tool(tool: str, parts: str) -> str | None:
    """Runs it, showing what it prints; returns what is wrong, if anything."""
    # torch's caching allocator hands out pieces of large blocks, in which no access is out of bounds.
    flags = "-DEVERY_STEP" if tool == "synccheck" else ""  # see flash_bwd_sm90.cuh
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", _FLAGS: flags}
    process = subprocess.Popen(
        command(tool, parts), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    with process:
        for line in process.stdout:
            typer.echo(line, nl=False)
            lines.append(line)
    return verdict(tool, process.returncode, "".join(lines))


def command(tool: str, parts: str) -> list[str]:
    """compute-sanitizer over these parts of this module's grid.

    racecheck and synccheck skip torch's own kernels, which take most of the time; the other two need to see what
    torch's kernels allocate and write.
    """
    skip = ["--kernel-name-exclude", "kns=at6native"] if tool in ("racecheck", "synccheck") else []
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "10000", *skip]
    return ["compute-sanitizer", *options, sys.executable, "-m", "tests.kernels.sanitize", "--grid", parts]


def chosen(names: str) -> list[str]:
    """Of "all" or names with commas between. Raises typer.BadParameter."""
    asked = list(PARTS) if names == "all" else names.split(",")
    if unknown := [name for name in asked if name not in PARTS]:
        raise typer.BadParameter(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)} and all")
    return asked


def run_parts(names: str) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        compiler.FLAGS = (*compiler.FLAGS, "-lineinfo", *os.environ.get(_FLAGS, "").split())
        asked = chosen(names)
        compile_ahead(GRID if "attention" in asked else (), GRADIENTS if "gradients" in asked else ())
    with filled_memory():
        return sum(PARTS[name](device) for name in chosen(names))


def main(
    tools: Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(TOOLS)}; all by default.")] = None,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}.")] = "all",
    grid: Annotated[str | None, typer.Option(help="Run these parts here, without a tool.")] = None,
) -> None:
    """The kernels under compute-sanitizer's tools."""
    if grid is not None:
        typer.echo(f"{run_parts(grid)} problems ran")
        return
    asked, _ = tools or list(TOOLS), chosen(only)
    if unknown := [tool for tool in asked if tool not in TOOLS]:
        raise typer.BadParameter(f"no tool {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        typer.echo("this needs an NVIDIA GPU and compute-sanitizer", err=True)
        raise typer.Exit(2)
    verdicts = {tool: run_tool(tool, only) for tool in asked}
    for tool, wrong in verdicts.items():
        typer.echo(f"{tool}: {'clean' if wrong is None else f'FAILED with {wrong}'}")
    raise typer.Exit(int(any(verdicts.values())))


if __name__ == "__main__":
    typer.run(main)
