"""Linear attention's kernels against float64 by the error rule: every head_dim, lengths about tiles and segments."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention_backend.linear import linear_attention
from attention_backend.reference import linear as reference
from attention_backend.reference.linear import FeatureMap

from .error_rule import assert_out_close, poisoned_memory
from .problems import DTYPES, generator, randn

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Linear:
    """One problem; `rows` None: as many as keys."""

    keys: int
    rows: int | None = None
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: str = "bf16"
    causal: bool = True
    features: FeatureMap = "elu"
    normalize: bool = True

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        form = self.features + ("" if self.normalize else "-sum")
        heads = f"h{self.heads}/{self.kv_heads}"
        return f"{self.rows or self.keys}x{self.keys}-b{self.batch}-{heads}-d{self.dim}-{self.dtype}-{mask}-{form}"


def build(case: Linear, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Values have a mean, as a softmax's would be seen: sums over keys grow with the length."""
    g = generator(case, device)
    dtype = DTYPES[case.dtype]
    q = randn((case.batch, case.rows or case.keys, case.heads, case.dim), dtype, g)
    k, v = (randn((case.batch, case.keys, case.kv_heads, case.dim), dtype, g) for _ in range(2))
    if case.features == "none" and case.normalize:
        q, k = q.abs(), k.abs()  # features already: no denominator vanishes
    return q, k, v + 0.25


def run(case: Linear, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with poisoned_memory():
        return linear_attention(q, k, v, causal=case.causal, feature_map=case.features, normalize=case.normalize)


def same_dtype(case: Linear, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula in torch operators of the tensors' own dtype: (phi(Q) phi(K)^T) V under a mask, else by the state.

    Weights are divided by 64, which rounds nothing but keeps float16's sums finite.
    """
    group = q.shape[2] // k.shape[2]
    phi_q = reference.features(q, case.features).transpose(1, 2)
    phi_k = (reference.features(k, case.features) / 64).repeat_interleave(group, 2).transpose(1, 2)
    values = v.repeat_interleave(group, 2).transpose(1, 2)
    if case.causal:
        weights = (phi_q @ phi_k.mT).tril()
        out, total = weights @ values, weights.sum(-1, keepdim=True)
    else:
        out, total = phi_q @ (phi_k.mT @ values), phi_q @ phi_k.sum(-2, keepdim=True).mT
    out = torch.where(total == 0, torch.zeros_like(out), out / total) if case.normalize else out * 64
    return out.transpose(1, 2)


def truth(case: Linear, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exact = reference.quadratic if case.causal and case.keys < 1 << 13 else reference.forward
    options = {"causal": case.causal, "feature_map": case.features, "normalize": case.normalize}
    return exact(q.double(), k.double(), v.double(), **options)  # type: ignore[arg-type]


def check(case: Linear, device: torch.device) -> None:
    q, k, v = build(case, device)
    out = run(case, q, k, v)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert_out_close(out, truth(case, q, k, v), same_dtype(case, q, k, v))


CASES = (
    *(Linear(n, causal=causal) for n in (1, 63, 64, 65, 127, 128, 129, 521) for causal in (True, False)),
    *(Linear(331, dim=dim, causal=causal) for dim in range(16, 129, 16) for causal in (True, False)),
    *(Linear(5003, dim=dim, batch=1, causal=causal) for dim in (16, 64, 96, 128) for causal in (True, False)),
    *(Linear(4096, dim=dim, batch=1, causal=causal, dtype="fp16") for dim in (48, 128) for causal in (True, False)),
    *(
        Linear(1031, features=features, normalize=normalize, causal=causal, dim=dim)
        for features in ("elu", "relu", "none")
        for normalize in (True, False)
        for causal, dim in ((True, 64), (False, 128))
    ),
    Linear(700, heads=8, kv_heads=1, causal=True, dim=128),
    Linear(700, heads=6, kv_heads=6, causal=False, dim=80, dtype="fp16"),
    Linear(3000, rows=5, causal=False),
    Linear(7, rows=3001, causal=False, dim=128),
    Linear(257, batch=40, heads=16, kv_heads=16, causal=True),
    Linear(257, batch=40, heads=16, kv_heads=16, causal=False, dim=128),
)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of the selected cases, compiled on all cores."""
    if not torch.cuda.is_available():
        return
    from attention_backend.jit import arch_for, build_variants, default_cache
    from attention_backend.kernels.linear_variants import LinearOptions, all_passes

    arch = arch_for(torch.cuda.get_device_capability())
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    cases = {call.params["case"] for call in calls if call and isinstance(call.params.get("case"), Linear)}
    options = {LinearOptions(DTYPES[c.dtype], c.dim, c.features, c.normalize) for c in cases}
    build_variants((variant for o in options for variant in all_passes(o, arch)), default_cache())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_error_is_at_most_twice_torchs(case: Linear, device: torch.device) -> None:
    check(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Linear(20011, batch=1), Linear(20011, batch=1, causal=False, dim=128)], ids=str)
def test_a_thousand_repeats_are_bitwise_equal(case: Linear, device: torch.device) -> None:
    q, k, v = build(case, device)
    options = {"causal": case.causal, "feature_map": case.features, "normalize": case.normalize}
    want = linear_attention(q, k, v, **options)  # type: ignore[arg-type]
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000 if device.type == "cuda" else 2):
        differing += (linear_attention(q, k, v, **options) != want).any()  # type: ignore[arg-type]
    assert int(differing) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_sum_over_many_keys_stays_within_float16(causal: bool, device: torch.device) -> None:
    """phi(k) v is about 4: a plain float16 state would be infinite after 16k keys."""
    g = generator(("long", causal), device)
    q = randn((1, 40000, 1, 64), torch.float16, g)
    k, v = torch.full_like(q, 2.0), torch.full_like(q, 1.5)
    out = linear_attention(q, k, v, causal=causal)
    torch.testing.assert_close(out, v, rtol=2e-3, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_strided_tensors_are_read_as_they_lie(causal: bool, device: torch.device) -> None:
    case = Linear(300, heads=3, kv_heads=3, causal=causal)
    memory = torch.full((2, 300, 9, 72), torch.nan, dtype=torch.bfloat16, device=device)
    q, k, v = (memory[:, :, i * 3 : i * 3 + 3, :64] for i in range(3))
    for view, x in zip((q, k, v), build(case, device), strict=True):
        view.copy_(x)
    out = run(case, q, k, v)
    assert torch.equal(out, run(case, q.contiguous(), k.contiguous(), v.contiguous()))
    assert_out_close(out, truth(case, q, k, v), same_dtype(case, q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_offsets_may_lead_past_two_to_the_31(causal: bool, cuda: torch.device) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(cuda)[0] < 10e9:
        pytest.skip("needs 10 GB of free GPU memory")
    case = Linear(4096, batch=1, heads=1, kv_heads=1, causal=causal)
    memory = torch.empty((4096, 1 << 20), dtype=torch.bfloat16, device=cuda)
    assert memory.numel() > 2**31
    q, k, v = (memory[:, i * 64 : i * 64 + 64].view(1, 4096, 1, 64) for i in range(3))
    for view, x in zip((q, k, v), build(case, cuda), strict=True):
        view.copy_(x)
    assert_out_close(run(case, q, k, v), truth(case, q, k, v), same_dtype(case, q, k, v))


@pytest.mark.gpu
def test_a_nan_is_not_swallowed(device: torch.device) -> None:
    q, k, v = build(Linear(100, heads=2, batch=1), device)
    k[:, 70, 0, 3] = torch.nan
    out = linear_attention(q, k, v, causal=True)
    assert bool(out[:, 70:, 0].isnan().all())
    assert not out[:, :70].isnan().any()
    assert not out[:, :, 1].isnan().any()


@pytest.mark.gpu
def test_what_the_kernels_do_not_serve_is_refused(cuda: torch.device) -> None:
    from attention_backend import UnsupportedError

    q = torch.zeros((1, 8, 1, 72), dtype=torch.bfloat16, device=cuda)
    with pytest.raises(UnsupportedError, match="head_dim"):
        linear_attention(q, q, q)
    with pytest.raises(UnsupportedError, match="float32"):
        linear_attention(q.float(), q.float(), q.float())
    with pytest.raises(UnsupportedError, match="16-byte aligned"):
        linear_attention(*(q[..., 4:68] for _ in range(3)))


@pytest.mark.gpu
def test_gradients_are_those_of_the_cpu(device: torch.device) -> None:
    case = Linear(150, batch=1)
    inputs = build(case, device)
    found = []
    for where in (device, CPU):
        leaves = [x.detach().to(where).requires_grad_() for x in inputs]
        linear_attention(*leaves, causal=True).float().square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for ours, cpu in zip(*found, strict=True):
        assert ours is not None
        assert cpu is not None
        torch.testing.assert_close(ours.cpu(), cpu, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("case", [replace(CASES[4], keys=70), Linear(40, rows=9, causal=False, dtype="fp16")], ids=str)
def test_the_error_is_at_most_twice_torchs_on_cpu(case: Linear) -> None:
    check(case, CPU)
