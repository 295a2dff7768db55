"""AdamW with float32 masters: the reference's numbers, and a state that goes on where it stopped."""

import math

import pytest
import torch
from torch.nn import Parameter

from models.training.optimizer import Optimizer


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    torch.manual_seed(0)
    return {"matrix": Parameter(torch.randn(8, 4, dtype=dtype)), "norm": Parameter(torch.ones(8, dtype=dtype))}


def backward(named: dict[str, Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for p in named.values():
        loss = loss + (p.float() * torch.randn(p.shape, generator=generator)).sum()
    loss.backward()


def test_float32_steps_equal_torch_s_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, weight_decay=0.1, max_grad_norm=0.0)
    reference = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    )
    for step in range(4):
        rate = 1e-2 / (step + 1)
        backward(ours, step)
        backward(theirs, step)
        optimizer.step(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        reference.zero_grad()
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name])


def test_updates_far_below_bfloat16_s_step_add_up() -> None:
    named = {"w": Parameter(torch.full((4, 4), 100.0, dtype=torch.bfloat16))}  # whose neighbours are 0.5 away
    optimizer = Optimizer(named, weight_decay=0.0, max_grad_norm=0.0)
    for _ in range(60):
        named["w"].sum().backward()
        optimizer.step(1e-2)
    assert named["w"].unique().tolist() == [99.5]
    torch.testing.assert_close(optimizer.state_tensors()["weight/w"], torch.full((4, 4), 99.4), atol=0.01, rtol=0)


def test_bfloat16_gradients_of_many_backwards_are_added_in_float32() -> None:
    named = {"w": Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))}
    optimizer = Optimizer(named, weight_decay=0.0, max_grad_norm=1e9)
    for gradient in (256.0, *[0.5] * 100):  # 256 + 0.5 is 256 in bfloat16
        (named["w"] * gradient).sum().backward()
    assert named["w"].grad is None
    assert optimizer.step(0.0) == pytest.approx(2 * 306.0)


def test_gradients_are_clipped_to_the_norm() -> None:
    one, two = parameters(), parameters()
    free = Optimizer(one, weight_decay=0.0, max_grad_norm=0.0)
    clipped = Optimizer(two, weight_decay=0.0, max_grad_norm=0.5)
    for named, optimizer in ((one, free), (two, clipped)):
        backward(named, 0)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in named.values() if p.grad is not None))
        assert optimizer.step(1e-3) == pytest.approx(norm)
    moments = [optimizer.state_tensors()["exp_avg/matrix"].norm() for optimizer in (free, clipped)]
    assert moments[1] / moments[0] == pytest.approx(0.5 / norm, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    named = parameters()
    optimizer = Optimizer(named, weight_decay=0.1, max_grad_norm=1.0)
    backward(named, 0)
    optimizer.step(1e-2)
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    (named["matrix"].sum() * bad).backward()
    assert not math.isfinite(optimizer.step(1e-2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state_tensors().items())
    assert all(p.grad is None for p in named.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_state_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    whole, first, second = parameters(dtype), parameters(dtype), parameters(dtype)
    optimizers = [Optimizer(named, weight_decay=0.1, max_grad_norm=1.0) for named in (whole, first, second)]
    for step in range(6):
        backward(whole, step)
        optimizers[0].step(1e-2)
    for step in range(3):
        backward(first, step)
        optimizers[1].step(1e-2)
    optimizers[2].load_state_tensors({name: t.clone() for name, t in optimizers[1].state_tensors().items()})
    for step in range(3, 6):
        backward(second, step)
        optimizers[2].step(1e-2)
    for name, tensor in optimizers[0].state_tensors().items():
        assert torch.equal(tensor, optimizers[2].state_tensors()[name]), name
    assert all(torch.equal(p, second[name]) for name, p in whole.items())


def test_a_state_that_lacks_a_tensor_is_refused() -> None:
    optimizer = Optimizer(parameters(), weight_decay=0.0, max_grad_norm=1.0)
    state = dict(optimizer.state_tensors())
    del state["exp_avg_sq/norm"]
    with pytest.raises(KeyError, match="exp_avg_sq/norm"):
        optimizer.load_state_tensors(state)
