"""A fused model against the same model in plain Hugging Face code: what `demo` and `verify` check, and by which rule.

The rule for a layer: in fp32 every relative error against float64 is below 1e-5; in bf16 and fp16 their root mean square is
at most 1.5 times that of the plain layer in the same dtype. An error is that of one token, or of one weight's gradient. The
largest of them is no measure in half precision, nor, in any, of a whole model, which amplifies rounding by its depth: tokens
and channels of a language model differ a thousandfold in size, and where one number decides an error, chance decides a ratio.
So a whole model's root mean square is held to 1.5 times plain's, or, in fp32, to 1e-5 if that is more.

Greedy tokens are equal; in half precision two logits can lie closer than the plain model's own rounding, and a token chosen
differently there is no difference.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedblock
from fusedblock.kernels._target import Target

from .checkpoints import quiet_transformers
from .presets import from_pretrained, on_meta, read_config

FP32_LIMIT = 1e-5
PLAIN_FACTOR = 1.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at")


@dataclass(frozen=True)
class Check:
    """One thing compared: what was found, what it had to be, and whether it was."""

    name: str
    found: str
    wanted: str
    passed: bool


@dataclass(frozen=True)
class Prompt:
    """ids `1 seq`; text is None where the checkpoint has no tokenizer."""

    ids: Tensor
    text: str | None


def relative_error(value: Tensor, reference: Tensor) -> Tensor:
    """|value - reference| / |reference| in Frobenius norms, in float64, `1`; infinite where value is not finite."""
    return token_errors(value.flatten(), reference.flatten())


def token_errors(value: Tensor, reference: Tensor) -> Tensor:
    """The relative error of each token, `tokens`, in float64; value, reference `... features`."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    errors = (value - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-300)
    return errors.nan_to_num(nan=float("inf")).reshape(-1)


def error_check(name: str, dtype: torch.dtype, fused: Tensor, plain: Tensor, *, whole_model: bool = False) -> Check:
    """The rule of this module for the relative errors, `n` each, of the fused and of the plain computation in dtype."""
    if dtype is torch.float32 and not whole_model:
        found = float(fused.max())
        return Check(name, f"error {found:.1e}", f"< {FP32_LIMIT:.0e}", found < FP32_LIMIT)
    found, limit = _rms(fused), PLAIN_FACTOR * _rms(plain)
    if dtype is torch.float32 and limit < FP32_LIMIT:
        return Check(name, f"error {found:.1e}", f"< {FP32_LIMIT:.0e}", found < FP32_LIMIT)
    return Check(name, f"error {found:.2e}", f"<= {limit:.2e} ({PLAIN_FACTOR} x plain)", found <= limit)


def rule(dtype: torch.dtype) -> str:
    """What the checks of a whole model hold errors to, in words."""
    plain = f"{PLAIN_FACTOR} times that of the original layers in {name_of(dtype)}"
    limit = f"{FP32_LIMIT:.0e}, or {plain} if that is more" if dtype is torch.float32 else plain
    return (
        f"An error is |value - reference| / |reference| of one token or of one weight's gradient; the reference computes in "
        f"{name_of(reference_dtype(dtype))}.\nThe root mean square of all errors of a line may be at most {limit}."
    )


def _rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 to judge fp32 by; fp32 is precise enough to judge bf16 and fp16 by, and half as large."""
    return torch.float64 if dtype is torch.float32 else torch.float32


def load_plain(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """The checkpoint as transformers loads it."""
    return from_pretrained(folder, dtype).to(device)


def load_ours(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """The checkpoint by load_safetensors, into a model built on the meta device: no weight is initialised or held twice."""
    from transformers import GenerationConfig

    model = on_meta(read_config(folder), dtype)
    with quiet_transformers():
        fusedblock.load_safetensors(model, folder, dtype=dtype, device=device)
        with contextlib.suppress(OSError):  # a checkpoint may come without one
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def prompts(folder: Path, vocab: int, texts: Sequence[str] = PROMPTS) -> tuple[list[Prompt], Any]:
    """The prompts and the tokenizer of a checkpoint; without a tokenizer, token ids from a seeded generator, and None."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        generator = torch.Generator().manual_seed(0)
        return [Prompt(torch.randint(3, vocab, (1, 8 + 3 * i), generator=generator), None) for i in range(len(texts))], None
    from transformers import AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return [Prompt(tokenizer(text, return_tensors="pt").input_ids, text) for text in texts], tokenizer


@torch.no_grad()
def greedy(model: Any, prompt: Prompt, tokens: int) -> Tensor:
    """The prompt and up to `tokens` greedy tokens after it, `seq`, on the CPU."""
    ids = prompt.ids.to(model.device)
    # A checkpoint's own sampling settings would only be warned about: greedy decoding reads none of them.
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None, top_k=None, max_length=None)
    if config.pad_token_id is None:
        config.pad_token_id = 0
    with quiet_transformers():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].cpu()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of token ids `seq`: `seq vocab`, on the CPU."""
    return model(ids[None].to(model.device), use_cache=False).logits[0].cpu()


def greedy_check(name: str, fused: Tensor, plain: Tensor, plain_model: Any, reference: Any) -> Check:
    """Equal tokens, or in bf16 and fp16 a first difference between two tokens that the plain model cannot tell apart.

    fused, plain: token ids `seq`, prompt included. The models, the plain one and the one of higher precision, are asked
    about a first difference only.
    """
    wanted = "the same tokens"
    length = min(len(fused), len(plain))
    differ = (fused[:length] != plain[:length]).nonzero()
    if not len(differ) and len(fused) == len(plain):
        return Check(name, "the same tokens", wanted, True)
    at = int(differ[0]) if len(differ) else length
    if at == length:
        return Check(name, f"{len(fused)} tokens against {len(plain)}", wanted, False)
    a, b = int(plain[at]), int(fused[at])
    if plain_model.dtype is not torch.float32:
        rounded, exact = (logits(model, plain[:at])[-1].double() for model in (plain_model, reference))
        gap, noise = float((exact[a] - exact[b]).abs()), 2 * float((rounded - exact).abs().max())
        if gap <= noise:
            found = f"equal up to token {at}, then a tie: logits {gap:.1e} apart, plain rounding {noise:.1e}"
            return Check(name, found, wanted, True)
    return Check(name, f"token {at} is {b}, plain {a}", wanted, False)


@dataclass(frozen=True)
class LayerCase:
    """One decoder layer with its real input: what layer `index` sees when the model reads a prompt."""

    layer: nn.Module
    index: int
    hidden: Tensor  # batch seq hidden
    cos: Tensor  # batch seq head_dim
    sin: Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: Any, index: int, ids: Tensor) -> LayerCase:
        seen: list[Tensor] = []
        layer = model.model.layers[index]
        handle = layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(
            args[0] if args else kwargs["hidden_states"]), with_kwargs=True)  # fmt: skip
        try:
            model.model(ids.to(model.device), use_cache=False)
        finally:
            handle.remove()
        hidden = seen[0]
        cos, sin = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        return LayerCase(copy.deepcopy(layer).cpu(), index, hidden.cpu(), cos.cpu(), sin.cpu())

    def run(self, dtype: torch.dtype, *, inputs: torch.dtype | None = None, fused: bool = False, backward: bool = False,
            device: torch.device | str = "cpu") -> dict[str, Tensor]:  # fmt: skip
        """"output" and, after backward of a fixed gradient, the gradients of "input" and of the weights by their names.

        dtype: the arithmetic's. inputs: the weights, input and tables are rounded to this dtype first, so that results in
        several dtypes differ by their arithmetic alone.
        """
        rounded = inputs or dtype
        layer = copy.deepcopy(self.layer).to(rounded).to(device, dtype)
        hidden, cos, sin = (t.detach().clone().to(rounded).to(device, dtype) for t in (self.hidden, self.cos, self.sin))
        if fused:
            fusedblock.fuse(layer)
        for weight in layer.parameters():
            weight.requires_grad_(backward)
        hidden.requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            out = layer(hidden, position_embeddings=(cos, sin))
        results = {"output": out}
        if backward:
            generator = torch.Generator().manual_seed(1)
            upstream = torch.randn(out.shape, generator=generator).to(rounded).to(device, dtype)
            out.backward(upstream)
            results["input"] = hidden.grad
            results.update({name: weight.grad for name, weight in layer.named_parameters()})
        return results

    def check(self, dtype: torch.dtype, *, backward: bool = False, device: torch.device | str = "cpu",
              target: Target | None = None) -> list[Check]:  # fmt: skip
        """The fused layer's kernels, on a GPU or in the interpreter, against the plain layer in float64.

        One Check of the output; with `backward` also one of the input's gradient and one of the weights' gradients.
        """
        reference = self.run(torch.float64, inputs=dtype, backward=backward)
        plain = self.run(dtype, backward=backward, device=device)
        with kernels_on(device, target):
            fused = self.run(dtype, fused=True, backward=backward, device=device)
        where = "on the GPU" if torch.device(device).type == "cuda" else "in the interpreter"
        label = f"layer {self.index}, {name_of(dtype)} kernels {where}"

        def errors(results: dict[str, Tensor], *keys: str) -> Tensor:
            compare = relative_error if len(keys) > 1 else token_errors
            return torch.cat([compare(results[key], reference[key]) for key in keys])

        checks: dict[str, tuple[str, ...]] = {"output": ("output",)}
        if backward:
            checks["input gradient"] = ("input",)
            checks["weight gradients"] = tuple(key for key in reference if key not in ("output", "input"))
        return [
            error_check(f"{label}: {name}", dtype, errors(fused, *keys), errors(plain, *keys)) for name, keys in checks.items()
        ]


@contextlib.contextmanager
def kernels_on(device: torch.device | str, target: Target | None = None) -> Iterator[None]:
    """Inside, ops run their kernels for tensors on `device`: on a GPU they do anyway, on a CPU in the interpreter."""
    if torch.device(device).type == "cuda":
        yield
        return
    from fusedblock.interpret import interpret

    with interpret(target):
        yield


def name_of(dtype: torch.dtype) -> str:
    """ "fp32" for torch.float32, and so on."""
    return next(name for name, known in DTYPES.items() if known is dtype)
