"""The snapshot that is hashed and compiled."""

from pathlib import Path

import pytest

from attention_backend.jit import KernelSource, SourceError
from attention_backend.jit.sources import snapshot


def test_a_snapshot_holds_every_header_included_however_deep(kernels: Path) -> None:
    taken = snapshot(KernelSource.named("scale", kernels))
    assert taken.name == "scale.cuh"
    assert [name for name, _ in taken.headers] == ["parts/depth.cuh", "parts/twice.cuh"]


def test_an_include_beside_the_header_is_named_from_the_folder_and_lines_keep_their_numbers(kernels: Path) -> None:
    headers = dict(snapshot(KernelSource.named("scale", kernels)).headers)
    before = (kernels / "parts/twice.cuh").read_text()
    assert headers["parts/twice.cuh"] == before.replace('"depth.cuh"', '"parts/depth.cuh"')


def test_headers_that_include_each_other_are_read_once(kernels: Path) -> None:
    (kernels / "parts/depth.cuh").write_text('#pragma once\n#include "parts/twice.cuh"\n#define DEPTH 2\n')
    assert len(snapshot(KernelSource.named("scale", kernels)).headers) == 2


def test_system_headers_stay_as_they_are(kernels: Path) -> None:
    assert "#include <cuda_fp16.h>" in snapshot(KernelSource.named("scale", kernels)).text


def test_an_include_of_a_macro_is_refused_with_its_line(kernels: Path) -> None:
    (kernels / "parts/depth.cuh").write_text("#pragma once\n#define OTHER <x>\n#include OTHER\n")
    with pytest.raises(SourceError, match=r"parts/depth\.cuh\(3\)"):
        snapshot(KernelSource.named("scale", kernels))


def test_a_header_outside_of_the_folder_is_refused(kernels: Path) -> None:
    (kernels.parent / "outside.cuh").write_text("#define DEPTH 2\n")
    (kernels / "parts/depth.cuh").write_text('#include "../../outside.cuh"\n')
    with pytest.raises(SourceError, match="outside of"):
        snapshot(KernelSource.named("scale", kernels))
