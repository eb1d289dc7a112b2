"""Keys and values of earlier tokens, for decoding with layers that no model of transformers holds."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """The keys and values of any number of layers, in the order of their tokens.

    Args:
        max_length: None: the cache grows by a copy at every update, and gradients flow through it. A number of tokens: each
            layer gets buffers of that length at its first update, which are filled in place, and what `update` returns are views
            of their filled part.

    Has the two methods that a FusedBlock wants of a cache, as transformers' caches do.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ValueError(f"KVCache: max_length={max_length!r}, expected a positive number of tokens or None")
        self.max_length = max_length
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the layer has."""
        return self._lengths.get(layer_idx, 0)

    def check(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, layer_idx: int) -> None:
        """Raises ValueError where keys and values `batch kv_heads seq head_dim` of these kinds could not be added."""
        past, seq = self.get_seq_length(layer_idx), shape[2]
        if self.max_length is not None and past + seq > self.max_length:
            raise ValueError(f"KVCache: max_length={self.max_length}, layer {layer_idx} has {past} tokens and gets {seq} more")
        held = self._keys.get(layer_idx)
        if held is None:
            return
        given, had = ((*s[:2], s[3]) for s in (shape, held.shape))
        pairs = (("(batch, kv_heads, head_dim)", given, had), ("dtype", dtype, held.dtype), ("device", device, held.device))
        for what, new, old in pairs:
            if new != old:
                raise ValueError(f"KVCache: layer {layer_idx} holds keys of {what} {old}, and gets {new}")

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Add the keys and values `batch kv_heads seq head_dim` of new tokens; returns those of all tokens, in that layout.

        Raises ValueError naming both values where they do not fit what the layer holds, or its buffers.
        """
        if keys.shape != values.shape or keys.dim() != 4:
            raise ValueError(
                f"KVCache: keys have shape {tuple(keys.shape)}, values {tuple(values.shape)}, expected one shape "
                "(batch kv_heads seq head_dim)"
            )
        self.check(tuple(keys.shape), keys.dtype, keys.device, layer_idx)  # type: ignore[arg-type]
        past, seq = self.get_seq_length(layer_idx), keys.shape[2]
        if self.max_length is None:
            if layer_idx in self._keys:
                keys = torch.cat((self._keys[layer_idx], keys), dim=2)
                values = torch.cat((self._values[layer_idx], values), dim=2)
            self._keys[layer_idx], self._values[layer_idx] = keys, values
        else:
            if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
                raise ValueError("KVCache: keys that require gradients cannot be kept with max_length; use KVCache() or no_grad")
            if layer_idx not in self._keys:
                shape = (*keys.shape[:2], self.max_length, keys.shape[3])
                self._keys[layer_idx], self._values[layer_idx] = keys.new_empty(shape), values.new_empty(shape)
            self._keys[layer_idx][:, :, past : past + seq] = keys
            self._values[layer_idx][:, :, past : past + seq] = values
            keys, values = (held[layer_idx][:, :, : past + seq] for held in (self._keys, self._values))
        self._lengths[layer_idx] = past + seq
        return keys, values

    def reset(self) -> None:
        """Forget all tokens. Buffers of max_length stay, for sequences of the same batch size."""
        self._lengths.clear()
        if self.max_length is None:
            self._keys.clear()
            self._values.clear()

    def __repr__(self) -> str:
        tokens = max(self._lengths.values(), default=0)
        return f"KVCache(max_length={self.max_length}, layers={len(self._lengths)}, tokens={tokens})"
