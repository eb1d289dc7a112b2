"""The counter against counts made by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedblock import attention
from fusedblock.kernels._spec import Cost
from fusedblock.metering.counter import TrafficCounter
from fusedblock.ops import COSTS, gated_mlp, linear, qkv_rope, rms_norm

BF16 = torch.bfloat16


def count(run) -> TrafficCounter:
    with TrafficCounter() as counter:
        run()
    return counter


def totals(run) -> tuple[int, int, int]:
    t = count(run).total()
    return t.launches, t.read_bytes, t.written_bytes


X = torch.randn(8, 16)  # 512 bytes


@pytest.mark.parametrize(
    "run, expected",
    [
        (lambda: X + X, (1, 512, 512)),  # one input, read once
        (lambda: X @ X.T, (1, 512, 8 * 8 * 4)),  # the same memory in another order
        (lambda: X + torch.ones(16), (2, 512 + 64, 512 + 64)),  # ones: written only
        (lambda: X.softmax(-1), (1, 512, 512)),
        (lambda: F.linear(X, torch.empty(4, 16), torch.empty(4)), (1, 512 + 256 + 16, 128)),
        (lambda: X.clone().add_(1.0), (2, 1024, 1024)),
        (lambda: X.clone().mul_(X), (2, 512 + 1024, 1024)),
        (lambda: torch.empty(8, 16).copy_(X), (1, 512, 512)),
        (lambda: torch.empty(8, 16).fill_(1.0), (1, 0, 512)),
        (lambda: torch.add(X, X, out=torch.empty(8, 16)), (1, 512, 512)),
        (lambda: torch.cat([X, X + 0]), (2, 512 + 1024, 512 + 1024)),
        (lambda: X.view(16, 8).transpose(0, 1).unsqueeze(0)[0, 1:].expand(7, 16).detach(), (0, 0, 0)),
        (lambda: X.reshape(-1).contiguous().to(torch.float32), (0, 0, 0)),
        (lambda: X.T.contiguous(), (1, 512, 512)),
        (lambda: X.to(BF16), (1, 512, 256)),
        (lambda: torch.empty(3, 4).new_empty(5), (0, 0, 0)),
        (lambda: X[:1].expand(8, 16) * 2.0, (1, 64, 512)),  # a broadcast row is stored once
        (lambda: F.embedding(torch.tensor([0, 2, 2]), X), (1, 3 * 64 + 24, 3 * 64)),
        (lambda: X[torch.tensor([1, 5])], (1, 2 * 64 + 16, 2 * 64)),
        (lambda: X.index_select(0, torch.tensor([1, 5])), (1, 2 * 64 + 16, 2 * 64)),
        (lambda: X.gather(1, torch.zeros(8, 2, dtype=torch.int64)), (2, 64 + 128, 64 + 128)),
        (lambda: torch.empty(100, 16).index_copy_(0, torch.arange(8), X), (2, 512 + 64, 512 + 64)),
        (lambda: torch.empty(100, 16).index_put_((torch.tensor([3, 4]),), X[:2]), (1, 128 + 16, 128)),
        (lambda: torch.empty(100, 16).index_put_((torch.tensor([3, 4]),), X[:2], accumulate=True), (1, 256 + 16, 128)),
        (lambda: torch._foreach_add_([X.clone(), X.clone()], 1.0), (3, 3 * 512 + 512, 2 * 512 + 1024)),
    ],
)
def test_by_hand(run, expected: tuple[int, int, int]) -> None:
    assert totals(run) == expected


def test_names_and_order() -> None:
    counter = count(lambda: (X * X + X).exp() * 2)
    assert [c.name for c in counter.launches] == ["aten.mul", "aten.add", "aten.exp", "aten.mul"]
    assert list(counter.by_op()) == ["aten.mul", "aten.add", "aten.exp"]
    assert counter.by_op()["aten.mul"].launches == 2
    assert sum(t.bytes for t in counter.by_op().values()) == counter.total().bytes


def test_matrix_product_flops() -> None:
    a, b = torch.empty(3, 5), torch.empty(5, 7)
    assert count(lambda: a @ b).total().flops == 2 * 3 * 5 * 7
    assert count(lambda: F.linear(a, b.T, torch.empty(7))).total().flops == 2 * 3 * 5 * 7
    assert count(lambda: a[None] @ b[None].expand(1, 5, 7)).total().executed_flops == 2 * 3 * 5 * 7


def test_linear_forward_and_backward() -> None:
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    g = torch.randn(6, 3)
    counter = count(lambda: torch.autograd.grad(F.linear(x, w), [x, w], g))
    assert [c.name for c in counter.launches] == ["aten.mm"] * 3
    read = (24 + 12) + (18 + 24) + (18 + 12)
    assert counter.total().read_bytes == 4 * read and counter.total().written_bytes == 4 * (18 + 24 + 12)
    assert counter.total().flops == 3 * 2 * 6 * 4 * 3


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_one_launch_each_way(fake: bool, causal: bool) -> None:
    def tensors():
        return [torch.randn(2, heads, n, 8, dtype=BF16, requires_grad=True) for heads, n in ((4, 5), (4, 9), (4, 9))]

    def run():
        q, k, v = given
        out = sdpa(q, k, v, is_causal=causal)
        torch.autograd.grad(out, [q, k, v], torch.empty_like(out))

    if fake:
        with FakeTensorMode():
            given = tensors()
            counter = count(run)
    else:
        given = tensors()
        counter = count(run)
    forward, backward = [c for c in counter.launches if "attention" in c.name]
    assert len(counter.launches) == 2
    q, kv, lse = 2 * 4 * 5 * 8 * 2, 2 * 4 * 9 * 8 * 2, 2 * 4 * 5 * 4
    assert (forward.read_bytes, forward.written_bytes) == (q + 2 * kv, q + lse)
    # q, k, v, out, its gradient, lse in; three gradients out
    assert (backward.read_bytes, backward.written_bytes) == (3 * q + 2 * kv + lse, q + 2 * kv)
    pairs = 1 + 2 + 3 + 4 + 5 if causal else 5 * 9  # aligned top-left
    assert forward.flops == forward.executed_flops == 2 * 4 * pairs * 4 * 8
    assert backward.flops == backward.executed_flops == 5 * forward.flops // 2


def test_sdpa_causal_with_fewer_keys_than_queries() -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)
    forward = count(lambda: sdpa(q, k, k, is_causal=True)).launches[0]
    assert forward.flops == (1 + 2 + 2 + 2) * 4 * 8


def test_in_autograd_saved_and_recomputed_work_counts() -> None:
    """silu: forward x -> y; backward (grad, x) -> grad_x."""
    x = X.clone().requires_grad_()
    g = torch.ones(8, 16)
    counter = count(lambda: torch.autograd.grad(F.silu(x), x, g))
    assert [(c.name, c.read_bytes, c.written_bytes) for c in counter.launches] == [
        ("aten.silu", 512, 512),
        ("aten.silu_backward", 1024, 512),
    ]


def small_layer(device: str = "cpu", mlp: bool = True):
    """Forward and backward; without `mlp` the backward leaves the gated MLP out."""

    def make(*shape):
        return torch.randn(*shape, device=device, dtype=BF16).requires_grad_()

    x, norm = make(2, 6, 32), make(32)
    q, k, v, o = make(32, 32), make(16, 32), make(16, 32), make(32, 32)
    gate, up, down = make(48, 32), make(48, 32), make(32, 48)
    cos = torch.randn(1, 6, 8, device=device, dtype=BF16)

    def run():
        y = rms_norm(x, norm)
        qs, ks, vs = qkv_rope(y, q, k, v, cos, cos, head_dim=16)
        h = linear(attention(qs, ks, vs, causal=True).flatten(2), o, residual=x)
        m = gated_mlp(rms_norm(h, norm), gate, up)
        out = linear(m if mlp else m.detach(), down, residual=h)
        torch.autograd.grad(out, [x, norm, q, down], torch.empty_like(out))

    return run


def test_fused_operators_cost_what_their_specs_say() -> None:
    x, w = torch.empty(4, 8, dtype=BF16), torch.empty(8, dtype=BF16)
    given = (x, w, None, None, "rms", 1e-6, 0.0, True, False, BF16)
    counter = count(lambda: torch.ops.fusedblock.norm(*given))
    (cost,) = COSTS["norm"](*given)
    assert counter.launches == [Cost("fusedblock.norm", cost.read_bytes, cost.written_bytes, cost.flops, cost.executed_flops)]
    assert (cost.read_bytes, cost.written_bytes) == (64 + 16, 64)

    y, m = torch.empty(4, 8, dtype=BF16), torch.empty(6, 8, dtype=BF16)
    counter = count(lambda: linear(y, m, residual=torch.empty(4, 6, dtype=BF16)))
    (cost,) = counter.launches
    assert (cost.name, cost.read_bytes, cost.written_bytes) == ("fusedblock.linear", 64 + 96 + 48, 48)
    assert cost.flops == 2 * 4 * 8 * 6


def test_real_fake_and_meta_agree() -> None:
    with FakeTensorMode():
        fake, part = count(small_layer()).launches, count(small_layer(mlp=False)).launches
    assert fake == count(small_layer("meta")).launches
    assert part == count(small_layer("meta", mlp=False)).launches == count(small_layer(mlp=False)).launches
    assert {f"fusedblock.{op}" for op in ("norm", "qkv_rope", "gated_mlp", "attention")} <= {c.name for c in part}
    assert {f"fusedblock.{op}" for op in ("gated_mlp_backward", "qkv_rope_backward")} <= {c.name for c in fake}


def test_plain_code_real_fake_and_meta_agree() -> None:
    def run(device: str = "cpu"):
        x = torch.randn(4, 8, device=device, dtype=BF16, requires_grad=True)
        w = torch.randn(8, 8, device=device, dtype=BF16)
        h = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16) @ w
        h = torch.cat([h[:, 4:], -h[:, :4]], -1) * h + F.softmax(h, -1, dtype=torch.float32).to(BF16)
        torch.autograd.grad(h, x, torch.empty_like(h))

    real = count(run).launches
    with FakeTensorMode():
        assert count(run).launches == real
    assert count(lambda: run("meta")).launches == real
