"""NVRTC on real kernels, for every architecture, with no GPU."""

import os
from pathlib import Path

import pytest

pytest.importorskip("cupy")

from attention_backend.jit import ARCHS, CompileError, KernelSource, KernelVariant, headers
from attention_backend.jit.compiler import Compiled, compile_variant, key
from attention_backend.jit.cubin import parameter_sizes, whole
from attention_backend.jit.errors import CudaHeadersError
from attention_backend.jit.report import parse
from attention_backend.jit.sources import snapshot

SETMAXNREG = """
extern "C" __global__ void warns(float* x) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  x[threadIdx.x] = 1.0f;
}
"""

# An accumulator is used while its wgmma is in flight, so ptxas must serialise; with neither that nor the wait too.
SERIALISED = """
typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(128, 1) serialised(float* x, u64 a, u64 b, int n) {
  float d[4] = {};
  for (int i = 0; i < n; i++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    d[0] *= 2.0f;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  x[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
USED_IN_FLIGHT = "d[0] *= 2.0f;"
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'


def compiled(variant: KernelVariant, folder: Path) -> Compiled:
    return compile_variant(variant, snapshot(KernelSource.named(variant.kernel, folder)))


def key_of(variant: KernelVariant, folder: Path) -> str:
    return key(variant, snapshot(KernelSource.named(variant.kernel, folder)))


def scale(arch: str = "sm_80", times: int | str = 3) -> KernelVariant:
    return KernelVariant("scale", arch, (("TIMES", times),))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_compiles_for_every_architecture(kernels: Path, arch: str) -> None:
    result = compiled(scale(arch), kernels)
    assert whole(result.cubin) == result.cubin
    assert 0 < result.report.registers <= 255
    assert (result.report.spill_bytes, result.report.local_bytes, result.report.static_smem) == (0, 0, 0)
    assert result.report.warnings == ()
    assert result.report.parameter_sizes == (32,)


def test_the_same_source_gives_the_same_cubin(kernels: Path) -> None:
    assert compiled(scale(), kernels).cubin == compiled(scale(), kernels).cubin


def test_spills_are_reported(kernels: Path) -> None:
    report = compiled(KernelVariant("spill", "sm_90a"), kernels).report
    assert report.spill_bytes > 0
    assert report.local_bytes > 0


def test_local_memory_without_spills_and_shared_memory_are_reported(kernels: Path) -> None:
    report = compiled(KernelVariant("local", "sm_80"), kernels).report
    assert (report.spill_bytes, report.local_bytes, report.static_smem) == (0, 256, 128)
    assert report.parameter_sizes == (8, 4)


def test_an_ignored_setmaxnreg_is_a_wgmma_warning(kernels: Path) -> None:
    (kernels / "warns.cuh").write_text(SETMAXNREG)
    (warning,) = compiled(KernelVariant("warns", "sm_90a"), kernels).report.wgmma_warnings
    assert "C7508" in warning


@pytest.mark.parametrize(
    "source",
    [SERIALISED, SERIALISED.replace(USED_IN_FLIGHT, "").replace(WAIT, "")],
    ids=["an accumulator is used in flight", "nothing is waited for"],
)
def test_serialised_wgmma_is_reported_by_the_compiler_itself(kernels: Path, source: str) -> None:
    (kernels / "serialised.cuh").write_text(source)
    (warning,) = compiled(KernelVariant("serialised", "sm_90a"), kernels).report.wgmma_warnings
    assert "wgmma.mma_async instructions are serialized" in warning


@pytest.mark.parametrize("code", [f"C{n}" for n in (*range(7509, 7517), 7518, 7520)])
def test_every_message_about_serialised_wgmma_is_found_in_a_log(code: str) -> None:
    log = (
        f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 9 by compiler to allow use of registers\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers\n"
    )
    report = parse(log, ())
    assert len(report.wgmma_warnings) == 1
    assert len(report.warnings) == 2


def test_warnings_of_the_front_end_are_kept_with_their_line(kernels: Path) -> None:
    (kernels / "idle.cuh").write_text('extern "C" __global__ void idle() {\n  int unused;\n}\n')
    (warning,) = compiled(KernelVariant("idle", "sm_80"), kernels).report.warnings
    assert warning.startswith("idle.cuh(2): warning #177-D")


def test_an_error_in_a_header_names_its_file_and_line(kernels: Path) -> None:
    (kernels / "parts/depth.cuh").write_text("#pragma once\n#define DEPTH 2\nint x = missing;\n")
    with pytest.raises(CompileError, match=r"scale\[sm_80, TIMES=3\](.|\n)*parts/depth\.cuh\(3\): error") as caught:
        compiled(scale(), kernels)
    assert "missing" in caught.value.log


def test_the_name_of_the_kernel_must_be_the_name_of_its_file(kernels: Path) -> None:
    (kernels / "misnamed.cuh").write_text('extern "C" __global__ void other(float* x) { *x = 1; }\n')
    with pytest.raises(CompileError, match="__global__ misnamed; found other"):
        compiled(KernelVariant("misnamed", "sm_80"), kernels)


def test_a_file_holds_one_kernel(kernels: Path) -> None:
    one = 'extern "C" __global__ void pair(float* x) { *x = 1; }\n'
    (kernels / "pair.cuh").write_text(one + one.replace("pair", "second"))
    with pytest.raises(CompileError, match="must hold one kernel"):
        compiled(KernelVariant("pair", "sm_80"), kernels)


def test_headers_of_the_working_directory_are_not_used(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere/parts").mkdir(parents=True)
    (tmp_path / "elsewhere/parts/twice.cuh").write_text("#error from the working directory\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compiled(scale(), kernels).report.registers > 0


@pytest.mark.parametrize("changed", ["scale.cuh", "parts/twice.cuh", "parts/depth.cuh"])
def test_the_key_changes_with_any_file_that_is_included(kernels: Path, changed: str) -> None:
    before = key_of(scale(), kernels)
    path = kernels / changed
    path.write_text(path.read_text() + "\n// one more line\n")
    assert key_of(scale(), kernels) != before


def test_the_key_changes_with_a_define_and_with_the_architecture_and_nothing_else(kernels: Path) -> None:
    before = key_of(scale("sm_80", 3), kernels)
    assert key_of(scale("sm_86", 3), kernels) != before
    assert key_of(scale("sm_80", 4), kernels) != before
    (kernels / "unrelated.cuh").write_text("// not included\n")
    os.utime(kernels / "scale.cuh", (0, 0))
    assert key_of(scale("sm_80", "3"), kernels) == before


def test_a_cubin_cut_short_is_not_whole(kernels: Path) -> None:
    cubin = compiled(scale(), kernels).cubin
    assert whole(cubin[:-1]) == cubin
    for damaged in (cubin[:-2], b"", b"\x7fELF", b"PTX " + cubin):
        with pytest.raises(ValueError, match="ELF"):
            whole(damaged)
    assert parameter_sizes(cubin, "another") == ()


def test_missing_cuda_headers_are_reported_with_the_places_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    with pytest.raises(CudaHeadersError, match=rf"CUDA 99(.|\n)*{tmp_path}(.|\n)*make install"):
        headers.find(99)


def test_the_headers_of_a_toolkit_are_found_by_cuda_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_fp16.h").touch()
    (include / "cuda.h").write_text("#define CUDA_VERSION 98020\n")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert headers.find(98) == headers.CudaHeaders(include, 98020)
