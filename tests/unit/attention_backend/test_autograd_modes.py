"""Operators in torch's other modes: forward-mode AD, versions of changed tensors, tensors without values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from attention_backend import (
    UnsupportedError,
    flash_attn_func,
    flash_attn_with_kvcache,
    linear_attention,
    merge_states,
    paged_ops,
)
from attention_backend.operators import operator, readable, unseen

Q, K, V = torch.randn(3, 1, 4, 2, 16, dtype=torch.float64)
#: torch's own, as it gets ready for forward-mode AD.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
#: Loosely typed: what it returns depends on return_attn_probs.
flash: Callable[..., Any] = flash_attn_func


def dual() -> None:
    with forward_ad.dual_level():
        flash(Q, forward_ad.make_dual(K, K), V)


def dual_in_a_list() -> None:
    out, lse, _ = flash(Q, K, V, return_attn_probs=True)
    with forward_ad.dual_level():
        merge_states([out, forward_ad.make_dual(out, out)], [lse, lse])


def jvp_of(f: Callable[..., Any]) -> Any:
    return torch.func.jvp(f, (Q,), (Q,))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls an operator row by row
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("attention", dual),
        ("attention", lambda: jvp_of(lambda q: flash(q, K, V))),
        ("attention", lambda: torch.func.jacfwd(lambda q: flash(q, K, V))(Q)),
        ("attention", lambda: jvp_of(lambda q: torch.vmap(lambda x: flash(x, K, V))(q[None]))),
        ("attention", lambda: jvp_of(torch.compile(lambda q: flash(q, K, V), backend="eager"))),
        ("attention", torch.compile(lambda: jvp_of(lambda q: flash(q, K, V)), backend="eager")),
        ("linear_attention", lambda: jvp_of(lambda q: linear_attention(q, K, V))),
        ("merge_states", dual_in_a_list),
    ],
)
def test_forward_mode_derivatives_are_refused(name: str, run: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=f"{name} has no forward-mode derivative.*reverse mode only"):
        run()


def gradient_of(f: Callable[..., Any]) -> Any:
    return torch.func.grad(lambda q: f(q).sum())(Q)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("attention", lambda: gradient_of(lambda q: flash(q, K, V))),
        ("attention", lambda: gradient_of(lambda q: torch.vmap(lambda x: flash(x, K, V))(q[None]))),
        ("attention", lambda: torch.vmap(lambda x: gradient_of(lambda q: flash(q, x, V)))(K[None])),
        ("linear_attention", lambda: torch.func.vjp(lambda q: linear_attention(q, K, V), Q)),
    ],
)
def test_gradients_by_functions_are_refused(name: str, run: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} has no gradient by torch.func .*: ask for it by backward"):
        run()


@pytest.mark.parametrize("still", [Tensor.detach, torch.no_grad()(torch.clone)])
def test_what_no_function_asks_the_gradient_of_is_computed(still: Callable[[Tensor], Tensor]) -> None:
    one = torch.ones((), dtype=Q.dtype)
    gradient = torch.func.grad(lambda x: flash(still(Q * x), K, V).sum() * x)(one)
    torch.testing.assert_close(gradient, flash(Q, K, V).sum())


def test_lists_of_states_are_not_mapped() -> None:
    out, lse, _ = flash(Q, K, V, return_attn_probs=True)
    refused = pytest.raises(UnsupportedError, match="merge_states takes lists, which vmap does not map: call it once")
    with refused:
        torch.vmap(lambda x: merge_states([out, x], [lse, lse])[0])(torch.stack([out, out]))
    with refused:
        torch.vmap(lambda x: merge_states([out], [lse], sinks=x)[0])(torch.ones(3, 2))
    scaled = torch.vmap(lambda x: merge_states([out], [lse])[0] * x)(torch.ones(3, dtype=Q.dtype))
    torch.testing.assert_close(scaled[2], out)


def test_a_cache_is_unchanged_by_a_refused_tangent() -> None:
    cache, new = K.clone(), V[:, :1]
    with pytest.raises(UnsupportedError, match="flash_attn_with_kvcache has no forward-mode derivative"):
        jvp_of(lambda q: flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=2))
    assert torch.equal(cache, K)


def test_what_forward_mode_does_not_follow_is_computed() -> None:
    expected = flash(Q, K, V)
    with forward_ad.dual_level():
        assert torch.equal(flash(Q, K, V), expected)
        with torch.inference_mode():
            assert not unseen()
    _, tangent = torch.func.jvp(lambda x: x * flash(Q, K, V), (V,), (V,))
    assert torch.equal(tangent, V * expected)


@operator("change_for_a_test", mutates_args=("changed",))
def change(kept: Tensor, changed: Tensor) -> None:
    """As a kernel does it: torch sees no write."""
    changed.detach().numpy()[...] = kept.detach().numpy()


@change.register_fake
def _change_fake(kept: Tensor, changed: Tensor) -> None:
    del kept, changed


def test_autograd_learns_of_changes() -> None:
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    product = (weight * x).sum()
    change(torch.zeros(3), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_changes_under_no_grad_count_and_inference_tensors_do_not() -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    with torch.no_grad():
        change(torch.ones(3), x)
    with torch.inference_mode():
        change(torch.ones(3), y)
        change(torch.ones(3), torch.zeros(3))
    assert (x._version, y._version) == (1, 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_change_is_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    k_cache, v_cache, new = torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 4), torch.ones(1, 2, 4)
    slots = torch.tensor([3])
    before = k_cache._version

    def store(k_cache: Tensor, v_cache: Tensor) -> None:
        paged_ops.store_kv_op(new, new, k_cache, v_cache, slots, None, None)

    torch.compile(store, backend=backend, fullgraph=True)(k_cache, v_cache)
    assert k_cache._version > before
    assert k_cache[0, :, 3].all()


def store_and_attend(q: Tensor, cache: Tensor, new: Tensor, lengths: Tensor) -> Any:
    return flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths)


CALL = (
    torch.randn(2, 4, 4, 16),
    torch.randn(2, 64, 2, 16),
    torch.randn(2, 4, 2, 16),
    torch.zeros(2, dtype=torch.int32),
)


def test_tensors_without_values_are_stored() -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in CALL]
    assert not any(readable(x) for x in fakes)
    with mode:
        assert not readable(torch.zeros(2))
        assert store_and_attend(*fakes).shape == (2, 4, 4, 16)
    assert all(readable(x) for x in (*CALL, torch.nn.Parameter(CALL[0])))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_call_that_stores_can_be_traced(tracing_mode: str) -> None:
    graph = make_fx(store_and_attend, tracing_mode=tracing_mode)(*CALL)
    cache = CALL[1].clone()
    expected = store_and_attend(*CALL)
    torch.testing.assert_close(graph(CALL[0], cache, *CALL[2:]), expected)
