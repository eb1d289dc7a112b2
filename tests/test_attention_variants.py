"""Every option of attention alone, every pair of options, and the edges, against the float64 formula of attention_cases.py."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    FP8,
    TINY,
    Case,
    alone,
    at_target,
    by_op,
    check,
    error,
    exact,
    head_dims,
    pairs,
    public,
    results,
    sizes,
    with_gradients,
)
from attention_formula import formula
from torch import Tensor

import fusedblock
from fusedblock.interpret import interpret
from fusedblock.kernels._attention_choice import DECODE_ROWS, choose
from fusedblock.kernels._target import TARGETS

PATHS = ("sm_90", "sm_80")
BF16 = torch.bfloat16


def cases(values: list[Case], slow: Callable[[int, Case], bool] = lambda n, case: False):
    """Parametrised by case; those that `slow` says run by `make test-all` only."""
    given = [pytest.param(c, id=f"{n}-{c}", marks=[pytest.mark.slow] * slow(n, c)) for n, c in enumerate(values)]
    return pytest.mark.parametrize("case", given)


# ---- options, alone and in pairs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@cases(pairs(dtype=torch.float64, **TINY))
def test_references_of_pairs(case):
    check(case, "cpu")


@cases([*alone(dtype=BF16), *alone(dtype=torch.float16), *head_dims(), *head_dims(torch.float32), *sizes()])
def test_references(case):
    check(case, "cpu")


@pytest.mark.parametrize("target, dtype", [("sm_90", torch.float32), ("sm_80", BF16)])
@cases(alone(**TINY))
def test_alone(case, target, dtype):
    check(case if case.dtype is FP8 else replace(case, dtype=dtype), target)


# One of several in the quick run, on the two targets in turn; a block map needs blocks of 128.
WALK = [(n, c, t) for n, c in enumerate(pairs(every=False, **TINY)) for t in PATHS]
QUICK = {(n, PATHS[n // 6 % 2]) for n, case, _ in WALK if n % 6 == 0 and not case.block_map}


@pytest.mark.parametrize(
    "case, target", [pytest.param(c, t, id=f"{n}-{c}-{t}", marks=[pytest.mark.slow] * ((n, t) not in QUICK)) for n, c, t in WALK]
)
def test_pairs(case, target):
    check(case, target)


# Without gradients: few queries split the keys (decode_attention), and the tiles of the op attention take the same arguments.
FEW = [replace(c, forward=True) for c in alone(**TINY | {"seq": 3, "lengths": ((1, 9), (1, 0), (1, 17), (1, 1))})]
FORWARD = [c for c in pairs(every=False, **TINY) if c.forward_only]


@pytest.mark.parametrize("target", PATHS)
@cases([c for c in FEW if not c.block_map])
def test_few_queries(case, target):
    check(case, target)


@cases(FORWARD, slow=lambda n, case: n % 6 != 0)
def test_tiles_without_gradients(case):
    check(case, "sm_90", by_op())


@pytest.mark.parametrize("target", PATHS)
@cases([*sizes(dtype=torch.float16), *head_dims(torch.float16)], slow=lambda n, case: n % 4 != 3 or case.head_dim > 256)
def test_sizes(case, target):
    check(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", PATHS)
@cases(alone(seq=140, context=300, kv_heads=1, heads=2, batch=1, dtype=torch.float16,
             lengths=((130, 70), (0, 5), (1, 1), (33, 200), (140, 140))))  # fmt: skip
def test_alone_over_several_tiles(case, target):
    check(case, target)


# ---- inputs ------------------------------------------------------------------------------------------------------------------


def head_major(t: Tensor) -> Tensor:
    return t.transpose(-3, -2).contiguous().transpose(-3, -2) if t.dim() >= 3 else t


def last_major(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(t: Tensor) -> Tensor:
    wide = t.new_zeros(*t.shape[:-1], t.shape[-1] + 3)
    wide[..., 1:-2] = t
    return wide[..., 1:-2]


@pytest.mark.parametrize("layout", [head_major, last_major, sliced])
@cases([Case(**TINY, **more) for more in (
    {"layout": "packed", "sinks": True}, {"layout": "paged"}, {"bias": "full", "alibi": "batch"},
    {"mask": "bool", "prefix": True, "causal": True}, {"seqused": True, "bias": "row"},
)])  # fmt: skip
def test_strides(case, layout):
    x = case.inputs()
    assert not layout(x.q).is_contiguous() and torch.equal(layout(x.grad), x.grad)
    check(case, "sm_90", layout=layout)


def test_expanded_inputs():
    """One key head for all by stride 0, one bias and mask for all, a gradient that is one number."""
    case = Case(**TINY, bias="both", sinks=True)
    x = case.inputs()
    x.k, x.v = (t[:1].expand(t.shape) for t in (x.k, x.v))
    x.options["bias"] = x.options["bias"].expand(2, 2, -1, -1)
    x.grad = torch.tensor(0.5).expand(x.grad.shape)
    whole = x.changed(lambda t: t.contiguous())
    with at_target("sm_90"):
        got, want = with_gradients(public, x), with_gradients(public, whole)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("target", ["cpu", *PATHS])
@cases([Case(batch=0), Case(seq=0), Case(context=0), Case(context=0, sinks=True), Case(layout="packed", lengths=()),
        Case(layout="packed", lengths=((0, 0), (0, 4), (3, 0), (1, 1))), Case(layout="paged", seqused=True, context=0),
        Case(batch=0, layout="paged"), Case(layout="packed-paged", lengths=((1, 0), (2, 40)), page=32)])  # fmt: skip
def test_empty_and_one(case, target):
    got, want = results(case, target), exact(case)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-6, msg=f"{name} of {case}")


@pytest.mark.parametrize("target", PATHS)
def test_tokens_past_the_last_boundary(target):
    case = Case(**TINY, layout="packed", causal=True)
    got, (queries, keys) = results(case, target), (sum(n[i] for n in case.lengths) for i in range(2))
    assert (got["out"][queries:] == 0).all() and (got["lse"][:, queries:] == -math.inf).all()
    assert (got["grad_q"][queries:] == 0).all() and len(got["grad_q"]) == queries + 3
    assert all((got[n][keys:] == 0).all() and len(got[n]) == keys + 5 for n in ("grad_k", "grad_v"))


@pytest.mark.parametrize("target", ["cpu", *PATHS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_near_the_end_of_fp16(dtype, target):
    """Every logit of about -6e4 that counts: weights are of their differences."""
    x = Case(seq=64, context=96, heads=2, kv_heads=1, dtype=dtype, bias="full").inputs()
    spread = 1 if dtype is torch.float32 else 32
    x.options["bias"] = (x.options["bias"] * spread - 6e4).to(dtype)
    with at_target(target):
        got = with_gradients(public, x)
    want = with_gradients(formula, x.changed(lambda t: t.double() if t.is_floating_point() else t))
    plain = with_gradients(formula, x.changed(lambda t: t.float() if t.is_floating_point() else t))
    assert want["lse"].max() < -5e4
    for name, value in want.items():
        # Plain torch keeps the weights; a backward makes them again, and lse is rounded as coarsely as the logits are.
        most = (2 if name.startswith("grad") else 1.1) * error(plain[name], value)
        assert error(got[name], value) < most + (dtype is torch.float16) * torch.finfo(dtype).eps, name


# ---- lengths that make no sense ----------------------------------------------------------------------------------------------

IMPOSSIBLE = {
    "cu_seqlens_q decreases": ("packed", "cu_seqlens_q", [0, 5, 4, 6, 18, 26, 29]),
    "cu_seqlens_q passes the tokens": ("packed", "cu_seqlens_q", [0, 5, 5, 6, 18, 26, 5000]),
    "cu_seqlens_q begins late": ("packed", "cu_seqlens_q", [1, 5, 5, 6, 18, 26, 29]),
    "cu_seqlens_k decreases": ("packed", "cu_seqlens_k", [0, 9, 12, 11, 25, 27, 27]),
    "cu_seqlens_k passes the tokens": ("packed", "cu_seqlens_k", [0, 9, 12, 13, 25, 27, 10**6]),
    "seqused_k is negative": ("batched", "seqused_k", [35, -1]),
    "seqused_k passes the keys": ("batched", "seqused_k", [36, 3]),
    "seqused_k passes the pages": ("paged", "seqused_k", [10**6, 3]),
    "prefix_lens is negative": ("batched", "prefix_lens", [3, -1]),
}


def impossible(name: str):
    layout, arg, values = IMPOSSIBLE[name]
    case = Case(**TINY, layout=layout, seqused=arg == "seqused_k", prefix=arg == "prefix_lens", causal=arg == "prefix_lens")
    return arg, case.inputs().with_(**{arg: torch.tensor(values, dtype=torch.int32)})


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_lengths_are_refused_where_they_are_read(name):
    arg, x = impossible(name)
    with pytest.raises(ValueError, match=arg):
        public(x)
    with at_target("sm_90"), fusedblock.options(debug=True), pytest.raises(ValueError, match=arg):
        public(x)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_lengths_give_nan(name, target):
    arg, x = impossible(name)
    with at_target(target):
        got = with_gradients(public, x)
    packed = arg.startswith("cu_seqlens")
    broken = slice(None) if packed else 1 if name.endswith("negative") else 0
    assert got["out"][broken].isnan().all()
    if not packed:
        assert got["out"][1 - broken].isfinite().all()
    for grad in ("grad_q", "grad_k", "grad_v") if "grad_q" in got else ():
        assert got[grad][broken].isnan().all(), grad


@pytest.mark.parametrize("longest", [{"max_seqlen_q": 11}, {"max_seqlen_k": 11}])
def test_longest_sequences(longest):
    x = Case(**TINY, layout="packed").inputs()
    ((name, value),) = longest.items()
    keywords = {**x.keywords(), **longest}
    with pytest.raises(ValueError, match=f"{name}={value}.*12"):
        fusedblock.attention(x.q, x.k, x.v, **keywords)
    with at_target("sm_90"):
        fusedblock.attention(x.q, x.k, x.v, **keywords)
        with fusedblock.options(debug=True), pytest.raises(ValueError, match=f"{name}={value}.*12"):
            fusedblock.attention(x.q, x.k, x.v, **keywords)


def test_debug_judges_what_is_read():
    for case in (Case(**TINY, layout="packed"), Case(**TINY, layout="paged"), Case(**TINY, seqused=True)):
        with fusedblock.options(debug=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of rows that may attend to nothing
            public(case.inputs())  # NaN where nobody reads
    x = Case(**TINY, sinks=True).inputs()
    x.options["sinks"][1] = math.nan
    with fusedblock.options(debug=True), pytest.raises(FloatingPointError, match="sinks"):
        public(x)


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BATCHED, PACKED, PAGED = Case(**TINY), Case(**TINY, layout="packed"), Case(**TINY, layout="paged")
MASK, BIAS, MAP = torch.ones(2, 35, dtype=torch.bool), torch.zeros(1, 1, 1, 35), torch.ones(1, 1, 1, 1, dtype=torch.bool)
REFUSED = {
    "mask, packed": (PACKED, {"mask": MASK}, "mask and cu_seqlens_q"),
    "bias, packed": (PACKED, {"bias": BIAS}, "bias and cu_seqlens_q"),
    "block_map, packed": (PACKED, {"block_map": MAP}, "block_map and cu_seqlens_q"),
    "prefix_lens, packed": (PACKED, {"prefix_lens": ints(1)}, "prefix_lens and cu_seqlens_q"),
    "seqused_k, packed": (PACKED, {"seqused_k": ints(1)}, "cu_seqlens_k and seqused_k"),
    "slopes by sequence, packed": (PACKED, {"alibi_slopes": torch.ones(5, 2)}, "alibi_slopes has 5 sequences, but q has 6"),
    "mask, paged": (PAGED, {"mask": MASK}, "mask and block_table"),
    "bias, paged": (PAGED, {"bias": BIAS}, "bias and block_table"),
    "block_map, paged": (PAGED, {"block_map": MAP}, "block_map and block_table"),
    "no seqused_k, paged": (PAGED, {"seqused_k": None}, "needs seqused_k"),
    "no cu_seqlens_k": (PACKED, {"cu_seqlens_k": None}, "needs cu_seqlens_k"),
    "no cu_seqlens_q": (PACKED, {"cu_seqlens_q": None}, r"q has shape \(32, 2, 16\).*not given"),
    "cu_seqlens_q, batched": (BATCHED, {"cu_seqlens_q": ints(0, 1)}, r"q has shape \(2, 20, 2, 16\).*given"),
    "cu_seqlens_k, batched": (BATCHED, {"cu_seqlens_k": ints(0, 1)}, "cu_seqlens_q is not"),
    "max_seqlen_q, batched": (BATCHED, {"max_seqlen_q": 20}, "max_seqlen_q=20"),
    "max_seqlen_k below 0": (PACKED, {"max_seqlen_k": -1}, "max_seqlen_k=-1"),
    "boundaries of other numbers": (PACKED, {"cu_seqlens_k": ints(0, 1)}, "boundaries=2.*boundaries=7"),
    "int64 boundaries": (PACKED, {"cu_seqlens_q": ints(*[0] * 7).long()}, "cu_seqlens_q has dtype torch.int64.*int32"),
    "seqused_k of other batch": (BATCHED, {"seqused_k": ints(1, 2, 3)}, "seqused_k has 3 sequences.*2"),
    "prefix and left": (BATCHED, {"prefix_lens": ints(1, 2), "window": (4, 0)}, "prefix_lens and a window of left=4"),
    "window of one": (BATCHED, {"window": (4,)}, r"window=\(4,\)"),
    "window below -1": (BATCHED, {"window": (-2, 0)}, r"window=\(-2, 0\)"),
    "float64 mask": (BATCHED, {"mask": torch.zeros(1, 1, 20, 35).double()}, "mask has dtype torch.float64.*torch.bool"),
    "softcap": (BATCHED, {"softcap": -1.0}, "softcap=-1.0"),
    "scale": (BATCHED, {"scale": 0.0}, "scale=0.0"),
    "sinks of other heads": (BATCHED, {"sinks": torch.zeros(3)}, "sinks.*heads=3.*heads=2"),
    "int sinks": (BATCHED, {"sinks": torch.zeros(2, dtype=torch.int32)}, "sinks has dtype torch.int32"),
    "half slopes": (BATCHED, {"alibi_slopes": torch.zeros(2).half()}, "alibi_slopes has dtype torch.float16.*float32"),
    "bias of other keys": (BATCHED, {"bias": torch.zeros(1, 1, 20, 34)}, "bias.*k_len=34.*k_len=35"),
    "block_map of other blocks": (BATCHED, {"block_map": MAP.expand(1, 1, 2, 1)}, "block_map has 2 by 1.*1 by 1"),
    "float block_map": (BATCHED, {"block_map": torch.ones(1, 1, 1, 1)}, "block_map has dtype torch.float32.*bool"),
    "scales of fp8": (BATCHED, {"k_scale": torch.ones(2, 3)}, "k_scale.*kv_heads=3.*kv_heads=1"),
    **{f"dropout {p}": (BATCHED, {"dropout_p": p}, f"dropout_p={p}") for p in (-0.1, 1.0, math.nan)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    case, more, message = REFUSED[name]
    x = replace(case, forward=True).inputs()
    with pytest.raises(ValueError, match=message), torch.no_grad():
        fusedblock.attention(x.q, x.k, x.v, **{**x.keywords(), **more})


@pytest.mark.parametrize("head_dim, v_dim", [(4, 16), (20, 16), (264, 16), (16, 20), (16, 576), (1024, 16)])
def test_refused_head_dims(head_dim, v_dim):
    x = Case(head_dim=head_dim, v_dim=v_dim, forward=True).inputs()
    wrong = f"v_dim={v_dim} of v" if v_dim != 16 else f"head_dim={head_dim} of q"
    with pytest.raises(ValueError, match=wrong), torch.no_grad():
        public(x)


NO_GRADIENTS = {
    "block_table": (PAGED, {}, "block_table"),
    **{f"{n}_scale": (BATCHED, {f"{n}_scale": torch.ones(1, 2 if n == "q" else 1)}, f"{n}_scale") for n in "qkv"},
    "wide values": (replace(BATCHED, head_dim=16, v_dim=512), {}, "head_dim=16 and v_dim=512"),
    "mask": (BATCHED, {"mask": torch.zeros(1, 1, 20, 35, requires_grad=True)}, "mask requires a gradient"),
    "slopes": (BATCHED, {"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes requires a gradient"),
}


@pytest.mark.parametrize("name", NO_GRADIENTS)
def test_refused_with_gradients(name):
    case, more, message = NO_GRADIENTS[name]
    x = case.inputs()
    with pytest.raises(ValueError, match=message):
        fusedblock.attention(x.q.requires_grad_(), x.k, x.v, **{**x.keywords(), **more})
    if name not in ("mask", "slopes"):
        fusedblock.attention(x.q.detach(), x.k, x.v, **{**x.keywords(), **more})


# ---- dropout -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_that_dropout_keeps(p):
    """Values of one, so that out is the share of the weight that is kept, scaled to mean one."""
    q, v = torch.zeros(2, 64, 4, 16), torch.ones(2, 200, 4, 16)
    torch.manual_seed(1)
    out = fusedblock.attention(q, v, v, dropout_p=p)
    spread = (p / (1 - p) / (2 * 64 * 4 * 200)) ** 0.5
    assert abs(float(out[..., 0].mean()) - 1) < 4 * spread
    assert (out == out[..., :1]).all() and out[..., 0].unique().numel() > 20


def test_dropout_follows_torchs_generator():
    x = Case(**TINY).inputs()
    run = lambda: fusedblock.attention(x.q, x.k, x.v, dropout_p=0.5)
    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert torch.equal(run(), first) and not torch.equal(first, second)


def test_deterministic_is_accepted():
    x = Case(**TINY).inputs()
    assert torch.equal(*(fusedblock.attention(x.q, x.k, x.v, deterministic=d) for d in (False, True)))


# ---- registration ------------------------------------------------------------------------------------------------------------

REGISTERED = [Case(**TINY | {"seq": 4}, **more) for more in (
    {"layout": "packed", "dropout": 0.2, "softcap": 2.0}, {"layout": "paged"}, {"layout": "packed-paged"}, {"dtype": FP8},
    {"bias": "row", "sinks": True, "alibi": "batch", "mask": "padding"}, {"block_map": "heads", "prefix": True, "seqused": True},
)]  # fmt: skip


@cases(REGISTERED)
def test_opcheck(case):
    args = [t.requires_grad_() if n < 6 and not case.forward_only and t is not None and t.is_floating_point() else t
            for n, t in enumerate(case.inputs().op_args())]  # fmt: skip
    skipped = {"test_schema"} if case.dtype is FP8 else set()  # which multiplies copies of the inputs: torch cannot in fp8
    tests = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"} - skipped
    torch.library.opcheck(torch.ops.fusedblock.attention.default, tuple(args), test_utils=tuple(sorted(tests)))


@pytest.mark.parametrize("dynamic", [False, True])
@cases(REGISTERED)
def test_compiled(case, dynamic):
    x = case.inputs()
    keywords = x.keywords()

    def run(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return fusedblock.attention(q, k, v, **{**keywords, **options}, return_lse=True)

    torch._dynamo.reset()
    torch.manual_seed(0)
    want = run(x.q, x.k, x.v, x.options)
    torch.manual_seed(0)
    got = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x.q, x.k, x.v, x.options)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


# ---- the choice --------------------------------------------------------------------------------------------------------------


def chosen(**facts: object) -> str:
    return choose(**{"seq": 1, "group": 4, "target": TARGETS["sm_90"], **facts}).op


def test_choice():
    assert chosen() == chosen(seq=DECODE_ROWS // 4) == "decode_attention"
    assert chosen(seq=DECODE_ROWS // 4 + 1) == "attention"
    for fact in ("training", "packed", "block_map", "dropout"):
        assert chosen(**{fact: True}) == "attention"
    assert chosen(packed=True, one_each=True, seq=500) == "decode_attention"
    assert chosen(target=replace(TARGETS["sm_90"], batch_invariant=True)) == "attention"
    assert choose(seq=1, group=1, target=TARGETS["sm_90"], dtype=torch.float64).engine == "torch"


def test_explain_names_the_op_that_runs():
    for case in (*REGISTERED, Case(**TINY), Case(**TINY | {"seq": 3}, forward=True), Case(**TINY | {"seq": 3})):
        x = case.inputs()
        choice = fusedblock.explain_attention(x.q, x.k, x.v, **x.keywords())
        with torch.profiler.profile() as profile:
            public(x)
        launched = [e.name.split("::")[1] for e in profile.events() if e.name.startswith("fusedblock::")]
        assert launched == [choice.op] and choice.op in str(choice) and choice.why and choice.changes
    q, k = torch.empty(1, 100, 4, 64, device="meta"), torch.empty(1, 4000, 1, 64, device="meta")
    assert not fusedblock.explain_attention(q, k, k).splits and fusedblock.explain_attention(q[:, :16], k, k).splits


@pytest.mark.parametrize("target", ["cpu", *PATHS])
@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 0), (0, 0, 0, 0)])
def test_one_packed_query_each_is_a_batch(queries, target):
    """As many tokens as sequences, at most one query each: split keys; a token past the last boundary gives 0."""
    case = Case(**TINY | {"lengths": tuple(zip(queries, (9, 0, 17, 30)))}, layout="packed-paged", sinks=True)
    x = case.inputs()
    x.q = torch.cat((x.q, x.q[:1]))[: len(queries)]
    keywords = {**x.keywords(), "max_seqlen_q": 1}
    assert fusedblock.explain_attention(x.q, x.k, x.v, **keywords).splits
    with at_target(target):
        out, lse = fusedblock.attention(x.q, x.k, x.v, **keywords, return_lse=True)
    want, n = exact(case), sum(queries)
    torch.testing.assert_close(out[:n].double(), want["out"][:n], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:, :n].double(), want["lse"][:, :n], rtol=1e-5, atol=1e-6)
    assert (out[n:] == 0).all()


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("seq, context", [(20, 35), (35, 20)])
@pytest.mark.parametrize("window", [(5, 2**31 - 1), (2**31 - 1, 3), (2**40, 2**40)])
def test_a_window_of_the_largest_number_is_none(window, seq, context, target):
    """The kernels count in 32 bits."""
    x = Case(seq=seq, context=context, forward=True).inputs()
    sides = tuple(n if n < 2**30 else -1 for n in window)
    with interpret(TARGETS[target]), torch.no_grad():
        got = fusedblock.attention(x.q, x.k, x.v, window=window, return_lse=True)
        want = fusedblock.attention(x.q, x.k, x.v, window=sides, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and bool(got[0].any())


@pytest.mark.parametrize("softcap", [1e4, 1e6, 1e9])
@pytest.mark.parametrize("seq", [3, 40])
def test_a_large_softcap_changes_nothing(seq, softcap):
    x = Case(seq=seq, context=70, forward=True).inputs()
    with interpret(TARGETS["sm_90"]), torch.no_grad():
        got = fusedblock.attention(x.q, x.k, x.v, softcap=softcap)
        want = fusedblock.attention(x.q, x.k, x.v)
    assert error(got, want.double()) < 1e-6


def test_a_refused_call_does_not_move_the_generator():
    x = Case(forward=True).inputs()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="sinks"), torch.no_grad():
        fusedblock.attention(x.q, x.k, x.v, dropout_p=0.3, sinks=torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change, message", [
    ({"seqused_k": ints(1, 2)}, "block_table.*sequences=3, but sequences=2"),
    ({"cu_seqlens_q": ints(0, 1, 1, 2, 3)}, "has 3 sequences, but q has 4"),
    ({"cu_seqlens_q": ints(0, 1, 2, 3).long()}, "cu_seqlens_q has dtype torch.int64"),
])  # fmt: skip
def test_one_query_each_is_checked_where_kernels_run(change, message):
    q, k = torch.randn(3, 2, 16), torch.randn(6, 8, 1, 16)
    table = ints(0, 1, 2, 3, 4, 5).view(3, 2)
    options = {"cu_seqlens_q": ints(0, 1, 2, 3), "seqused_k": ints(3, 9, 1), "block_table": table, **change}
    with interpret(TARGETS["sm_90"]), torch.no_grad(), pytest.raises(ValueError, match=message):
        fusedblock.attention(q, k, k, max_seqlen_q=1, **options)
