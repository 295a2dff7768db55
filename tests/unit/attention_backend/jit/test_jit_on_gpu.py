"""Real launches: streams, threads, shared memory and CUDA graphs."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from attention_backend.jit import Kernel, KernelCache, KernelVariant, LaunchError, arch_for, launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

# Waits before it writes, so that an order wrongly assumed between streams shows.
FILL = """
struct Params { float* y; const float* x; long long n; long long wait; };
extern "C" __global__ void fill(const __grid_constant__ Params p) {
  extern __shared__ float s[];
  long long start = clock64();
  while (clock64() - start < p.wait) {}
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  s[threadIdx.x] = i < p.n ? p.x[i] : 0.0f;
  __syncthreads();
  if (i < p.n) p.y[i] = s[threadIdx.x] + 1.0f;
}
"""
LENGTH = 1000


class Params(ctypes.Structure):
    _fields_ = (("y", ctypes.c_void_p), ("x", ctypes.c_void_p), ("n", ctypes.c_int64), ("wait", ctypes.c_int64))


@pytest.fixture
def fill(kernels: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    (kernels / "fill.cuh").write_text(FILL)
    monkeypatch.setattr(launch, "default_cache", lambda: cache)
    monkeypatch.setattr(launch, "_loaded", {})
    return launch.load(KernelVariant("fill", arch_for(torch.cuda.get_device_capability())))


def run(fill: Kernel, x: torch.Tensor, y: torch.Tensor, wait: int = 0, smem: int = 1024) -> None:
    params = Params(y.data_ptr(), x.data_ptr(), LENGTH, wait)
    fill((4, 1, 1), (256, 1, 1), params, smem)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(LENGTH, dtype=torch.float32, device="cuda")


def test_a_kernel_is_loaded_once_per_device(fill: Kernel) -> None:
    assert launch.load(fill.variant) is launch.load(fill.variant, torch.cuda.current_device()) is fill


def test_a_launch_runs_on_torchs_side_stream_in_its_order(fill: Kernel, x: torch.Tensor) -> None:
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(fill, x, y, wait=20_000_000)
        run(fill, y, z)
        assert not side.query()  # the side stream has the work
        assert torch.cuda.default_stream().query()  # and the default stream has not
    side.synchronize()
    torch.testing.assert_close(z, x + 2)


def test_a_launch_is_captured_in_a_cuda_graph_and_replayed(fill: Kernel, x: torch.Tensor) -> None:
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    run(fill, x, y)
    run(fill, y, z)
    torch.cuda.synchronize()
    y.zero_(), z.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(fill, x, y)
        run(fill, y, z)
    torch.cuda.synchronize()
    assert not z.any()  # captured, not run
    for times in range(3):
        x.fill_(times)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(z, x + 2)


def test_a_launch_works_from_a_thread_that_never_used_cuda(fill: Kernel, x: torch.Tensor) -> None:
    y = torch.zeros_like(x)
    thread = threading.Thread(target=run, args=(fill, x, y))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, x + 1)


def test_shared_memory_above_48_kib_works_up_to_the_devices_limit(fill: Kernel, x: torch.Tensor) -> None:
    y = torch.zeros_like(x)
    assert fill.max_smem > 48 * 1024
    run(fill, x, y, smem=fill.max_smem)
    torch.cuda.synchronize()
    torch.testing.assert_close(y, x + 1)
    with pytest.raises(LaunchError, match="shared memory"):
        run(fill, x, y, smem=fill.max_smem + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_launch_goes_to_the_kernels_device_whichever_is_current(fill: Kernel) -> None:
    with torch.cuda.device(1):
        second = launch.load(fill.variant)
        assert second is not fill
    x = torch.ones(LENGTH, device="cuda:1")
    y = torch.zeros_like(x)
    torch.cuda.synchronize(1)
    run(second, x, y)  # device 0 is current
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(y, x + 1)
