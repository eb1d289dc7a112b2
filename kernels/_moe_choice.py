"""What a router does with its logits on the GPU: scores, the choice of top_k experts among them, and their weights."""

from __future__ import annotations

from ._lang import tl, triton
from ._math import sigmoid


@triton.jit
def _mirrored(bits):
    """Bits of a float <-> an integer of the same order; its own inverse."""
    if bits.dtype == tl.int64:
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ordered(x):
    """x as an integer that orders as torch.topk does: NaN above all, -0 equal to 0. The lowest two integers are nobody's."""
    x = tl.where(x == 0.0, 0.0, x)
    if x.dtype == tl.float64:
        return tl.where(x != x, 0x7FFFFFFFFFFFFFFF, _mirrored(x.to(tl.int64, bitcast=True)))
    else:
        return tl.where(x != x, 0x7FFFFFFF, _mirrored(x.to(tl.int32, bitcast=True)))


@triton.jit
def _value(key):
    """The float of an integer of _ordered."""
    if key.dtype == tl.int64:
        return _mirrored(key).to(tl.float64, bitcast=True)
    else:
        return _mirrored(key).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, index):
    """(highest key, lowest index that has it) of each row; index [columns]."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], index[None, :], 1 << 30), 1)


@triton.jit
def _limit_groups(key, groups, topk, SIZE: tl.constexpr, TOP2: tl.constexpr, EP: tl.constexpr, LOWEST: tl.constexpr):
    """key [tokens, EP], next to lowest outside the topk groups of SIZE experts that score highest. The numbers are no constants:
    the loops over them stay loops, where unrolled they take one compiler half a minute."""
    expert = tl.arange(0, EP)
    group = expert // SIZE
    score = key * 0 + LOWEST
    for g in range(groups):
        own = tl.where((group == g)[None, :], key, LOWEST)
        highest, first = _best(own, expert)
        if TOP2:
            second = tl.max(tl.where(expert[None, :] == first[:, None], LOWEST, own), 1)
            highest = _ordered(_value(highest) + _value(second))
        score = tl.where((group == g)[None, :], highest[:, None], score)
    allowed = key != key
    for _ in range(topk):
        _, winner = _best(score, group)
        hit = group[None, :] == winner[:, None]
        allowed = allowed | hit
        score = tl.where(hit, LOWEST, score)
    return tl.where(allowed | (key == LOWEST), key, LOWEST + 1)


@triton.jit
def scores_of(logits, real, SCORING: tl.constexpr):
    """Scores [tokens, EP] of logits; 0 where not `real` (padding, or who was not chosen)."""
    if SCORING == "sigmoid":
        return tl.where(real, sigmoid(logits), 0.0)
    else:
        logits = tl.where(real, logits, float("-inf"))
        e = tl.exp(logits - tl.max(logits, 1)[:, None])
        return e / tl.sum(e, 1)[:, None]


@triton.jit
def choose(
    logits, token, live, bias, correction, weights, indices, logits_out, E, K, numbers,
    SCORING: tl.constexpr, GROUPED: tl.constexpr, SIZE: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr,
    BT: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Finish the logits [BT, EP] of one token tile; numbers: (groups, topk_groups, eps, scale or None).

    Returns [BT, EP]: which of a token's slots an expert has, -1 for none. All that is chosen stays in the layout of the logits,
    and nothing but the sums over experts may go through shared memory."""
    groups, topk_groups, eps, scale = numbers
    ACC: tl.constexpr = logits.dtype
    LOWEST: tl.constexpr = -0x8000000000000000 if ACC == tl.float64 else -0x80000000
    expert = tl.arange(0, EP)
    real = (expert < E)[None, :]
    if bias is not None:
        logits += tl.load(bias + expert, expert < E, other=0.0).to(ACC)[None, :]
    logits = logits.to(logits_out.dtype.element_ty)
    tl.store(logits_out + token[:, None].to(tl.int64) * E + expert[None, :], logits, live[:, None] & real)
    logits = logits.to(ACC)
    scores = logits if SCORING == "softmax_chosen" else scores_of(logits, real, SCORING)
    choice = scores
    if correction is not None:
        choice += tl.load(correction + expert, expert < E, other=0.0).to(ACC)[None, :]
    key = tl.where(real, _ordered(choice), LOWEST)
    if GROUPED:
        key = _limit_groups(key, groups, topk_groups, SIZE, TOP2, EP, LOWEST)
    # Who is chosen has the number of its slot for a key: keys of negative NaN, which no score has, above what is not real.
    TAKEN: tl.constexpr = LOWEST + 2
    first = token.to(tl.int64) * K
    for j in range(K):
        _, e = _best(key, expert)
        key = tl.where(expert[None, :] == e[:, None], tl.cast(j, key.dtype) + TAKEN, key)
        tl.store(indices + first + j, e, live)
    chosen = (key >= TAKEN) & (key < tl.cast(K, key.dtype) + TAKEN)
    slots = tl.where(chosen, key - TAKEN, -1).to(tl.int32)
    weight = scores
    if SCORING == "softmax_chosen":
        weight = scores_of(weight, chosen, SCORING)
    if RENORMALISE:
        total = tl.sum(tl.where(chosen, weight, 0.0), 1) + eps
        weight = weight / tl.where(total == 0.0, 1.0, total)[:, None]
    if scale is not None:
        weight *= scale
    for j in range(K):
        w = tl.sum(tl.where(slots == j, weight, 0.0), 1)
        tl.store(weights + first + j, w.to(weights.dtype.element_ty), live)
    return tl.where(live[:, None], slots, -1)
