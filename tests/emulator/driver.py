"""What kernels' launchers ask the CUDA driver for besides launches: tensor maps, checked as the driver checks them.

The rules are those of cuTensorMapEncodeTiled (CUDA Driver API, Tensor Map Object Management).
"""

import ctypes
import struct
from typing import Any

_MAGIC = 0x7E5012A1  # runtime/copies.cpp: Map, which it decodes
_ELEMENT_BYTES = {9: 2, 6: 2, 7: 4, 2: 4, 4: 8, 0: 1}  # by CUtensorMapDataType
_SWIZZLE_128B = 3
_INVALID_VALUE = 1


class EmulatedDriver:
    """The functions of libcuda that attention_backend.kernels calls by ctypes."""

    def cuTensorMapEncodeTiled(  # noqa: N802  the driver's name
        self,
        out: ctypes.c_void_p,
        data_type: int,
        rank: int,
        address: ctypes.c_void_p,
        sizes: Any,
        pitches: Any,
        box: Any,
        steps: Any,
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        element, begin = _ELEMENT_BYTES[data_type], address.value or 0
        row_bytes = box[0] * element
        legal = (
            1 <= rank <= 5
            and begin % 16 == 0
            and all(0 < n <= 1 << 32 for n in sizes)
            and all(p % 16 == 0 and p < 1 << 40 for p in pitches)
            and all(0 < n <= 256 for n in box)
            and all(n == 1 for n in steps)
            and row_bytes % 16 == 0
            and (swizzle != _SWIZZLE_128B or row_bytes <= 128)
            and swizzle in (0, _SWIZZLE_128B)
            and interleave == fill == 0
        )
        if not legal:
            return _INVALID_VALUE
        encoded = struct.pack(
            "<IBBBxQ5Q4Q5I",
            _MAGIC, element, rank, swizzle == _SWIZZLE_128B, begin,
            *_padded(sizes, 5), *_padded(pitches, 4), *_padded(box, 5),
        )  # fmt: skip
        ctypes.memmove(out.value or 0, encoded, len(encoded))
        return 0


def _padded(values: Any, count: int) -> list[int]:
    return [*values, *(1,) * (count - len(values))]
