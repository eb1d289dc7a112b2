"""How an operator is registered: the only module that touches torch.library.

From an `Op` of kernels/: schema from the launcher's signature, fake kernel and costs from the spec, autograd from the names of
its backward op's parameters. On a GPU an op launches its kernels; elsewhere it computes its plain-torch reference; inside
`fusedblock.interpret.interpret()` the kernels run on the CPU.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from fusedblock import debug
from fusedblock.kernels._launch import replays, runs_kernels
from fusedblock.kernels._replay import Fixed, replayed
from fusedblock.kernels._spec import Cost, Op
from fusedblock.kernels._target import override, target_of
from fusedblock.options import current, under

_LIBRARY = torch.library.Library("fusedblock", "DEF")
OPS: dict[str, Op] = {}
# Op name -> its launches and their costs for given arguments; holds the composite ops of blocks/ too.
COSTS: dict[str, Callable[..., tuple[Cost, ...]]] = {}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)
    return signature.replace(parameters=[p.replace(annotation=hints[n]) for n, p in signature.parameters.items()])


def _schema(signature: inspect.Signature, results: int) -> str:
    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(return_annotation=Tensor)  # type: ignore[attr-defined]
    arguments = torch.library.infer_schema(prototype, mutates_args=()).rpartition(" -> ")[0]
    return f"{arguments} -> " + ("Tensor" if results == 1 else "(" + ", ".join(["Tensor"] * results) + ")")


def define(name: str, signature: inspect.Signature, results: int, run: Callable[..., Any], fake: Callable[..., Any],
           costs: Callable[..., tuple[Cost, ...]]) -> Any:  # fmt: skip
    """Register fusedblock::name. run and fake return a tensor, or a tuple where results > 1; costs takes the same arguments."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:  # torch would drop the tangents without a word
            raise NotImplementedError(f"{name}: fusedblock operators have no forward-mode derivative")
        return run(*args, **kwargs)

    _LIBRARY.define(name + _schema(signature, results))
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedblock::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.fusedblock, name)
    register_flop_formula(packet, get_raw=True)(
        lambda *args, out_val=None, **kwargs: sum(cost.flops for cost in costs(*args, **kwargs))
    )
    COSTS[name] = costs
    return packet.default


def register(op: Op) -> Any:
    spec, signature = op.spec, _signature(op.launch)
    names, results = list(signature.parameters), list(spec.writes)
    single = len(results) == 1

    def bound(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args)), **kwargs}

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        out = _watched(op, first, bound(args, kwargs)) if debug.watching(first) else _computed(op, first, args, kwargs)
        return out[0] if single else out

    def fake(*args: Any, **kwargs: Any) -> Any:
        out = spec.empty(bound(args, kwargs))
        return out[0] if single else out

    default = define(spec.name, signature, len(results), run, fake, lambda *a, **k: spec.costs(bound(a, k)))
    OPS[spec.name] = op
    if op.backward is not None:
        _autograd(op, names, results, register(op.backward))
        refuse_gradients(op.backward.spec.name, f"{spec.name}: no double backward (create_graph=True)")
    return default


def refuse_gradients(name: str, why: str) -> None:
    """Differentiating fusedblock::name raises: without this, torch gives zeros and warns once."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(why)

    torch.library.register_autograd(f"fusedblock::{name}", refuse, lib=_LIBRARY)


def _autograd(op: Op, names: list[str], results: list[str], backward: Any) -> None:
    """Wire autograd by names: what the backward takes is saved, what it returns goes to the inputs of those names."""
    assert op.backward is not None
    takes, gives = list(_signature(op.backward.launch).parameters), list(op.backward.spec.writes)
    optional = op.backward.spec.optional
    differentiable = [r for r in results if f"grad_{r}" in takes]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else output
        made = dict(zip(results, outputs))
        known = {**dict(zip(names, inputs)), **made}
        for name in op.no_grad:
            if known[name] is not None:
                raise ValueError(f"{op.spec.name}: {name} is given, but gradients are wanted and there is no backward for it")
        for name, needed in zip(names, ctx.needs_input_grad):
            if needed and f"grad_{name}" not in gives and name not in op.passthrough:
                raise ValueError(f"{op.spec.name}: {name} requires a gradient, and the op has none for it")
        ctx.mark_non_differentiable(*(made[r] for r in results if r not in differentiable))
        ctx.set_materialize_grads(False)  # else autograd fills a zero gradient for every result that has none
        ctx.like = [(made[r].shape, made[r].dtype, made[r].device) for r in differentiable]
        known.update({r: None for r, write in op.spec.writes.items() if not write.when(known)})  # to the backward: absent
        ctx.options = current()  # a backward may run in a thread of autograd's own
        absent = {r for r, w in op.spec.writes.items() if not w.when(known)}
        kept = {n: None if n in absent else known[n] for n in takes if n in known}
        ctx.tensors = [n for n, v in kept.items() if isinstance(v, Tensor)]
        ctx.others = {n: v for n, v in kept.items() if not isinstance(v, Tensor)}
        ctx.save_for_backward(*(kept[n] for n in ctx.tensors))

    def run_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        need = dict(zip(names, ctx.needs_input_grad))
        given = dict(zip(results, grads))
        for r, (shape, dtype, device) in zip(differentiable, ctx.like):
            if given[r] is None and f"grad_{r}" not in optional:
                given[r] = torch.zeros(shape, dtype=dtype, device=device)
        known = {**dict(zip(ctx.tensors, ctx.saved_tensors)), **ctx.others}
        known.update({f"grad_{r}": g for r, g in given.items()})
        known.update({f"need_{n}": wanted for n, wanted in need.items()})
        made: dict[str, Any] = {}
        if any(need[g.removeprefix("grad_")] for g in gives):
            with under(ctx.options):
                out = backward(*(known[n] for n in takes))
            made = dict(zip(gives, (out,) if isinstance(out, Tensor) else out))
        for name, grad in op.passthrough.items():
            made[f"grad_{name}"] = known[grad]
        return tuple(made.get(f"grad_{n}") if need[n] else None for n in names)

    torch.library.register_autograd(f"fusedblock::{op.spec.name}", run_backward, setup_context=setup_context, lib=_LIBRARY)


def dispatched(name: str, *args: Any) -> tuple[Any, ...]:
    """The results of a registered op through the dispatcher, where autograd sees it."""
    out = getattr(torch.ops.fusedblock, name).default(*args)
    return (out,) if isinstance(out, Tensor) else out


def direct(name: str, *args: Any) -> tuple[Tensor, ...]:
    """The results of an op without the dispatcher: kernels or reference, as run does."""
    op = OPS[name]
    return _watched(op, args[0], _bound(op, args)) if debug.watching(args[0]) else _computed(op, args[0], args, {})


def _computed(op: Op, first: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    if runs_kernels(first):
        return op.launch(*args, **kwargs)
    op.spec.axes({**_bound(op, args), **kwargs})
    with torch.autocast(first.device.type, enabled=False):  # kernels compute in the dtype they are given
        return op.reference(*args, **kwargs)


def _watched(op: Op, first: Tensor, args: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The same between the checks of the debug option."""
    debug.check_inputs(op.spec, args, op.spec.axes(args))
    out = _computed(op, first, (), args)
    debug.check_results(op.spec, out)
    return out


def _bound(op: Op, args: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(inspect.signature(op.launch).parameters, args))


def empty(name: str, *args: Any) -> tuple[Tensor, ...]:
    """An op's results, not computed."""
    return OPS[name].spec.empty(_bound(OPS[name], args))


def _shape_only(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _seen() -> bool:
    """Whether anything would see an operator on its way through the dispatcher: a trace, a mode, a profiler, a transform."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _plain(args: Sequence[Any]) -> bool:
    """No tensor subclasses, and nothing that autograd would have to see."""
    grad = torch.is_grad_enabled()
    return all(type(a) in (Tensor, torch.nn.Parameter) and not (grad and a.requires_grad) for a in args if isinstance(a, Tensor))


class Composite:
    """A registered composition: called, it is the operator `op`; `straight` leaves the dispatcher out where nobody looks."""

    def __init__(self, name: str, op: Any, compose: Callable[..., Any]) -> None:
        self.name, self.op, self._compose = name, op, compose

    def __call__(self, *args: Any) -> Any:
        return self.op(*args)

    def straight(self, given: tuple[Any, ...], fixed: Fixed) -> Any:
        """given: the arguments of this call, a tensor first; fixed: the rest, none of which may want gradients."""
        return self.replay(given, fixed) if self.unseen(given, fixed) else self.op(*given, *fixed.args)

    def unseen(self, given: tuple[Any, ...], fixed: Fixed) -> bool:
        """Whether these are plain tensors on a GPU, and nothing looks on."""
        return replays(given[0]) and not _seen() and not debug.watching(given[0]) and fixed.plain and _plain(given)

    def replay(self, given: tuple[Any, ...], fixed: Fixed) -> Any:
        """What the operator computes, without it; where `unseen` says so."""
        return replayed(self.name, lambda: self._compose(direct, *given, *fixed.args), given, fixed)


def define_composite(name: str, parameters: list[tuple[str, Any]], results: int, compose: Callable[..., Any],
                     facts: Callable[[tuple[Any, ...]], Any], given: int) -> Composite:  # fmt: skip
    """Register fusedblock::name, a composition of ops for calls without gradients; parameters are (name, type).

    compose(call, *args) makes every step by call(op name, *op args): run, faked or costed by what `call` is. Its launches are
    replayed for arguments of a layout seen before. The first `given` parameters are a call's own, a tensor first; facts(the
    others) is what else the choices depend on.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(n, kind, annotation=t) for n, t in parameters])

    def run(*args: Any) -> Any:
        if debug.watching(next(a for a in args if isinstance(a, Tensor))):
            return compose(direct, *args)
        return replayed(name, lambda: compose(direct, *args), args[:given], Fixed(args[given:], facts))

    def fake(*args: Any) -> Any:
        return compose(empty, *args)

    def costs(*args: Any) -> tuple[Cost, ...]:
        found: list[Cost] = []

        def record(op_name: str, *op_args: Any) -> tuple[Tensor, ...]:
            bound = _bound(OPS[op_name], op_args)
            found.extend(OPS[op_name].spec.costs(bound))
            return OPS[op_name].spec.empty(bound)

        device = next(a.device for a in args if isinstance(a, Tensor))
        # Shapes only: on the meta device, whatever mode is counting or faking around this call.
        with _disable_current_modes(), override(target_of(device)):
            compose(record, *[_shape_only(a) if isinstance(a, Tensor) else a for a in args])
        return tuple(found)

    return Composite(name, define(name, signature, results, run, fake, costs), compose)
