"""Arguments of the attention functions that are no such thing: an error that names function, argument and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import aot
import numpy as np
import pytest
import torch
from attention_cases import TINY, Case, at_target
from torch import Tensor

import fusedblock
from fusedblock import attention, explain_attention, flash_attn_func, flash_attn_varlen_func, ops
from fusedblock.kernels import _attention as shared
from fusedblock.kernels import attention as attention_op
from fusedblock.kernels import attention_backward, decode_attention
from fusedblock.kernels._target import TARGETS

BATCHED, PACKED = Case(**TINY, forward=True), Case(**TINY, layout="packed", forward=True)
PAGED = Case(**TINY, layout="packed-paged", forward=True)
TENSORS = ("sinks", "alibi_slopes", "bias", "mask", "block_map", "prefix_lens", "block_table", "cu_seqlens_q", "cu_seqlens_k",
           "seqused_k", "q_scale", "k_scale", "v_scale")  # fmt: skip
NUMBER, WHOLE, SWITCH, PAIR = "a number", "a whole number", "True or False", r"\(left, right\) or None"
OF_NO_AXES = r"a tensor of shape \(\)"
# (value, how a message shows it) of what is never right, by what is expected.
WRONG: dict[str, list[tuple[Any, str]]] = {
    "a tensor": [(None, r"None \(NoneType\)"), ([1.0, 2.0], r"\[1.0, 2.0\] \(list\)"), (np.zeros(2), r"array.*\(ndarray\)"),
                 (3, r"3 \(int\)")],
    "a tensor or None": [([[True]], r"\[\[True\]\] \(list\)"), (0.5, r"0.5 \(float\)"), (True, r"True \(bool\)")],
    SWITCH: [(None, r"None \(NoneType\)"), ("yes", r"'yes' \(str\)"), (1, r"1 \(int\)"), (torch.tensor(True), OF_NO_AXES)],
    PAIR: [(3, r"3 \(int\)"), (2.5, r"2.5 \(float\)"), (torch.tensor(3), OF_NO_AXES)],
    NUMBER: [(None, r"None \(NoneType\)"), ("0.5", r"'0.5' \(str\)"), (torch.tensor(0.5), OF_NO_AXES), (1j, r"1j \(complex\)"),
             (False, r"False \(bool\)"), (np.True_, r".*True_? \(bool_?\)")],
    f"{NUMBER} or None": [("auto", r"'auto' \(str\)"), (torch.tensor(0.5), OF_NO_AXES), ([0.5], r"\[0.5\] \(list\)"),
                          (True, r"True \(bool\)")],
    WHOLE: [(None, r"None \(NoneType\)")],
    f"{WHOLE} or None": [(12.0, r"12.0 \(float\)"), ("12", r"'12' \(str\)"), (torch.tensor(12.0), OF_NO_AXES),
                         (torch.tensor([12, 12]), r"a tensor of shape \(2,\)"), (True, r"True \(bool\)"),
                         (torch.tensor(True), OF_NO_AXES)],
}  # fmt: skip
EXPECTED = {
    **dict.fromkeys("qkv", "a tensor"), **dict.fromkeys(TENSORS, "a tensor or None"), "causal": SWITCH, "window": PAIR,
    "softcap": NUMBER, "dropout_p": NUMBER, "scale": f"{NUMBER} or None", "max_seqlen_q": f"{WHOLE} or None",
    "max_seqlen_k": f"{WHOLE} or None",
}  # fmt: skip
RENAMED = {"window": "window_size", "scale": "softmax_scale"}
FLASH = ("q", "k", "v", "causal", "window", "softcap", "alibi_slopes", "dropout_p", "scale")
OF_FLASH = {RENAMED.get(name, name): EXPECTED[name] for name in FLASH}
VARLEN = {**OF_FLASH, "block_table": "a tensor or None", **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "a tensor"),
          **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), WHOLE)}  # fmt: skip
FUNCTIONS: dict[Callable[..., Any], dict[str, str]] = {
    attention: EXPECTED, explain_attention: EXPECTED, flash_attn_func: OF_FLASH, flash_attn_varlen_func: VARLEN
}  # fmt: skip


def right(function: Callable[..., Any], case: Case | None = None) -> dict[str, Any]:
    """Arguments of a call that goes through."""
    x = (case or (PACKED if function is flash_attn_varlen_func else BATCHED)).inputs()
    if function in (attention, explain_attention):
        return {"q": x.q, "k": x.k, "v": x.v, **x.keywords()}
    if function is flash_attn_func:
        return {"q": x.q, "k": x.k, "v": x.v}
    used = x.options.get("seqused_k")
    keys = x.options["cu_seqlens_k"] if used is None else torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    return {"q": x.q, "k": x.k, "v": x.v, "cu_seqlens_q": x.options["cu_seqlens_q"], "cu_seqlens_k": keys, "max_seqlen_q": 12,
            "max_seqlen_k": 12, "block_table": x.options.get("block_table")}  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_wrong_types(function, target):
    name = "attention" if function is explain_attention else function.__name__
    with at_target(target):
        function(**right(function))
        for arg, expected in FUNCTIONS[function].items():
            for value, shown in WRONG[expected] + (WRONG[f"{WHOLE} or None"] if expected == WHOLE else []):
                with pytest.raises(TypeError, match=f"^{name}: {arg} is {shown}.*, expected {expected}$"):
                    function(**{**right(function), arg: value})


@pytest.mark.parametrize("function, arg", [(attention, "window"), (flash_attn_func, "window_size")])
@pytest.mark.parametrize("window", [(4.0, 0), (4, 0, 0), (), ("a", "b"), [4], (4, -2), (None, 2.5), (torch.tensor(1.5), 0),
                                    (True, False), (4, True), torch.tensor([True, False]), (np.True_, 0)])  # fmt: skip
def test_wrong_windows(function, arg, window):
    with pytest.raises(ValueError, match=rf"^{function.__name__}: {arg}=.*, expected \(left, right\), each a whole number"):
        function(**{**right(function), arg: window})


def test_explain_knows_the_arguments_of_attention():
    with pytest.raises(TypeError, match="^explain_attention: attention has no argument sliding, windows$"):
        explain_attention(**right(attention), windows=3, sliding=4)


def test_what_is_as_good_as_the_type():
    given = {**right(attention, PACKED), "softcap": 2.0, "scale": 0.5, "window": (5, 3), "dropout_p": 0}
    want = attention(**given)
    alike = {
        "softcap": (2, np.float32(2), np.int64(2)), "scale": (np.float32(0.5), np.float64(0.5)), "dropout_p": (0.0, np.half(0)),
        "window": ([5, 3], np.array([5, 3]), torch.tensor([5, 3]), (np.int32(5), torch.tensor(3))),
        "max_seqlen_q": (np.int64(12), torch.tensor(12), None), "max_seqlen_k": (np.int32(12), torch.tensor([12]), 40),
    }  # fmt: skip
    for name, values in alike.items():
        for value in values:
            assert torch.equal(attention(**{**given, name: value}), want), name


# Of an argument and its values, what a message expects. They are checked as Python has them and used in fp32.
RATIO = r"scale=1e\+20 is more than 2\*\*126 times softcap=1e-30"
NOT_IN_FP32: list[tuple[str, float, str]] = [
    *(("scale", n, "expected a positive number") for n in (1e39, 3e38, 1e-50, 1e-38, 0.0, -1e-50, -0.5)),
    *(("scale", n, "expected a positive number") for n in (math.inf, math.nan, 10**400, Fraction(10**400))),
    *(("softcap", n, r"expected 0 \(none\) or a number") for n in (1e39, 1e38, 1e-50, 1e-38, -1e-50, -2.0)),
    *(("softcap", n, r"expected 0 \(none\) or a number") for n in (math.inf, math.nan, 10**400, -(10**5000))),
    *(("dropout_p", n, "expected at least 0 and less than 1") for n in (1.0, 0.99999999, 1 - 2**-25, -1e-50, 10**5000, math.nan)),
]  # fmt: skip


def shown(value: float) -> str:
    """As an error has it: a whole number that no float holds is infinite."""
    try:
        return str(float(value))
    except OverflowError:
        return "inf" if value > 0 else "-inf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seq", [1, 12])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_numbers_that_fp32_does_not_hold(target, seq, dtype):
    """For fp64 too, and where split keys or flash-attn's names are taken."""
    x = Case(**TINY | {"seq": seq, "dtype": dtype}, forward=True).inputs()
    with at_target(target):
        for function in (attention, explain_attention, flash_attn_func):
            name = "attention" if function is explain_attention else function.__name__
            for arg, value, expected in NOT_IN_FP32:
                arg = "softmax_scale" if function is flash_attn_func and arg == "scale" else arg
                with pytest.raises(ValueError, match=f"^{name}: {arg}={re.escape(shown(value))}, {expected}"):
                    function(x.q, x.k, x.v, **{arg: value})
        with pytest.raises(ValueError, match=f"^attention: {RATIO}"):
            attention(x.q, x.k, x.v, scale=1e20, softcap=1e-30)


@pytest.mark.parametrize("target", ["cpu", "sm_90", "hopper"])
@pytest.mark.parametrize("numbers", [
    {"scale": 2.0**126}, {"scale": 2.0**-126}, {"softcap": 2.0**100}, {"softcap": 2.0**-126}, {"softcap": 1e-30, "scale": 1e6},
    {"dropout_p": 1 - 2.0**-24}, {"dropout_p": 1e-50},
], ids=str)  # fmt: skip
def test_the_last_numbers_that_fp32_holds(numbers, target):
    """Logits of 0 stay 0, where a number that overflowed would make them NaN: every key has the same weight."""
    x = Case(40, 70, heads=2, kv_heads=1, batch=1, head_dim=64, dtype=torch.bfloat16, forward=True).inputs()
    with at_target(target):
        out, lse = attention(torch.zeros_like(x.q), x.k, x.v, **numbers, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(70)), rtol=1e-5, atol=0)
    if numbers.get("dropout_p", 0) < 0.5:
        mean = x.v.double().mean(1, keepdim=True).expand(-1, 40, 2, -1)
        torch.testing.assert_close(out.double(), mean, rtol=0.01, atol=0.003)
    else:
        assert not out.any()


# ---- shapes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("function, case", [
    (attention, BATCHED), (attention, PACKED), (attention, PAGED), (flash_attn_func, BATCHED), (flash_attn_varlen_func, PACKED),
    (flash_attn_varlen_func, PAGED),
])  # fmt: skip
def test_any_wrong_number_of_axes(function, case, target):
    """Every tensor with every other number of axes; a mask may have 2 or 4, slopes 1 or 2."""
    good = right(function, case)
    few = {"mask": (2, 4), "alibi_slopes": (1, 2), "bias": (4,), "block_map": (4,), "block_table": (2,),
           **dict.fromkeys(("q_scale", "k_scale", "v_scale"), (2,))}  # fmt: skip
    tensors = [n for n in FUNCTIONS[function] if n in ("q", "k", "v", *TENSORS)]
    for arg in tensors:
        axes = (good[arg].dim(),) if isinstance(good.get(arg), Tensor) else few.get(arg, (1,))
        for n in {*range(6)} - {*axes}:
            for size in (0, 1):
                value = torch.zeros([size] * n, dtype=good[arg].dtype if isinstance(good.get(arg), Tensor) else torch.float32)
                for longest in (12, 1) if function is attention and case is PAGED else (None,):
                    changed = {**good, arg: value, **({} if longest is None else {"max_seqlen_q": longest})}
                    with at_target(target), pytest.raises(ValueError, match=rf"^{function.__name__}: .*\b{arg}\b"):
                        function(**changed)


def test_no_columns_and_nested_tensors():
    q = torch.zeros(1, 2, 2, 0)
    for function in (attention, flash_attn_func):
        with pytest.raises(ValueError, match=f"^{function.__name__}: head_dim=0 of q and k, expected (a multiple of 8|1 to 256)"):
            function(q, q, q)
        nested = torch.nested.nested_tensor([torch.zeros(n, 2, 16) for n in (2, 3)], layout=torch.jagged)
        with pytest.raises(ValueError, match=f"^{function.__name__}: q is a nested tensor.*cu_seqlens_q"):
            function(nested, nested, nested)


@pytest.mark.parametrize("arg, side", [("max_seqlen_q", 0), ("max_seqlen_k", 1)])
def test_dropped_probabilities_of_longer_sequences(arg, side):
    """They are read where kernels run, too: the matrix has no place for more."""
    given = {**right(flash_attn_varlen_func), "dropout_p": 0.3, "return_attn_probs": True}
    with at_target("sm_90"):
        flash_attn_varlen_func(**given)
        with pytest.raises(ValueError, match=f"^flash_attn_varlen_func: {arg}=11, but the longest sequence has 12$"):
            flash_attn_varlen_func(**{**given, arg: 11})


# ---- which function it was ---------------------------------------------------------------------------------------------------

HEADS = {"k": torch.zeros(2, 35, 3, 16), "v": torch.zeros(2, 35, 3, 16)}
FOUND_BY_OPS = {
    "heads": (attention, BATCHED, HEADS, "heads=2 of q is not a multiple of kv_heads=3"),
    "split keys": (attention, Case(**TINY | {"seq": 1}, forward=True), HEADS, "heads=2 of q is not a multiple of kv_heads=3"),
    "softcap": (attention, Case(**TINY | {"seq": 1}, forward=True), {"softcap": -1.0}, "softcap=-1.0, expected 0"),
    "flash": (flash_attn_func, BATCHED, HEADS, "heads=2 of q is not a multiple of kv_heads=3"),
    "flash scale": (flash_attn_func, BATCHED, {"softmax_scale": -1.0}, "softmax_scale=-1.0, expected a positive"),
    "flash slopes": (flash_attn_func, BATCHED, {"alibi_slopes": torch.ones(3)}, "alibi_slopes .* has heads=3, but heads=2"),
    "varlen": (flash_attn_varlen_func, PACKED, {"softmax_scale": 0.0}, "softmax_scale=0.0, expected a positive"),
    "varlen bounds": (flash_attn_varlen_func, PACKED, {"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, "boundaries=2"),
    "varlen pages": (flash_attn_varlen_func, PAGED, {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)},
                     "sequences=6, but sequences=2|cu_seqlens_k has 2 sequences"),
    "varlen type": (flash_attn_varlen_func, PAGED, {"cu_seqlens_k": torch.zeros(7)}, "cu_seqlens_k has dtype torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("name", FOUND_BY_OPS)
def test_errors_of_ops_name_the_function(name, target):
    function, case, more, message = FOUND_BY_OPS[name]
    good = right(function, case)
    with at_target(target):
        function(**good)
        with pytest.raises(ValueError, match=f"^{function.__name__}: .*({message})") as raised:
            function(**{**good, **more})
    if name == "heads":  # the op's own traceback is kept
        assert any(frame.name == "check" for frame in raised.traceback)


def test_debug_and_forward_mode_name_the_function():
    x = Case(**TINY | {"seq": 1}, forward=True).inputs()
    with fusedblock.options(debug=True), pytest.raises(FloatingPointError, match="^flash_attn_func: k has 1 of"):
        flash_attn_func(x.q, x.k.index_put((torch.tensor(0),) * 4, torch.tensor(torch.nan)), x.v)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^attention: .*forward-mode"):
        attention(torch.autograd.forward_ad.make_dual(x.q, x.q), x.k, x.v)


# ---- what a GPU cannot -------------------------------------------------------------------------------------------------------


def wide(dtype: torch.dtype, head_dim: int, v_dim: int, seq: int = 70) -> dict[str, Tensor]:
    """Inputs without values."""
    shapes = {"q": (1, seq, 4, head_dim), "k": (1, 200, 2, head_dim), "v": (1, 200, 2, v_dim)}
    return {n: torch.empty(shape, dtype=dtype, device="meta") for n, shape in shapes.items()}


@pytest.mark.parametrize("function", [attention, flash_attn_func, explain_attention], ids=lambda f: f.__name__)
@pytest.mark.parametrize("target", TARGETS)
def test_fp8_needs_a_gpu_that_has_it(target, function):
    for seq in (1, 70):
        given = wide(torch.float8_e4m3fn, 64, 64, seq)
        with aot.compile_only(TARGETS[target]):
            if target in ("sm_80", "sm_86"):
                name = "attention" if function is explain_attention else function.__name__
                with pytest.raises(ValueError, match=f"^{name}: q on meta has dtype torch.float8_e4m3fn, which {target} has not"):
                    function(**given)
            else:
                function(**given)


# fp32 rows wider than 256 whose smallest tiles do not fit: (targets, head_dim, v_dim, backward).
TOO_WIDE = {("sm_86", 576, 512, False), ("sm_89", 576, 512, False), ("sm_86", 576, 128, False), ("sm_89", 576, 128, False),
            ("sm_80", 512, 512, True), ("sm_86", 512, 512, True), ("sm_89", 512, 512, True)}  # fmt: skip
WIDE = [(t, d, v, backward) for t in TARGETS for d, v in ((576, 512), (576, 128), (512, 512), (128, 512))
        for backward in (False, True) if d == v or not backward]  # fmt: skip


@pytest.mark.parametrize("target, head_dim, v_dim, backward", WIDE)
def test_wide_rows_are_refused_where_they_do_not_fit(target, head_dim, v_dim, backward):
    for dtype in (torch.float32, torch.bfloat16):
        given = wide(dtype, head_dim, v_dim)
        given["q"].requires_grad_(backward)
        with aot.compile_only(TARGETS[target]):
            if dtype is torch.float32 and (target, head_dim, v_dim, backward) in TOO_WIDE:
                message = f"^attention: head_dim={head_dim} and v_dim={v_dim} in torch.float32 take .*{target} .*meta"
                with pytest.raises(ValueError, match=message):
                    attention(**given)
            else:
                attention(**given)


@pytest.mark.slow
@pytest.mark.parametrize("target, head_dim, v_dim, backward", [w for w in WIDE if w[2] == 512 <= w[1] and w[0] != "sm_89"])
def test_what_is_refused_does_not_fit_and_what_is_not_does(target, head_dim, v_dim, backward, monkeypatch):
    """Every kernel of the forward and, asked for, of the backward, as the compiler lays it out."""
    monkeypatch.setattr(shared, "check_target", lambda *args, **kwargs: None)
    for seq in (4, 70):  # few queries split their keys
        given = wide(torch.float32, head_dim, v_dim, seq)
        args = dict(zip(attention_op.NAMES, ops.attention_args(**given, right=0, scale=0.1)))
        with aot.compile_only(TARGETS[target]) as kernels:
            if backward:
                out, lse = given["q"], torch.empty(1, 4, seq, device="meta")
                known = {**args, "grad_out": out, "out": out, "lse": lse, **{f"need_{n}": n in "qkv" for n in args}}
                attention_backward.launch(*(known[n] for n in attention_backward.NAMES))
            else:
                (decode_attention if seq == 4 else attention_op).launch(*args.values())
        fits = all(kernel.metadata.shared <= TARGETS[target].smem_bytes for kernel in kernels)
        assert fits == ((target, head_dim, v_dim, backward) not in TOO_WIDE)


# ---- compiled ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_lengths_of_the_graph(dynamic):
    """Longest lengths and a window that are sizes of tensors, symbolic where those are."""
    given = right(attention, PACKED)
    bounds = {n: given[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}

    def run(q: Tensor, k: Tensor, v: Tensor, bounds: dict[str, Tensor]) -> Tensor:
        window = (q.shape[0] // 4, v.shape[0] // 2)
        causal = q.shape[0] > 500
        return attention(q, k, v, **bounds, window=window, causal=causal, max_seqlen_q=q.shape[0], max_seqlen_k=k.shape[0])

    def flash(q: Tensor, k: Tensor, v: Tensor, bounds: dict[str, Tensor]) -> Tensor:
        return flash_attn_varlen_func(q, k, v, *bounds.values(), q.shape[0], k.shape[0], softmax_scale=0.3, window_size=(9, -1))

    for function in (run, flash):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for more in (0, 2):  # further tokens that no sequence has
            q, k, v = (torch.nn.functional.pad(given[n], (0, 0, 0, 0, 0, more)) for n in "qkv")
            assert torch.equal(compiled(q, k, v, bounds), function(q, k, v, bounds))


@pytest.mark.parametrize("case", [PACKED, PAGED], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_longest_lengths_from_tensors(dynamic, case):
    """Which torch.compile does not know: those of a call, made in it, or waited for in it."""
    given = right(flash_attn_varlen_func, case)
    tensors = [given[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table")]

    def run(q, k, v, cu_q, cu_k, table, longest):
        made = cu_k.diff().max()
        out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest, made, block_table=table)
        return out + flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest.item(), int(made), block_table=table)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for longest in (torch.tensor(12, dtype=torch.int32), torch.tensor([12])):
        torch.testing.assert_close(compiled(*tensors, longest), run(*tensors, longest), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_compiled_dropped_probabilities_of_any_length():
    def run(q, k, v):
        return flash_attn_func(q, k, v, 0.3, causal=True, return_attn_probs=True)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq in (12, 17):
        x = Case(**TINY | {"seq": seq}, forward=True).inputs()
        found = []
        for function in (compiled, run):
            torch.manual_seed(5)
            found.append(function(x.q, x.k, x.v))
        for got, want in zip(*found):
            torch.testing.assert_close(got, want)
        assert (found[0][2] < 0).any()


def test_compiled_errors_say_what_is_wrong():
    x = BATCHED.inputs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: attention(q, q, q, softcap=-1.0), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="attention: softcap=-1.0, expected 0"):
        compiled(x.q)
