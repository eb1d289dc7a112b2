"""The Hopper products of the experts on an H200: the bits of the portable kernels, again and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_moe_hopper import BF16, FP16, TAILS, Case, activated, by_expert
from torch import Tensor

from fusedblock.kernels import _hopper_check, _moe, _moe_hopper, _moe_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]
MANY = tuple(250 + 3 * i for i in range(32))  # some with tails, of all lengths
CASES = [
    Case(TAILS, 136, 72), Case((0, 130, 0, 192, 0, 2), 64, 200, FP16, activation=_moe.CLAMPED, bias=True), Case((2,), 8, 8),
    Case(MANY, 2048, 768), Case(MANY, 1000, 1208, FP16, bias=True, activation="relu2"), Case((1000, 24), 4096, 4096, top_k=1),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def tested() -> None:
    assert _hopper_check.ready(torch.device("cuda"), "experts"), _hopper_check.state(torch.device("cuda"))


def products(args: dict[str, Any], sizes: dict[str, int], a: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """h, gate_up, and a by the experts' matrices: rows that nobody writes are 7."""
    rows, n, k = len(args["order"]), sizes["ffn"], sizes["hidden"]
    h, saved, y = (torch.full((rows, width), 7.0, dtype=a.dtype, device="cuda") for width in (n, 2 * n, k))
    _moe_products.gate_up_launch(args, sizes, h, saved)
    _moe_products.rows_launch("down", a, w, args["down_bias"], y, args, sizes, False)
    return h, saved, y


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{len(c.counts)}-experts-{c.hidden}x{c.ffn}")
def test_the_bits_of_the_portable_kernels(case: Case, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    args = {n: t.cuda() if isinstance(t, Tensor) else t for n, t in case.make().items()}
    sizes = {**case.sizes(args), "tile_rows": 128, "rows": len(args["order"]), "experts": len(case.counts)}
    args.update(transposed=False, interleaved=False, down_bias=None)
    a = torch.randn(len(args["order"]), case.ffn, device="cuda").to(case.dtype)
    w = (torch.randn(len(case.counts), case.hidden, case.ffn, device="cuda") * case.ffn**-0.5).to(case.dtype)
    found = [products(args, sizes, a, w) for _ in range(10)]
    assert set(launched) == {"_moe_hopper"}
    monkeypatch.setattr(_moe_hopper, "fits", lambda *_: False)
    expected = products(args, sizes, a, w)
    for results in found:
        assert all(torch.equal(x, y) for x, y in zip(results, found[0]))
    token = args["order"].long() // case.top_k
    exact = by_expert(args["x"][token], args["gate_up_weight"], args["gate_up_bias"], case.counts)
    values = activated(*exact.chunk(2, 1), case.activation), exact, by_expert(a, w, None, case.counts)
    unit = 2.0**-8 if case.dtype is BF16 else 2.0**-11
    for name, x, y, z in zip(("h", "gate_up", "y"), found[0], expected, values):
        assert ((x.double() - z).abs() <= 2 * unit * z.abs() + 1e-4).all(), name
        some = (2 * unit, 1e-6) if name == "h" else (0.0, 0.0)  # the compiler may contract the activation in another way
        torch.testing.assert_close(x, y, rtol=some[0], atol=some[1])
