"""What a file's first bytes say when it is no text: archives and other binary formats, by name. Knows no JSON."""

HEAD_BYTES = 512  # how much of a file has to be seen: a tar archive names itself at byte 257

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"PK\x05\x06", "a zip archive"),
    (0, b"PK\x07\x08", "a zip archive"),
    (0, b"\x1f\x8b", "gzip data"),
    (0, b"\x28\xb5\x2f\xfd", "zstd data"),
    (0, b"\xfd7zXZ\x00", "xz data"),
    (0, b"BZh", "bzip2 data"),
    (0, b"\x04\x22\x4d\x18", "lz4 data"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "a rar archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"PAR1", "a Parquet file"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"SQLite format 3\x00", "a SQLite database"),
    (0, b"%PDF", "a PDF"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x7fELF", "a program"),
    (0, b"GGUF", "a GGUF model"),
    (0, b"\x80\x02", "a Python pickle"),
    (0, b"\x80\x03", "a Python pickle"),
    (0, b"\x80\x04", "a Python pickle"),
    (0, b"\x80\x05", "a Python pickle"),
    (0, b"\xef\xbb\xbf", "text with a byte order mark"),
    (0, b"\xff\xfe", "UTF-16 text"),
    (0, b"\xfe\xff", "UTF-16 text"),
)


def named_format(head: bytes) -> str | None:
    """The name of the format that the first HEAD_BYTES of a file are; None when they may be plain UTF-8."""
    return next((name for at, magic, name in _SIGNATURES if head.startswith(magic, at)), None)
