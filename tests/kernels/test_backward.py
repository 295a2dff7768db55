"""The backward kernels as training uses them: repeats, checkpoints, the compiler, graphs, rows that nobody sees."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_backend import attention, backward, dispatch, flash_attn_func, flash_attn_varlen_func
from attention_backend.errors import UnsupportedError
from attention_backend.problem import AttentionArgs

from .backward_oracle import kernels_for
from .problems import Case, build, generator, randn
from .test_dropout import with_dropout

BF16 = torch.bfloat16
CPU = torch.device("cpu")
REPEATED = (
    Case(1000, 1000, batch=2, heads=8, kv_heads=2),
    Case(700, 1500, batch=2, heads=4, kv_heads=4, dim=128, dim_v=128, mask="full"),
    Case(512, 512, batch=2, heads=4, kv_heads=1, dim=128, dim_v=128, mask="sliding"),
    Case(300, 777, batch=2, dim=256, dim_v=256),
    Case(257, 513, batch=5, layout="varlen", mask="chunk"),
    Case(200, 200, batch=2, dim=72, dim_v=72, keys="key_mask", score="softcap_alibi", dtype="fp16"),
    Case(700, 700, batch=2, heads=8, kv_heads=2, dim=128, dim_v=128, mask="sliding", sinks=True),
    Case(300, 300, batch=2, dim=256, dim_v=256, sinks=True),
)
DROPPED = (
    Case(700, 700, batch=2, heads=8, kv_heads=2, dim=128, dim_v=128),
    Case(300, 500, batch=2, mask="full", dtype="fp16"),
    Case(300, 300, batch=2, dim=256, dim_v=256, sinks=True),
)


def inputs(seqlen: int, device: torch.device, dim: int = 64, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    g = generator(("backward", seqlen, dim), device)
    return [randn((2, seqlen, h, dim), BF16, g).requires_grad_() for h in (heads, kv_heads, kv_heads)]


def check_repeats(case: Case, device: torch.device, repeats: int, dropout_p: float = 0.0) -> None:
    args = replace(build(case, device), deterministic=True)
    if dropout_p:
        args = with_dropout(args, dropout_p)
    out, lse = dispatch.run(args)
    grad_out = randn(args.out_shape, args.dtype, generator(case, device))
    for kernel in kernels_for(args):
        want = backward.run(args, out, lse, grad_out, kernel=kernel)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(repeats):
            got = backward.run(args, out, lse, grad_out, kernel=kernel)
            # Counted on the device: a host sync after every call would hide races between calls.
            differing += (got.dq != want.dq).any() | (got.dk != want.dk).any() | (got.dv != want.dv).any()
            if want.dsinks is not None:
                assert got.dsinks is not None
                differing += (got.dsinks != want.dsinks).any()
        assert int(differing) == 0, f"{kernel}: {int(differing)} of {repeats} repeats differ"


@pytest.mark.gpu
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_thousand_deterministic_repeats_are_bitwise_equal(case: Case, device: torch.device) -> None:
    check_repeats(case, device, 1000 if device.type == "cuda" else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", DROPPED, ids=str)
def test_a_thousand_repeats_with_one_seed_of_dropout_are_bitwise_equal(case: Case, device: torch.device) -> None:
    check_repeats(case, device, 1000 if device.type == "cuda" else 3, dropout_p=0.2)


def test_deterministic_repeats_are_bitwise_equal_on_cpu() -> None:
    check_repeats(REPEATED[0].with_shape(33, 70), CPU, 5)
    check_repeats(replace(REPEATED[0].with_shape(33, 70), sinks=True), CPU, 5, dropout_p=0.2)


@pytest.mark.gpu
def test_many_more_blocks_than_run_at_once_take_their_turns(cuda: torch.device) -> None:
    """A block that waited for one that is not running would never end."""
    check_repeats(Case(8192, 8192, batch=2, heads=16, kv_heads=16, mask="full"), cuda, 3)
    check_repeats(Case(8192, 8192, batch=2, heads=16, kv_heads=2, dim=128, dim_v=128), cuda, 3)
    check_repeats(Case(4096, 4096, batch=4, heads=16, kv_heads=4, dim=256, dim_v=256), cuda, 3)


def check_deterministic_switches(device: torch.device) -> None:
    """The flag of the call and torch's own give the same bits."""
    q, k, v = inputs(300, device)

    def gradients(deterministic: bool) -> tuple[Tensor, ...]:
        out = flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    by_flag = gradients(True)
    torch.use_deterministic_algorithms(True)
    try:
        by_torch = gradients(False)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(by_flag, by_torch, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_both_switches_of_determinism_give_the_same_bits(device: torch.device) -> None:
    check_deterministic_switches(device)


def test_both_switches_of_determinism_give_the_same_bits_on_cpu() -> None:
    check_deterministic_switches(CPU)


def check_checkpointing(device: torch.device, reentrant: bool) -> None:
    """Forward runs twice, with the same dropout, and the gradients are those without a checkpoint."""
    q, k, v = inputs(200, device)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, dropout_p=0.2, causal=True, deterministic=True)
        assert isinstance(out, Tensor)
        return out.float().square()

    def gradients(call: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        total = call().sum()
        q.grad = k.grad = v.grad = None
        total.backward()
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        return q.grad, k.grad, v.grad

    plain = gradients(lambda: layer(q, k, v))
    saved = gradients(lambda: checkpoint(layer, q, k, v, use_reentrant=reentrant))
    for a, b in zip(plain, saved, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool, device: torch.device) -> None:
    check_checkpointing(device, reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients_on_cpu(reentrant: bool) -> None:
    check_checkpointing(CPU, reentrant)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_has_the_gradients_of_an_eager_one(backend: str, cuda: torch.device) -> None:
    check_compiled(cuda, backend)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_layer_has_the_gradients_of_an_eager_one_on_cpu() -> None:
    check_compiled(CPU, "aot_eager")


def check_compiled(device: torch.device, backend: str) -> None:
    """Heads first in memory, as models hand them over: the fake's strides have to be the kernel's."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flash_attn_func(q, k, v, causal=True, softcap=20.0, deterministic=True)
        assert isinstance(out, Tensor)
        return out * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs(130, device)]
    want = torch.autograd.grad(layer(*leaves).float().square().sum(), leaves)
    got = torch.autograd.grad(compiled(*leaves).float().square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_backward_replays_on_new_values(deterministic: bool, cuda: torch.device) -> None:
    q, k, v = inputs(300, cuda, dim=128)
    grad = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        out = flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, (q, k, v), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v, grad):
            x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    for a, b in zip(captured, step(), strict=True):
        if deterministic:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def check_tails(device: torch.device) -> None:
    """Rows past the last sequence hold NaN and get gradient 0: a model's weights see all rows' gradients."""
    lengths = torch.tensor([0, 70, 70, 200], dtype=torch.int32, device=device)
    g = generator("tails", device)
    q, k, v = (randn((256, h, 64), BF16, g) for h in (4, 2, 2))
    for x in (q, k, v):
        x[200:] = torch.nan
        x.requires_grad_()
    out = flash_attn_varlen_func(q, k, v, lengths, lengths, 130, 130, causal=True)
    assert isinstance(out, Tensor)
    for gradient in torch.autograd.grad(out[:200].float().square().sum(), (q, k, v)):
        assert bool(gradient.isfinite().all())
        assert bool((gradient[200:] == 0).all())
        assert bool((gradient[:200] != 0).any())


@pytest.mark.gpu
def test_rows_past_the_last_sequence_get_gradient_zero(device: torch.device) -> None:
    check_tails(device)


def test_rows_past_the_last_sequence_get_gradient_zero_on_cpu() -> None:
    check_tails(CPU)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits_are_reached(cuda: torch.device) -> None:
    """2^31 elements of q and of the float32 sums; the last head of the last sequence against the same one alone."""
    seqlen, heads = 4096, 64
    batch = (1 << 31) // (seqlen * heads * 128) + 1
    if torch.cuda.get_device_properties(cuda).total_memory < 100 << 30:
        pytest.skip("needs 100 GB of GPU memory")
    g = generator("offsets", cuda)
    q, k, v, grad = (torch.randn((batch, seqlen, heads, 128), device=cuda, generator=g, dtype=BF16) for _ in range(4))
    args = AttentionArgs(q, k, v, 128**-0.5, window_right=0, deterministic=True)
    out, lse = dispatch.run(args)

    def last(x: Tensor) -> Tensor:
        return x[-1:, :, -1:].contiguous()

    part = replace(args, q=last(q), k=last(k), v=last(v))
    for kernel in kernels_for(args):
        whole = backward.run(args, out, lse, grad, kernel=kernel)
        alone = backward.run(part, last(out), lse[-1:, -1:], last(grad), kernel=kernel)
        for name in ("dq", "dk", "dv"):
            assert torch.equal(last(getattr(whole, name)), getattr(alone, name)), f"{name} by {kernel}"


@pytest.mark.gpu
def test_a_bias_is_served_by_the_exact_path_and_counted_by_its_name(cuda: torch.device) -> None:
    case = Case(60, 70, keys="bias_float", mask="full")
    args = build(case, cuda)
    leaves = replace(args, q=args.q.requires_grad_())
    before = dispatch.calls().get("tiled_torch", 0)
    attention(leaves).sum().backward()
    assert dispatch.calls()["tiled_torch"] == before + 1
    with pytest.raises(UnsupportedError, match="no gradient of a bias"):
        backward.run(args, *dispatch.run(args), args.q, kernel="flash_bwd_sm80")


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [8192, 65536])
def test_extra_memory_is_linear_in_length(seqlen: int, cuda: torch.device) -> None:
    """At most four bytes an element of dQ, and two floats a row, beside the gradients themselves."""
    heads, dim = 8, 128
    q, k, v = (torch.randn((1, seqlen, heads, dim), device=cuda, dtype=BF16) for _ in range(3))
    args = AttentionArgs(q, k, v, dim**-0.5, window_right=0)
    out, lse = dispatch.run(args)
    for kernel in kernels_for(args):
        backward.run(args, out, lse, out, kernel=kernel)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward.run(args, out, lse, out, kernel=kernel)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra <= seqlen * heads * (3 * 2 * dim + 4 * dim + 8) + (8 << 20), f"{extra} bytes by {kernel}"
