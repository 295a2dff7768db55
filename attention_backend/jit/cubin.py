"""Reads the little we need from a cubin, an ELF file: where it ends, and the sizes of a kernel's parameters."""

import struct
from collections.abc import Iterator

# Records of a .nv.info section: one byte of format, one of attribute, then a 16-bit value or payload size.
_PAYLOAD_FOLLOWS = 4
_KPARAM_INFO = 0x17
_SIZE_SHIFT = 18  # a KPARAM_INFO's last word holds the parameter's size above flags


def whole(cubin: bytes) -> bytes:
    """The cubin with the last byte that CuPy's getCUBIN cuts off, taking it for the end of a C string.

    It is the high byte of a table's last 64-bit entry, zero. Raises ValueError for anything shorter, or no ELF file.
    """
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64:
        raise ValueError("not an ELF file")
    program_table, section_table = struct.unpack_from("<QQ", cubin, 0x20)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 0x36)
    end = max(program_table + program_size * programs, section_table + section_size * sections)
    if len(cubin) == end - 1:
        return cubin + b"\0"
    if len(cubin) < end:
        raise ValueError(f"{len(cubin)} bytes of an ELF file of {end}")
    return cubin


def parameter_sizes(cubin: bytes, kernel: str) -> tuple[int, ...]:
    """Bytes of every parameter of `kernel`, in order: a structure passed by value has its C++ sizeof."""
    info = dict(_sections(cubin)).get(f".nv.info.{kernel}", b"")
    sizes: dict[int, int] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _PAYLOAD_FOLLOWS:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
            sizes[ordinal] = packed >> _SIZE_SHIFT
        at += value
    return tuple(sizes[ordinal] for ordinal in sorted(sizes))


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name_offset, _, _, _, offset, size in headers:
        start = names_at + name_offset
        yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[offset : offset + size]
