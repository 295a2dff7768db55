"""PTX instructions, as far as the kernels use them -> C++ calls of the runtime (runtime/device.h). Knows no kernel."""

import re
from collections.abc import Callable

#: An operand: a C++ expression, several of them for `{a, b}`, or an address and what is behind it for `[a, {b}]`.
Operands = list[list[str]]
_FLOATS = {"f16": "emu::kHalf", "bf16": "emu::kBf16", "e4m3": "emu::kE4m3"}
_TYPES = {"s32": "int", "u32": "uint32_t", "b32": "uint32_t", "f32": "float"}
_SPECIAL = {
    f"%%{name}.{axis}": f"{variable}.{axis}"
    for name, variable in (("tid", "threadIdx"), ("ctaid", "blockIdx"))
    for axis in "xyz"
} | {"%%cluster_ctarank": "emu::cluster_rank()"}


class UnknownInstructionError(ValueError):
    """An instruction that is not in the table."""


def call(opcode: str, operands: Operands) -> str:
    """One instruction as a C++ statement. Raises UnknownInstructionError."""
    for pattern, emit in _TABLE:
        match = re.fullmatch(pattern, opcode)
        if match:
            return emit(match, operands)
    raise UnknownInstructionError(f"{opcode} with operands {operands}")


def special_register(name: str) -> str | None:
    return _SPECIAL.get(name)


def _call(name: str) -> Callable[[re.Match[str], Operands], str]:
    return lambda _, o: f"emu::{name}({', '.join(x for group in o for x in group)});"


def _nothing(_: re.Match[str], __: Operands) -> str:
    return ";"


def _assign(name: str) -> Callable[[re.Match[str], Operands], str]:
    return lambda _, o: f"{o[0][0]} = emu::{name}({', '.join(x for group in o[1:] for x in group)});"


def _load(m: re.Match[str], o: Operands) -> str:
    shared = m["space"] == "shared"
    kind, width = _TYPES[m["type"]], len(o[0])
    if shared:
        source = f"reinterpret_cast<{kind}*>(emu::shared_pointer({o[1][0]}, {4 * width}))"
        return " ".join(f"{x} = {source}[{i}];" for i, x in enumerate(o[0]))
    word = {1: kind, 4: "float4" if kind == "float" else "uint4"}[width]
    # What is read past the L1 are others' data; all else, others' signs, for which somebody may be waiting.
    read = "*reinterpret_cast<const {}*>({})" if m["data"] else "emu::read_spinning<{}>({})"
    read = f"const {word} ptx_word = {read.format(word, o[1][0])};"
    fields = [""] if width == 1 else [f".{axis}" for axis in "xyzw"]
    return read + "".join(f" {x} = ptx_word{field};" for x, field in zip(o[0], fields, strict=True))


def _store(m: re.Match[str], o: Operands) -> str:
    kind, width = _TYPES[m["type"]], len(o[1])
    if m["space"] == "shared":
        target = f"reinterpret_cast<{kind}*>(emu::shared_pointer({o[0][0]}, {4 * width}))"
        return " ".join(f"{target}[{i}] = {x};" for i, x in enumerate(o[1]))
    word = {1: kind, 4: "uint4"}[width]
    return f"emu::write_visibly({o[0][0]}, {word}{{{', '.join(o[1])}}});"


def _reduce(m: re.Match[str], o: Operands) -> str:
    kind = _TYPES[m["type"]]
    added = " ".join(f"reinterpret_cast<{kind}*>({o[0][0]})[{i}] += {x};" for i, x in enumerate(o[1]))
    return f"{added} emu::step();"


def _tma(m: re.Match[str], o: Operands) -> str:
    # [destination], [map, {coordinates}], [barrier], policy
    (destination,), (tensor_map, *at), (barrier,) = o[0], o[1], o[2]
    place = f"const int ptx_at[] = {{{', '.join(f'static_cast<int>({x})' for x in at)}}};"
    return f"{place} emu::tma_load({destination}, {tensor_map}, {barrier}, {m['rank']}, ptx_at);"


def _tma_for(m: re.Match[str], o: Operands) -> str:
    # [destination], [map, {coordinates}], [barrier], blocks, policy
    (destination,), (tensor_map, *at), (barrier,), (blocks,) = o[:4]
    place = f"const int ptx_at[] = {{{', '.join(f'static_cast<int>({x})' for x in at)}}};"
    return f"{place} emu::tma_load_for({blocks}, {destination}, {tensor_map}, {barrier}, {m['rank']}, ptx_at);"


def _tma_store(m: re.Match[str], o: Operands) -> str:
    # [map, {coordinates}], [source]
    (tensor_map, *at), (source,) = o[0], o[1]
    place = f"const int ptx_at[] = {{{', '.join(f'static_cast<int>({x})' for x in at)}}};"
    return f"{place} emu::tma_store({tensor_map}, {source}, {m['rank']}, ptx_at);"


def _store_there(_: re.Match[str], o: Operands) -> str:
    # [destination], words, [barrier], both in another block
    words = f"const uint32_t ptx_words[] = {{{', '.join(o[1])}}};"
    return f"{words} emu::store_there({o[0][0]}, ptx_words, {len(o[1])}, {o[2][0]});"


def _matrices(m: re.Match[str], o: Operands) -> str:
    out = ", ".join(f"&({x})" for x in o[0])
    return f"uint32_t* const ptx_out[] = {{{out}}}; emu::load_matrices(ptx_out, {o[1][0]}, {_flag(m['trans'])});"


def _mma(m: re.Match[str], o: Operands) -> str:
    sums, a, b = (", ".join(x) for x in (("&(" + x + ")" for x in o[0]), o[1], o[2]))
    return (
        f"float* const ptx_c[] = {{{sums}}}; const uint32_t ptx_a[] = {{{a}}}, ptx_b[] = {{{b}}};"
        f" emu::mma({_FLOATS[m['type']]}, {m['k']}, ptx_c, ptx_a, ptx_b);"
    )


def _wgmma(m: re.Match[str], o: Operands) -> str:
    sums, a, (b,), (accumulate,) = o[0], o[1], o[2], o[3]
    flags = [x for group in o[6:] for x in group]  # behind the signs of the factors: which are transposed
    from_registers = len(a) == 4
    transposed_a = "0" if from_registers or not flags else flags[0]
    transposed_b = flags[-1] if flags else "0"
    registers = f"const uint32_t ptx_a[] = {{{', '.join(a)}}};" if from_registers else ""
    return (
        f"float* const ptx_d[] = {{{', '.join(f'&({x})' for x in sums)}}}; {registers}"
        f" emu::wgmma({{{_FLOATS[m['type']]}, {m['n']}, ptx_d, {'ptx_a' if from_registers else 'nullptr'},"
        f" {0 if from_registers else a[0]}, {b}, {accumulate} != 0, {transposed_a} != 0, {transposed_b} != 0}});"
    )


def _flag(x: str | None) -> str:
    return "true" if x else "false"


def _move(_: re.Match[str], o: Operands) -> str:
    if len(o[0]) == 2:
        (low, high), (x,) = o
        return f"{low} = static_cast<uint16_t>({x}); {high} = static_cast<uint16_t>({x} >> 16);"
    if len(o[1]) == 2:
        return f"{o[0][0]} = {o[1][0]} | static_cast<uint32_t>({o[1][1]}) << 16;"
    return f"{o[0][0]} = {o[1][0]};"


_TABLE: tuple[tuple[str, Callable[[re.Match[str], Operands], str]], ...] = (
    (r"mov\.[ub]32", _move),
    (r"setp\.ne\.b32", lambda _, o: f"{o[0][0]} = {o[1][0]} != {o[2][0]};"),
    (r"selp\.u32", lambda _, o: f"{o[0][0]} = {o[3][0]} ? {o[1][0]} : {o[2][0]};"),
    (r"cvt\.u16\.u32", lambda _, o: f"{o[0][0]} = static_cast<uint16_t>({o[1][0]});"),
    (r"cvt\.rn\.bf16x2\.f32", _assign("pack_bf16")),
    (r"cvt\.rn\.f16x2\.f32", _assign("pack_half")),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f32", _assign("pack_e4m3")),
    (r"cvt\.rn\.f16x2\.e4m3x2", _assign("half_of_e4m3")),
    (r"ex2\.approx\.ftz\.f32", _assign("exp2_flushed")),
    (r"lg2\.approx\.ftz\.f32", _assign("log2_flushed")),
    (r"rcp\.approx\.ftz\.f32", _assign("reciprocal_flushed")),
    (r"prmt\.b32", lambda _, o: f"{o[0][0]} = __byte_perm({o[1][0]}, {o[2][0]}, {o[3][0]});"),
    (r"createpolicy\..*", lambda _, o: f"{o[0][0]} = 0;"),
    (r"prefetch\..*|griddepcontrol\..*|fence\..*|wgmma\.fence\..*", _nothing),
    (r"setmaxnreg\..*", _call("set_registers")),
    (r"cp\.async\.bulk\.commit_group", _nothing),  # all of a thread are one group: waits are for all
    (r"ld\.(?:(?:acquire|relaxed)\.gpu\.)?(?P<space>global|shared)(?P<data>\.cg)?(?:\.v[24])?\.(?P<type>\w+)", _load),
    (r"st\.(?:relaxed\.gpu\.)?(?P<space>global|shared)(?:\.v[24])?\.(?P<type>\w+)", _store),
    (r"red\.(?:release|relaxed)\.gpu\.global\.add(?:\.v4)?\.(?P<type>\w+)", _reduce),
    (
        r"atom\.acq_rel\.gpu\.global\.inc\.u32",
        lambda _, o: f"{o[0][0]} = atomicInc((unsigned*)({o[1][0]}), {o[2][0]});",
    ),
    (r"cp\.async\.cg\.shared\.global.*", lambda _, o: f"emu::copy16({o[0][0]}, {o[1][0]}, {o[3][0]});"),
    (r"cp\.async\.commit_group", _call("copy_commit")),
    (r"cp\.async\.wait_group", _call("copy_wait")),
    (r"cp\.async\.bulk\.tensor\.(?P<rank>\d)d\.shared.*\.multicast.*", _tma_for),
    (r"cp\.async\.bulk\.tensor\.(?P<rank>\d)d\.shared.*", _tma),
    (r"cp\.async\.bulk\.tensor\.(?P<rank>\d)d\.global.*", _tma_store),
    (r"cp\.async\.bulk\.shared::cluster\.shared::cta\..*", _call("copy_there")),
    (r"st\.async\.shared::cluster\..*", _store_there),
    (
        r"cp\.async\.bulk\.shared.*",
        lambda _, o: f"emu::bulk_load({o[0][0]}, (const void*)({o[1][0]}), {o[2][0]}, {o[3][0]});",
    ),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", _call("bulk_store")),
    (r"cp\.reduce\.async\.bulk\..*\.add\.f32", _call("bulk_add")),
    (r"cp\.async\.bulk\.wait_group\.read", _call("bulk_wait_read")),
    (r"cp\.async\.bulk\.wait_group", _call("bulk_wait")),
    (r"mbarrier\.init\..*", _call("mbarrier_init")),
    (r"mbarrier\.arrive\.expect_tx\..*", lambda _, o: f"emu::mbarrier_arrive({o[1][0]}, {o[2][0]});"),
    (r"mapa\.shared::cluster\.u32", _assign("address_at")),
    (r"mbarrier\.arrive\.shared::cluster\..*", lambda _, o: f"emu::mbarrier_arrive_at({o[1][0]});"),
    (r"barrier\.cluster\.arrive\..*", lambda *_: "emu::cluster_arrive();"),
    (r"barrier\.cluster\.wait\..*", lambda *_: "emu::cluster_wait();"),
    (r"mbarrier\.arrive\..*", lambda _, o: f"emu::mbarrier_arrive({o[1][0]}, 0);"),
    (r"mbarrier\.try_wait\.parity\..*", lambda _, o: f"emu::mbarrier_wait({o[1][0]}, {o[2][0]});"),
    (r"mbarrier\.test_wait\.parity\..*", _assign("mbarrier_test")),
    (r"bar\.sync", lambda _, o: f"emu::barrier({o[0][0]}, {o[1][0]}, true);"),
    (r"bar\.arrive", lambda _, o: f"emu::barrier({o[0][0]}, {o[1][0]}, false);"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4(?P<trans>\.trans)?\.shared\.b16", _matrices),
    (
        r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16",
        lambda _, o: f"const uint32_t ptx_x[] = {{{', '.join(o[1])}}}; emu::store_matrices({o[0][0]}, ptx_x);",
    ),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", _assign("transpose_matrix")),
    (r"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col\.f32\.(?P<type>\w+)\.\w+\.f32", _mma),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k\d+\.f32\.(?P<type>\w+)\.\w+", _wgmma),
    (r"wgmma\.commit_group\..*", _call("wgmma_commit")),
    (r"wgmma\.wait_group\..*", _call("wgmma_wait")),
)
