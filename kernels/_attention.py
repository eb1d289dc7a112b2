"""What the attention kernels share on the host: axes of the arguments, their checks, work counts, facts for a launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from . import _spec
from ._attention_tiles import LOG2E, MAP_BLOCK, block_lists
from ._lang import cdiv, next_power_of_2, tl
from ._launch import contiguous_last, descriptor, tma_ready
from ._spec import Args, ShapeError, Sizes
from ._target import Target, target_of

# Arguments of the ops in order, and their axes. Packed sequences: batch is 1, seq all tokens. k_batch: batch, or pages.
READS = {
    "q": "batch seq heads head_dim",
    "k": "k_batch k_len kv_heads head_dim",
    "v": "k_batch k_len kv_heads v_dim",
    "mask": "1|batch 1|heads 1|seq k_len",
    "bias": "1|batch 1|heads 1|seq 1|k_len",
    "sinks": "heads",
    "alibi_slopes": "1|sequences heads",
    "block_map": "1|batch 1|heads q_blocks k_blocks",
    "prefix_lens": "batch",
    "cu_seqlens_q": "boundaries",
    "cu_seqlens_k": "boundaries",
    "seqused_k": "sequences",
    "block_table": "sequences max_pages",
    "q_scale": "1|batch heads",
    "k_scale": "1|batch kv_heads",
    "v_scale": "1|batch kv_heads",
    "seed": "one",
}
OPTIONAL = frozenset(READS) - {"q", "k", "v"}
DTYPES = (*_spec.DTYPES, _spec.FP8)
NUMBERS = ("left", "right", "softcap", "scale", "dropout_p", "deterministic")  # the last: gradients of equal bits
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {
    "sinks": "floating", "bias": "floating", "alibi_slopes": torch.float32, "block_map": torch.bool, "q_scale": torch.float32,
    "k_scale": torch.float32, "v_scale": torch.float32, "seed": torch.int64,
    **dict.fromkeys(("prefix_lens", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"), torch.int32),
}  # fmt: skip
# What cannot be given together, and why.
_APART = (
    *((name, "cu_seqlens_q", "it has no place for packed sequences") for name in ("mask", "bias", "block_map", "prefix_lens")),
    *((name, "block_table", "it has no place for paged keys") for name in ("mask", "bias", "block_map")),
    ("cu_seqlens_k", "block_table", "seqused_k gives the lengths of paged sequences"),
    ("cu_seqlens_k", "seqused_k", "either bounds the keys"),
)
# An additive mask at or below this means "not attended": HF writes finfo.min.
MASKED = -2.0e38
UNBOUNDED = 2**30  # a window this wide bounds nothing, and the kernels count in 32 bits
# The kernels have numbers in fp32. From 2**-126 on it holds them in full, and to 2**126 also times log2(e) and inverted.
_LEAST, _MOST = 2.0**-126, 2.0**126
_MOST_SOFTCAP = 2.0**100  # logits over more would underflow where they still count
_ROUNDS_TO_1 = 1 - 2.0**-25


def given(args: Args, *names: str) -> bool:
    return any(args.get(name) is not None for name in names)


def refuse_together(name: str, args: Args) -> None:
    for one, other, why in _APART:
        if args.get(one) is not None and args.get(other) is not None:
            raise ValueError(f"{name}: {one} and {other} are both given; {why}")


def check_target(name: str, q: Tensor, v_dim: int, backward: bool = False) -> None:
    """Raises ValueError for a dtype that the GPU of q has not, and for rows that do not fit its shared memory."""
    width = max(q.shape[-1], v_dim)
    if q.dtype is not _spec.FP8 and (q.dtype is not torch.float32 or width < 512):
        return
    target = target_of(q.device)
    if q.dtype is _spec.FP8:
        if 0 < target.capability < 89:
            raise ValueError(f"{name}: q on {q.device} has dtype {q.dtype}, which {target.name} has not; expected sm_89 or newer")
        return
    least = 192 if backward else 104 if width > 512 else 96  # KB that the smallest tiles take there
    if target.backend == "cuda" and target.smem_bytes < least * 1024:
        what = f"head_dim={q.shape[-1]} and v_dim={v_dim} in {q.dtype} take {least} KB of shared memory"
        what += " in the backward" if backward else ""
        raise ValueError(f"{name}: {what}, but {target.name} (q is on {q.device}) has {target.smem_bytes // 1024}")


def check_widths(name: str, q: Tensor, v: Tensor, step: int = 8) -> None:
    """Raises ValueError for rows that no kernel takes, or none on the GPU of q. step: 1 where they will be padded."""
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    narrow = "1 to 256" if step == 1 else f"a multiple of {step} from {step} to 256"
    if (not step <= head_dim <= 256 or head_dim % step) and head_dim not in (512, 576):
        raise ValueError(f"{name}: head_dim={head_dim} of q and k, expected {narrow}, 512 or 576")
    if (not step <= v_dim <= 256 or v_dim % step) and v_dim != 512:
        raise ValueError(f"{name}: v_dim={v_dim} of v, expected {narrow} or 512")
    check_target(name, q, v_dim)


def check_dropout(name: str, dropout_p: float) -> None:
    if not 0 <= dropout_p < _ROUNDS_TO_1:
        raise ValueError(f"{name}: dropout_p={dropout_p}, expected at least 0 and less than 1, also in fp32")


def _check_scales(name: str, scale: float, softcap: float) -> None:
    if not _LEAST <= scale <= _MOST:
        raise ValueError(f"{name}: scale={scale}, expected a positive number from 2**-126 to 2**126, which fp32 holds")
    if softcap != 0 and not _LEAST <= softcap <= _MOST_SOFTCAP:
        raise ValueError(f"{name}: softcap={softcap}, expected 0 (none) or a number from 2**-126 to 2**100, which fp32 holds")
    if softcap != 0 and scale > softcap * _MOST:
        raise ValueError(f"{name}: scale={scale} is more than 2**126 times softcap={softcap}, and fp32 does not hold the ratio")


def check(name: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """Everything about attention arguments that their axes alone do not say."""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name}: heads={heads} of q is not a multiple of kv_heads={kv_heads} of k and v")
    check_widths(name, args["q"], args["v"])
    _check_scales(name, args["scale"], args["softcap"])
    check_dropout(name, args["dropout_p"])
    if args["dropout_p"] and args["seed"] is None:
        raise ValueError(f"{name}: dropout_p={args['dropout_p']} needs a seed")
    mask = args["mask"]
    if mask is not None and mask.dtype not in (torch.bool, *_FLOATING, args["q"].dtype):
        raise ValueError(f"{name}: mask has dtype {mask.dtype}, expected torch.bool or {', '.join(map(str, _FLOATING))}")
    for side in ("left", "right"):
        if args[side] >= UNBOUNDED:
            raise ValueError(f"{name}: {side}={args[side]}, expected less than {UNBOUNDED}, or -1 for no bound")
    for arg, dtype in _DTYPES.items():
        t = args.get(arg)
        if t is None or t.dtype is dtype or dtype == "floating" and t.dtype in (*_FLOATING, args["q"].dtype):
            continue
        expected = ", ".join(map(str, _FLOATING)) if dtype == "floating" else dtype
        raise ValueError(f"{name}: {arg} has dtype {t.dtype}, expected {expected}")
    refuse_together(name, args)
    return {"group": heads // kv_heads, **_check_sequences(name, sizes, args)}


def _check_sequences(name: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """What bounds the sequences, and that it fits the tensors' shapes."""
    packed, paged = args.get("cu_seqlens_q") is not None, args.get("block_table") is not None
    if args.get("cu_seqlens_k") is not None and not packed:
        raise ValueError(f"{name}: cu_seqlens_k is given and cu_seqlens_q is not")
    if packed and args.get("cu_seqlens_k") is None and not paged:
        raise ValueError(f"{name}: cu_seqlens_q is given; it needs cu_seqlens_k, or block_table and seqused_k")
    if paged and args.get("seqused_k") is None:
        raise ValueError(f"{name}: block_table is given; it needs seqused_k, the length of every sequence")
    if packed and sizes["batch"] != 1:
        raise ShapeError(f"{name}: q has batch={sizes['batch']} with cu_seqlens_q, expected 1")
    if packed and sizes["boundaries"] < 1:
        raise ShapeError(f"{name}: cu_seqlens_q has shape (0,), expected one more than there are sequences")
    if not paged and sizes["k_batch"] != sizes["batch"]:
        raise ShapeError(f"{name}: k has batch={sizes['k_batch']}, but q has batch={sizes['batch']}")
    sequences = sizes["boundaries"] - 1 if packed else sizes["batch"]
    if sizes.get("sequences", sequences) != sequences:
        arg = next(n for n in ("seqused_k", "block_table", "alibi_slopes") if args.get(n) is not None)
        raise ShapeError(f"{name}: {arg} has {sizes['sequences']} sequences, but q has {sequences}")
    if sizes.get("one", 1) != 1:
        raise ShapeError(f"{name}: seed has shape ({sizes['one']},), expected (1,)")
    if args.get("block_map") is not None:
        found = sizes["q_blocks"], sizes["k_blocks"]
        wanted = cdiv(sizes["seq"], MAP_BLOCK), cdiv(sizes["k_len"], MAP_BLOCK)
        if found != wanted:
            what = f"{found[0]} by {found[1]} blocks, but q and k have {wanted[0]} by {wanted[1]}"
            raise ShapeError(f"{name}: block_map has {what}")
    if args.get("prefix_lens") is not None and args["left"] >= 0:
        both = f"prefix_lens and a window of left={args['left']}"
        raise ValueError(f"{name}: {both} are both given; a prefix is seen by every query")
    context = sizes["max_pages"] * sizes["k_len"] if paged else sizes["k_len"]
    return {"context": context, "sequences": sequences}


def normalise_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask in any of the accepted forms as a view "1|batch 1|heads 1|seq context", which is what the kernels take.

    mask: None; bool "1|batch context" (True: the key may be attended, i.e. padding is False); or four axes
    "1|batch 1|heads 1|seq 1|context", bool (True: attend) or floating (added to the scaled logits).
    q "batch seq heads head_dim", k "batch context kv_heads head_dim". Raises ShapeError or ValueError naming the mask.
    """
    if mask is None:
        return None
    batch, seq, heads = q.shape[:3]
    context = k.shape[1]
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ValueError(f"attention: mask has dtype {mask.dtype}, expected torch.bool or a floating dtype")
    if mask.device != q.device:
        raise ValueError(f"attention: mask is on {mask.device}, but q is on {q.device}")
    if mask.ndim == 2:
        if mask.dtype is not torch.bool:
            raise ValueError(f"attention: a mask of two axes (batch context) must be torch.bool, got {mask.dtype}")
        mask = rearrange(mask, "batch context -> batch 1 1 context")
    if mask.ndim != 4:
        raise ShapeError(
            f"attention: mask has shape {tuple(mask.shape)}, expected (batch context) or (1|batch 1|heads 1|seq context)"
        )
    for axis, got, want in zip(("batch", "heads", "seq", "context"), mask.shape, (batch, heads, seq, context)):
        if got != 1 and got != want:  # not `in`, which torch.compile takes wrongly for symbolic sizes
            raise ShapeError(f"attention: mask of shape {tuple(mask.shape)} has {axis}={got}, but q and k have {axis}={want}")
    return mask.expand(-1, -1, -1, context)


def _row_ranges(seq: int, context: int, left: int, right: int, prefix: int) -> tuple[range | list[int], list[int]]:
    """First key and end of the keys of every query of one segment."""
    offset = context - seq
    ends = [context] * seq if right < 0 else [min(context, max(0, p + right + 1, prefix)) for p in range(offset, offset + seq)]
    starts = [0] * seq if left < 0 else [max(0, p - left) for p in range(offset, offset + seq)]
    return starts, ends


def allowed_pairs(seq: int, context: int, left: int, right: int, prefix: int = 0) -> int:
    """(query, key) pairs of one head and segment that windows, aligned bottom-right, leave."""
    if left < 0 and right == 0 and not prefix:
        n = min(seq, context)
        return n * (2 * context - n + 1) // 2
    if left < 0 and right < 0:
        return seq * context
    return sum(max(0, end - start) for start, end in zip(*_row_ranges(seq, context, left, right, prefix)))


def _readable(t: Tensor | None) -> bool:
    """Whether the values can be looked at: neither absent nor faked nor only a shape."""
    return t is not None and not t.is_meta and type(t) is Tensor


def lengths(sizes: Sizes, args: Args) -> list[tuple[int, int]]:
    """(queries, keys) of every sequence; where the values cannot be read, in equal parts."""
    n = sizes["sequences"]
    if args.get("cu_seqlens_q") is None:
        queries = [sizes["seq"]] * n
    else:
        cu = args["cu_seqlens_q"]
        queries = cu.diff().tolist() if _readable(cu) else [sizes["seq"] // max(n, 1)] * n
    bounds, used = args.get("cu_seqlens_k"), args.get("seqused_k")
    if used is not None:
        keys = used.tolist() if _readable(used) else [sizes["context"]] * n
    elif bounds is not None:
        keys = bounds.diff().tolist() if _readable(bounds) else [sizes["k_len"] // max(n, 1)] * n
    else:
        keys = [sizes["context"]] * n
    return list(zip(queries, keys))


def pairs(sizes: Sizes, args: Args) -> int:
    """(query, key) pairs of one head over all sequences that windows, prefixes and the block map leave."""
    left, right, block_map, prefix = args["left"], args["right"], args.get("block_map"), args.get("prefix_lens")
    found = lengths(sizes, args)
    before = prefix.tolist() if prefix is not None and _readable(prefix) else [0] * len(found)
    counts: dict[Any, int] = {}
    total = 0
    for key in zip(found, before):
        if key not in counts:
            counts[key] = allowed_pairs(*key[0], left, right, key[1])
        total += counts[key]
    if block_map is not None and _readable(block_map) and total:
        total = round(total * float(block_map.float().mean()))  # as if the blocks left out were average ones
    return total


def key_bytes(arg: str) -> Any:
    """For a spec: the bytes of keys or values that sequences have, which may be fewer than the tensor's; None: the tensor's."""

    def count(sizes: Sizes, args: Args) -> int | None:
        if not given(args, "seqused_k"):
            return None
        t = args[arg]
        return sum(n for _, n in lengths(sizes, args)) * sizes["kv_heads"] * t.shape[-1] * t.element_size()

    return count


def _strides(t: Tensor | None) -> tuple[Any, ...]:
    """Strides of a mask or bias over batch, heads, rows, keys. Axes of size 1 get stride 0, and rows None where all are alike."""
    if t is None:
        return 0, 0, None, 0
    b, h, s, k = (s if n > 1 else 0 for n, s in zip(t.shape, t.stride()))
    return b, h, s or None, k


def term_box(target: Target, rows: int, keys: int, num_stages: int) -> tuple[int, int] | None:
    """The tile of a mask or bias that TMA loads, None where pointers are better: with one stage TMA would be waited for at once,
    while plain loads are on their way during a product."""
    return (rows, keys) if target.tma and num_stages > 1 else None


def _unexpanded(t: Tensor) -> Tensor:
    """A mask or bias with batch and heads of size 1 where all are alike."""
    b, h, _, _ = _strides(t)
    return t[: None if b else 1, : None if h else 1]


def takes_tma(t: Tensor) -> bool:
    """Whether TMA can load tiles of a mask or bias: it has rows, and they lie as TMA wants them."""
    return _strides(t)[2] is not None and tma_ready(_unexpanded(t))


def _term(t: Tensor | None, box: tuple[int, int] | None) -> tuple[Any, tuple[Any, ...]]:
    """(tensor or descriptor, strides) of a mask or bias as the kernels take them, see _attention_tiles.py.

    Rows of a box are 128 bytes at least: of narrower ones beside wide ones triton 3.6 has made wrong sums (see dims)."""
    strides = _strides(t)
    if t is None or box is None or box[1] * t.element_size() < 128 or not takes_tma(t):
        return t, strides
    return descriptor(_unexpanded(t), [1, 1, *box]), (*(int(s != 0) for s in strides[:2]), 0, None)


def _batch_stride(t: Tensor | None) -> int:
    """The stride over batch of a tensor `1|batch heads`."""
    return 0 if t is None or t.shape[0] == 1 else t.stride(0)


class Facts(NamedTuple):
    """A kernel's arguments for the options: tensors, numbers, strides and constexprs, in the order the kernels take them."""

    tensors: tuple[Any, ...]  # mask, bias, sinks, slopes, counts, lists, prefix, used, block_table, three scales, seed
    numbers: tuple[Any, ...]  # scale (in base-2 units unless ADDED), cap, dropout_p, left, right
    strides: tuple[Any, ...]  # of mask (4), bias (4), slopes, counts (batch, heads), lists (rows), three scales
    constexprs: dict[str, Any]  # RIGHT, ADDED, MASKED, as _attention_tiles has them


def adds(args: Args) -> bool:
    """ADDED of the kernels: whether logits are made in natural units. In fp32 that is for their precision alone; the scales of a
    head may be 0 or negative, which a maximum of unscaled logits would not bear."""
    mask = args.get("mask")
    added = args["softcap"] > 0 or given(args, "bias", "alibi_slopes", "q_scale", "k_scale")
    added = added or mask is not None and mask.dtype is not torch.bool
    return bool(added or args["q"].element_size() > 2)


def launch_facts(args: Args, by_key: bool, box: tuple[int, int] | None = None) -> Facts:
    """by_key: the lists of the block map are of queries, for every block of keys. box: the tiles of mask and bias that TMA may
    load."""
    mask, bias, block_map = (args.get(n) for n in ("mask", "bias", "block_map"))
    slopes, scales = args.get("alibi_slopes"), [args.get(n) for n in ("q_scale", "k_scale", "v_scale")]
    slopes, *scales = (None if t is None else t.contiguous() for t in (slopes, *scales))
    counts = lists = None
    of_lists = (0, 0, 0)
    if block_map is not None:
        counts, lists = block_lists(block_map, by_key)
        b, h, rows = counts.shape
        of_lists = (h * rows * (b > 1), rows * (h > 1), lists.shape[-1])
    left, right, softcap = args["left"], args["right"], args["softcap"]
    masked = mask.view(torch.uint8) if mask is not None and mask.dtype is torch.bool else mask
    (masked, mask_strides), (bias, bias_strides) = _term(masked, box), _term(bias, box)
    added = adds(args)
    rest = [args.get(n) for n in ("prefix_lens", "seqused_k", "block_table")]
    sinks = args.get("sinks")
    return Facts(
        (masked, bias, None if sinks is None else sinks.contiguous(), slopes, counts, lists,
         *(None if t is None else t.contiguous() for t in rest), *scales, args["seed"] if args["dropout_p"] else None),
        (args["scale"] * (1 if added else LOG2E), softcap or None, args["dropout_p"], left if left >= 0 else None,
         max(right, 0)),
        (*mask_strides, *bias_strides, _batch_stride(slopes), *of_lists, *map(_batch_stride, scales)),
        {"RIGHT": 0 if right < 0 else 1 if right == 0 else 2, "ADDED": added, "MASKED": mask is not None},
    )  # fmt: skip


def kind_of(target: Target) -> str:
    """The column of the config tables: by shared memory, since that bounds the tiles."""
    if target.backend == "hip" or target.smem_bytes < 160 * 1024:
        return "small"
    return "hopper" if target.tma else "ampere"


def numerics(args: Args, target: Target) -> dict[str, Any]:
    """Constexprs: accumulator, precision of fp32 products, and the numbers that fp64 kernels need exactly.

    fp32 products on NVIDIA are three TF32 ones, which keep fp32's accuracy on the tensor cores; plain fp32 ones run without
    them, unrolled, and spill kilobytes. A run-time float is fp32 in a kernel: fp64 kernels, which only gradcheck runs (in the
    interpreter), take scale, softcap and the share that dropout keeps as constants instead.
    """
    double = args["q"].dtype is torch.float64
    return {
        "ACC": tl.float64 if double else tl.float32,
        "PRECISION": "tf32x3" if target.backend == "cuda" else "ieee",
        "EXACT": (args["scale"], args["softcap"], 1 - args["dropout_p"]) if double else None,
    }


def dims(head_dim: int, v_dim: int, split: bool = True) -> dict[str, int]:
    """Constexprs: columns of q and k and of v, and the tiles that hold them: DP and a second of D2 (0: none), DVP.

    A head of 192 or 576 takes less room as 128 + 64 or 512 + 64 than as the next power of two (80 as 64 + 16 would spill).
    Two widths in one kernel are 64 columns at least: with unequal rows below 128 bytes (48 beside 16, 24 beside 40), triton 3.6
    gave wrong sums and illegal addresses on an H200.
    """
    dp, dvp = max(16, next_power_of_2(head_dim)), max(16, next_power_of_2(v_dim))
    half, second = dp // 2, max(64, next_power_of_2(head_dim - dp // 2))
    both = split and dp >= 256 and second <= half // 2
    dp = half if both else dp
    if dp != dvp:
        dp, dvp = max(64, dp), max(64, dvp)
    return {"D": head_dim, "DP": dp, "D2": second if both else 0, "DV": v_dim, "DVP": dvp}


def reach(sizes: Sizes, args: Args) -> int:
    """How many keys a query sees at most, as far as the arguments' shapes and numbers tell."""
    window = args["left"] + 1 + args["right"] if args["left"] >= 0 and args["right"] >= 0 else sizes["context"]
    return min(sizes["context"], window)


def section(sizes: Sizes, args: Args, target: Target, by_key: bool = False) -> tuple[int, int]:
    """How many (batch entry, head) pairs go through their tiles together: few, so that L2 keeps what they share; by_key how many
    (batch entry, key head) pairs. And of how many batch entries, see _attention_tiles.entry_of.

    H200, 2026-11-29, causal B4 S4096: 8 heads 1.20 ms, 16 1.21, 32 1.27, 64 1.29, all 1.33."""
    group, n = 1 if by_key else sizes["group"], together(sizes, args)
    pairs = max(1, 8 // group) * group
    if by_key:
        rows = args["q"].element_size() * sizes["seq"] * sizes["group"] * (sizes["head_dim"] + sizes["v_dim"])
        pairs = max(1, min(4, target.l2_bytes // 2 // max(1, rows)))
    return (pairs if n == 1 else max(1, pairs // (n * group)) * n * group), n


def together(sizes: Sizes, args: Args) -> int:
    """How many batch entries share tiles of a mask or bias, 8 at most and a divisor of all; not measured."""
    if not any(t is not None and (s := _strides(t))[2] is not None and s[0] == 0 for t in (args["mask"], args["bias"])):
        return 1
    return max(n for n in range(1, 9) if sizes["batch"] % n == 0)


def dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Copies of tensors whose last axis is not dense, or whose rows lie so far apart that offsets in a tile need 64 bits."""
    return [t.contiguous() if t.stride(1) >= 2**23 else contiguous_last(t) for t in tensors]


def uses_tma(target: Target, *tensors: Tensor) -> bool:
    """fp8 becomes bf16 in registers, so TMA would only lead it through shared memory twice; and with a block map and blocks of as
    many keys as there are columns, triton 3.6 then gave wrong sums on an H200 (pointers, other blocks and bf16 are right)."""
    return target.tma and tensors[0].dtype is not _spec.FP8 and tma_ready(*tensors)


def row_strides(t: Tensor, tma: bool) -> tuple[int, int, int]:
    """Strides over batch, rows, heads; zeros beside a descriptor, which holds them (so that they make no new variant)."""
    return (0, 0, 0) if tma else tuple(t.stride()[:3])  # type: ignore[return-value]


def by_head(t: Tensor) -> Tensor:
    return rearrange(t, "batch rows heads head_dim -> batch heads rows head_dim")
