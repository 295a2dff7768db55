"""Messages on a stream socket between our own processes: a length of four bytes, then msgpack. Knows no message."""

import struct

import msgspec

HEADER = struct.Struct(">I")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def body_size(header: bytes, most: int) -> int:
    """Bytes of the body that follows. Raises msgspec.DecodeError for more than `most`: that is no frame."""
    (size,) = HEADER.unpack(header)
    if size > most:
        raise msgspec.DecodeError(f"a frame of {size} bytes")
    return int(size)
