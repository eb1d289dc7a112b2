"""What the table of architectures says, for people: one row a family."""

from __future__ import annotations

from .table import SPECS, LayerSpec

HEADER = ("family", "layer class", "norms", "attention", "MLP")
_NORMS = {
    ("attn_norm", "mlp_norm"): "before each branch", ("attn_norm",): "before both branches",
    ("attn_out_norm", "mlp_out_norm"): "after each branch",
    ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"): "before and after each branch",
}  # fmt: skip


def rows() -> list[tuple[str, ...]]:
    """A row of HEADER's columns for every family, by name."""
    return [_row(spec) for spec in sorted(SPECS.values(), key=lambda spec: spec.family)]


def _row(spec: LayerSpec) -> tuple[str, ...]:
    where = "after each addition" if spec.residual == "post" else _NORMS[tuple(spec.norms)]
    optional = {field for field, _ in spec.switches.values()}
    norm = ("one " if len(spec.norms) == 1 else "") + ("RMSNorm" if spec.norm == "rms" else "LayerNorm")
    parallel = ", parallel branches" if spec.residual == "parallel" else ", optional parallel branches" * ("residual" in optional)
    scaled = ", scaled branches" if spec.branch_scale else ""
    rope = {"": "no rope", "half": "rope", "interleaved": "interleaved rope"}[spec.rope]
    rope = ("partial " if spec.partial and spec.rope else "") + rope + (" in some layers" if "rope" in optional else "")
    kind = {"": "", "head": ", QK-norm by head", "full": ", QK-norm over all heads"}[spec.qk_norm]
    kind = kind or (", optional QK-norm" if "qk_norm" in optional else "")
    kind += ", windows" * bool(spec.window) + ", softcap" * bool(spec.softcap) + ", sinks" * bool(spec.sinks)
    layout = {"split": "", "stacked": ", one QKV weight", "per_head": ", one QKV weight by head"}[spec.qkv_layout]
    conv1d = ", Conv1D weights" if spec.linear_class.endswith("Conv1D") else ""
    mlp = {"gated": "gated", "gated_stacked": "gated, one gate-up weight", "plain": "two layers"}[spec.mlp]
    if spec.sparse:
        shared = ", gated shared expert" if spec.sparse.shared_gate else ", shared expert"
        mlp = "experts" + (shared if spec.sparse.shared else "")
        mlp += ", dense in some layers" if spec.sparse.block in spec.classes else ""
    return spec.family, spec.layer_class, f"{norm} {where}{parallel}{scaled}", rope + kind + layout + conv1d, mlp


def markdown() -> str:
    """The rows as a Markdown table: the one in the README."""
    lines = [HEADER, tuple("---" for _ in HEADER), *((f"`{row[0]}`", f"`{row[1]}`", *row[2:]) for row in rows())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
