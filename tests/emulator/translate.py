"""A preprocessed CUDA kernel -> C++ for a CPU: inline PTX, shared memory, and an entry with arrays of parameters.

The text of the kernel stays as it is but for these: the C++ compiler reads the rest, with runtime/device.h in front.
"""

import re

from .instructions import call, special_register

_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__(?:launch_bounds|cluster_dims)__\s*\([^)]*\)\s*)*(\w+)\s*\('
)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?(\w+)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"__shared__\s+(?:__align__\s*\(\s*(\d+)\s*\)\s*)?(\w+)\s+(\w+)\s*((?:\[[^;]*\])?)\s*;")
_REGISTER_TYPES = {".pred": "bool", ".b16": "uint16_t", ".b32": "uint32_t"}


def translate(source: str, kernel: str) -> str:
    """C++ whose `extern "C" void emulated(void** parameters)` is the kernel.

    Raises ValueError for what it does not know: an instruction, an operand, another kernel.
    """
    text = _translate_asm(source)
    text = _DYNAMIC.sub(r"\1* const \2 = static_cast<\1*>(emu::dynamic_shared());", text)
    text = _STATIC.sub(_static_shared, text)
    match = _KERNEL.search(text)
    if match is None or match[1] != kernel:
        raise ValueError(f'no extern "C" kernel {kernel}')
    begin, end = match.end(), _closing(text, match.end() - 1)
    types = [_parameter_type(p) for p in _split(text[begin:end], ",")]
    # By reference: a fiber a thread, and each would have copies of tensor maps.
    references = ", ".join(f"const {kind}& {name}" for kind, name in types)
    values = ", ".join(f"*static_cast<const {kind}*>(parameters[{i}])" for i, (kind, _) in enumerate(types))
    text = text[: match.start()] + f"static void {kernel}({references}" + text[end:]
    entry = f'extern "C" void emulated(void** parameters) {{ {kernel}({values}); }}'
    return f'#include "device.h"\n{text}\n{entry}\n'


def _parameter_type(declared: str) -> tuple[str, str]:
    words = declared.replace("__grid_constant__", "").split()
    if len(words) != 3 or words[0] != "const":
        raise ValueError(f"a kernel's parameter {declared.strip()!r} is not a const structure")
    return words[1], words[2]


def _static_shared(match: re.Match[str]) -> str:
    alignment, kind, name, dimensions = match.groups()
    whole = f"{name}_shared"
    return (
        f"using {whole} = {kind}{dimensions}; static const char {name}_key = 0; {whole}& {name} = "
        f"*static_cast<{whole}*>(emu::static_shared(&{name}_key, sizeof({whole}), {alignment or f'alignof({whole})'}));"
    )


def _translate_asm(text: str) -> str:
    out, at = [], 0
    for match in _ASM.finditer(text):
        end = _closing(text, match.end() - 1)
        out += [text[at : match.start()], _statement(text[match.end() : end])]
        at = end + 1
    return "".join([*out, text[at:]])


def _statement(body: str) -> str:
    """What stands between the brackets of an asm -> a C++ statement without its semicolon."""
    template, *sections = _split(body, ":")
    code = "".join(_STRING.findall(template)).replace("\\n", "\n").replace("\\t", " ")
    operands = [
        part[part.index("(") + 1 : part.rindex(")")].strip()
        for section in sections[:2]
        for part in _split(section, ",")
        if part.strip()
    ]
    lines = [line.split("//")[0] for line in code.split("\n")]
    code = "\n".join(lines).strip()
    if code.startswith("{"):
        code = code[1:-1]
    names: set[str] = set()
    statements = []
    for instruction in re.split(r"[;\n]", re.sub(r"^\s*\w+:", "", code, flags=re.MULTILINE)):
        words = instruction.split(None, 1)
        if not words or words[0] in ("bra", "@done"):  # the loop around mbarrier.try_wait, which waits here
            continue
        if words[0] == ".reg":
            kind, *declared = words[1].replace(",", " ").split()
            names.update(declared)
            statements.append(f"{_REGISTER_TYPES[kind]} {', '.join('ptx_' + name for name in declared)};")
            continue
        given = [_operand(x, operands, names) for x in _split(words[1], ",")] if len(words) > 1 else []
        statements.append(call(words[0], given))
    return f"do {{ {' '.join(statements)} }} while (false)"


def _operand(text: str, operands: list[str], names: set[str]) -> list[str]:
    text = text.strip()
    if text[0] in "[{":
        return [x for part in _split(text[1:-1], ",") for x in _operand(part, operands, names)]
    special = special_register(text)
    if special is not None:
        return [special]
    if text.startswith("%"):
        return [f"({operands[int(text[1:])]})"]
    if text in names:
        return [f"ptx_{text}"]
    if text == "_" or re.fullmatch(r"-?[\d.]+", text):
        return [text]
    raise ValueError(f"an operand {text!r}")


def _closing(text: str, opening: int) -> int:
    """The index of the bracket that closes the one at `opening`; brackets inside of strings are none."""
    depth, at = 0, opening
    while True:
        c = text[at]
        if c == '"':
            at = _end_of_string(text, at)
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return at
        at += 1


def _end_of_string(text: str, at: int) -> int:
    at += 1
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of brackets and strings; `::` between operands is two of them, in a name none."""
    parts, depth, begin, at = [], 0, 0, 0
    while at < len(text):
        c = text[at]
        if c == '"':
            at = _end_of_string(text, at)
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
    return [*parts, text[begin:]]
