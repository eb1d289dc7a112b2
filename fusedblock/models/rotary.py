"""Rotary tables out of a config: the frequencies of transformers, bit for bit, without transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .block_config import ROPE_KEYS, BlockConfig


def frequencies(config: BlockConfig) -> tuple[Tensor, float]:
    """Angle of one position for every pair of features, `half_rotary` in fp32 on the CPU, and the factor of cos and sin.

    Raises ValueError for a rope_type that is not known.
    """
    given = config.rope
    kind, theta = given.pop("rope_type"), given.pop("rope_theta")
    if kind not in ROPE_KEYS:
        raise ValueError(
            f"FusedBlock: no tables for rope_type={kind!r}, only for {', '.join(ROPE_KEYS)}; pass position_embeddings"
        )
    assert config.head_dim is not None and theta is not None
    whole = 1.0 if config.partial_rotary_factor is None else config.partial_rotary_factor
    rotary = int(config.head_dim * whole)
    powers = theta ** (torch.arange(0, rotary, 2, dtype=torch.float, device="cpu") / rotary)
    return _SCALINGS[kind](powers, theta, given)


def _default(powers: Tensor, theta: float, given: Mapping[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / powers, 1.0


def _linear(powers: Tensor, theta: float, given: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Positions divided by a factor (position interpolation, arXiv 2306.15595)."""
    return 1.0 / powers / given["factor"], 1.0


def _llama3(powers: Tensor, theta: float, given: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Llama 3.1's: slow angles divided by the factor, fast ones kept, those between blended by their turns in the old context."""
    plain, factor = 1.0 / powers, given["factor"]
    low, high, length = given["low_freq_factor"], given["high_freq_factor"], given["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    blend = (length / wavelength - low) / (high - low)
    between = (1 - blend) * plain / factor + blend * plain
    return torch.where(wavelength > length / low, plain / factor, torch.where(wavelength < length / high, plain, between)), 1.0


def _yarn(powers: Tensor, theta: float, given: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over the pairs of features from kept to divided angles, and a temperature."""
    factor, length, n = given["factor"], given["original_max_position_embeddings"], powers.numel()

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = given.get("attention_factor")
    if scale is None:
        m, m_all = given.get("mscale"), given.get("mscale_all_dim")
        scale = temperature(m) / temperature(m_all) if m and m_all else temperature(1.0)

    def pair_that_turns(times: float) -> float:
        return 2 * n * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(given.get("beta_fast") or 32), pair_that_turns(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n - 1)
    last += 0.001 * (first == last)
    kept = 1 - ((torch.arange(n, dtype=torch.float, device="cpu") - first) / (last - first)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(scale)


_SCALINGS: dict[str, Callable[[Tensor, float, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip


# The tables of the last calls, by all that they depend on: the blocks of a model want the same ones, one after another.
_recent: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
_KEPT = 4


class Rotary(nn.Module):
    """cos and sin of every position, as transformers' models hand them to their layers."""

    inv_freq: Tensor

    def __init__(self, config: BlockConfig, tables: str, device: Any = None) -> None:
        super().__init__()
        self.config, self.tables = config, tables
        try:
            values, self.attention_scaling = frequencies(config)
            self.refusal = ""
        except ValueError as error:
            values, self.attention_scaling, self.refusal = torch.zeros(0), 1.0, str(error)
        self._facts = (tables, config.partial_rotary_factor, config.head_dim, repr(config.rope))
        # Not persistent: state dicts of a layer hold none.
        self.register_buffer("inv_freq", values.to(torch.get_default_device() if device is None else device), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the frequencies again, for a module that was made on meta."""
        self.inv_freq.copy_(torch.zeros(0) if self.refusal else frequencies(self.config)[0])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Frequencies keep their dtype whatever the layer is cast to: in bf16, far positions would turn by wrong angles."""
        super()._apply(fn, recurse)
        if not self.refusal and not self.inv_freq.is_meta:
            self.inv_freq = frequencies(self.config)[0].to(self.inv_freq.device)
        return self

    def counted(self, hidden_states: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """cos and sin `1 seq rotary` for hidden_states `batch seq hidden` whose positions count from start."""
        x, end = hidden_states, start + hidden_states.shape[1]
        capturing = not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or capturing or type(x) not in (Tensor, nn.Parameter):
            return self(x, torch.arange(start, end, device=x.device)[None])
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
        key = (self._facts, start, end, x.dtype, x.device, stream)
        found = _recent.get(key)
        if found is None:
            with torch.inference_mode(False):  # a training step may be the next to want them
                found = self(x, torch.arange(start, end, device=x.device)[None])
            if type(found[0]) is Tensor:  # not what a mode makes of them
                while len(_recent) >= _KEPT:
                    _recent.pop(next(iter(_recent)), None)
                _recent[key] = found
        return found

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `1|batch seq rotary` (half of it with tables "short") in the dtype of hidden_states, for position_ids
        `1|batch seq`."""
        if self.refusal:
            raise ValueError(self.refusal)
        kind = hidden_states.device.type  # meta has no autocast to switch off
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            angles = position_ids[..., None].float() * self.inv_freq
            if self.tables != "short":
                angles = angles.repeat_interleave(2, dim=-1) if self.tables == "repeat" else torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)
