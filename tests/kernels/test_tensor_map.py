"""Tensor maps, which the driver encodes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attention_backend.kernels import tensor_map

pytestmark = pytest.mark.gpu


def test_a_thread_that_never_called_cuda_encodes_the_same() -> None:
    x = torch.randn(2, 128, 6, 64, device="cuda:0", dtype=torch.bfloat16)
    here = bytes(tensor_map.tensor_map(x, 64))
    tensor_map._encode.cache_clear()
    with ThreadPoolExecutor(1) as thread:
        there = bytes(thread.submit(tensor_map.tensor_map, x, 64).result())
    assert there == here


def test_what_the_tma_cannot_read_is_refused() -> None:
    x = torch.randn(2, 128, 6, 65, device="cuda:0", dtype=torch.bfloat16)[..., :64]
    with pytest.raises(tensor_map.TensorMapError, match=r"CUDA error 1 .*sizes"):
        tensor_map.tensor_map(x, 64)
