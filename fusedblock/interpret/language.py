"""triton.language and kernels as Python sees them while a launch runs.

Kernels see what the compiler shows them: loop variables and assigned numbers are tensors, `and`, `or`, `not`, min and max
act on tensors, a block has no truth value.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from ..kernels._lang import tl
from . import quick
from .builder import Reduce, Scan, builder, scalar, semantic, wide


def _range(start: Any, stop: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """range and tl.range: the loop variable is a tensor, as in a compiled loop. Hints (num_stages, flatten, ...) do nothing."""
    if stop is None:
        start, stop = 0, start
    bounds = [semantic.to_tensor(b) for b in (start, stop, 1 if step is None else step)]
    dtype = tl.int64 if any(b.dtype.primitive_bitwidth == 64 for b in bounds) else tl.int32
    for i in range(*(int(b.handle.data.item()) for b in bounds)):
        yield scalar(i, dtype)


def _builtin_or_tl(name: str) -> Callable[..., Any]:
    """Python's min or max on numbers, tl.minimum or tl.maximum on tensors."""
    builtin, of_tensors = (min, "minimum") if name == "min" else (max, "maximum")

    def apply(*args: Any) -> Any:
        if any(isinstance(a, tl.tensor) for a in args):
            return functools.reduce(getattr(tl, of_tensors), args)
        return builtin(*args)

    return apply


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A libdevice function out of a numpy one: the result has the type of its largest argument, beside which a number is one."""

    def apply(*args: Any, **_: Any) -> Any:
        tensors = [semantic.to_tensor(a) for a in args]
        result = np.asarray(function(*(t.handle.data for t in tensors)))
        largest = max(tensors, key=lambda t: t.handle.data.size)  # the first of equals
        return tl.tensor(TensorHandle(result.astype(largest.handle.data.dtype), largest.dtype), largest.type)

    return apply


def _erf(x: np.ndarray) -> np.ndarray:
    return torch.special.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy().reshape(x.shape)


_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power, "sin": np.sin, "cos": np.cos, "erf": _erf,
    "rint": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "div_rn": np.divide,
    "fast_expf": np.exp, "fast_dividef": np.divide, "fast_logf": np.log,
}  # fmt: skip


class _Recorder:
    """Stands for triton's patch scope, but only writes down what would be set."""

    def __init__(self) -> None:
        self.changes: list[tuple[Any, str, Any]] = []

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        self.changes.append((owner, name, value))


@functools.cache
def language() -> list[tuple[Any, str, Any]]:
    """Every attribute of triton.language that a launch replaces. Made once: making it is slow, applying it is not."""
    # Triton imports these on first use, and they keep the functions of tl that they find: let them find the real ones.
    import triton.compiler.code_generator
    import triton.experimental.gluon  # noqa: F401
    from triton.language.extra import cuda, libdevice

    recorder = _Recorder()

    def interpreted(member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("_semantic", None)
            return member(*args, **kwargs, _semantic=semantic)

        return call

    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                recorder.set_attr(owner, name, interpreted(member))
    stock._patch_lang_core(tl, recorder)
    stock._patch_lang_core(tl.core, recorder)

    def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
        return Reduce(axis, combine_fn, keep_dims).apply(input)

    def scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
        return Scan(axis, combine_fn, reverse).apply(input)

    for owner in (tl, tl.core):
        recorder.set_attr(owner, "range", _range)
        recorder.set_attr(owner, "reduce", reduce)
        recorder.set_attr(owner, "associative_scan", scan)
    recorder.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    # Triton's own code asks blocks `if other` for `if other is not None`; kernels' conditions go through _condition.
    recorder.set_attr(tl.tensor, "__bool__", lambda self: bool(self.handle.data) if self.handle.data.size == 1 else True)
    recorder.set_attr(tl.tensor, "__repr__", lambda self: repr(wide(self.handle)))
    recorder.set_attr(tl.tensor, "T", property(lambda self: tl.trans(self)))
    recorder.set_attr(tl.condition, "__bool__", lambda self: bool(self.condition))  # while loops
    for name, function in _LIBDEVICE.items():
        if hasattr(libdevice, name):
            recorder.set_attr(libdevice, name, _elementwise(function))
    for name in ("gdc_wait", "gdc_launch_dependents"):  # programs run one after the other: nothing to wait for
        if hasattr(cuda, name):
            recorder.set_attr(cuda, name, lambda *args, **kwargs: None)
    return [*recorder.changes, *quick.changes()]


# ---- kernels as Python functions ---------------------------------------------------------------------------------------


def assigned(value: Any) -> Any:
    """The right-hand side of an assignment: numbers become tensors, as the compiler makes them."""
    if type(value) is float:
        return scalar(value, builder.float_type)
    return semantic.to_tensor(value, False)


def _and(value: Any, *others: Callable[[], Any]) -> Any:
    for other in others:
        if isinstance(value, tl.tensor):
            value = value.logical_and(other())
        elif value:
            value = other()
    return value


def _or(value: Any, *others: Callable[[], Any]) -> Any:
    for other in others:
        if isinstance(value, tl.tensor):
            value = value.logical_or(other())
        elif not value:
            value = other()
    return value


def _not(value: Any) -> Any:
    return value == 0 if isinstance(value, tl.tensor) else not value


def _condition(value: Any) -> Any:
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(f"a block of shape {value.handle.data.shape} has no truth value; use &, | or tl.where")
    return value


class Rewriter(ast.NodeTransformer):
    """Where Python and the Triton compiler read the same source differently, call a helper that reads it as the compiler."""

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def _call(helper: str, *args: ast.expr) -> ast.Call:
        return ast.Call(func=ast.Name(id=helper, ctx=ast.Load()), args=list(args), keywords=[])

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._call("_interpreted_assigned", node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        later = [ast.Lambda(args=nothing, body=value) for value in node.values[1:]]
        return self._call("_interpreted_and" if isinstance(node.op, ast.And) else "_interpreted_or", node.values[0], *later)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("_interpreted_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_If(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = self._call("_interpreted_condition", node.test)
        return node

    visit_While = visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1:
            raise SyntaxError(f"{self.name}: a chained comparison, which triton before 3.9 does not compile")
        return node


_HELPERS: dict[str, Any] = {
    "_interpreted_assigned": assigned, "_interpreted_condition": _condition,
    "_interpreted_and": _and, "_interpreted_or": _or, "_interpreted_not": _not,
    "range": _range, "min": _builtin_or_tl("min"), "max": _builtin_or_tl("max"),
}  # fmt: skip

# Keyed by id: hashing a JITFunction computes its cache key, which must not happen while the language is replaced.
_functions: dict[int, tuple[JITFunction, Callable[..., Any]]] = {}


def python_function(kernel: JITFunction) -> Callable[..., Any]:
    """kernel as a Python function."""
    found = _functions.get(id(kernel))
    if found is None:
        found = _functions[id(kernel)] = kernel, compiled_from_source(kernel, Rewriter, {})
    return found[1]


def compiled_from_source(kernel: JITFunction, rewriter: type[Rewriter], names: dict[str, Any]) -> Callable[..., Any]:
    """kernel's source after rewriter. Its module's globals are read live and not written; helpers, names, closure are cells."""
    fn = kernel.fn
    lines, first_line = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    ast.increment_lineno(node, first_line - 1)
    node.decorator_list = []
    node.args.defaults = []
    node.args.kw_defaults = [None] * len(node.args.kwonlyargs)
    for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        parameter.annotation = None
    node.returns = None
    node = ast.fix_missing_locations(rewriter(fn.__qualname__).visit(node))

    closure = inspect.getclosurevars(fn).nonlocals
    # A module that defines its own `min` means that one.
    cells = {**{name: helper for name, helper in _HELPERS.items() if name not in fn.__globals__}, **closure, **names}
    outer = ast.parse(f"def _outer({', '.join(cells)}):\n    pass")
    outer.body[0].body = [node, ast.Return(value=ast.Name(id=node.name, ctx=ast.Load()))]  # type: ignore[attr-defined]
    scope: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(outer), fn.__code__.co_filename, "exec"), fn.__globals__, scope)
    function: types.FunctionType = scope["_outer"](**cells)
    function.__defaults__, function.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
    return function
