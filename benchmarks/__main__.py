"""python -m benchmarks layer [--model NAME]... | attention | moe, each with [--json FILE] [--quick] [--only REGEX]
[--budget SECONDS] [--dry]"""

from __future__ import annotations

import argparse
import sys

from . import attention, layer, moe


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks on one GPU; see benchmarks/README.md.")
    commands = parser.add_subparsers(dest="command", required=True)
    layer.add_arguments(commands.add_parser("layer", help="decoder layers of three models, and operators, beside their peers"))
    attention.add_arguments(commands.add_parser("attention", help="attention in all its variants beside its peers"))
    moe.add_arguments(commands.add_parser("moe", help="mixtures of experts, router and experts, beside transformers' blocks"))
    args = parser.parse_args()
    return {"layer": layer, "attention": attention, "moe": moe}[args.command].main(args)


if __name__ == "__main__":
    sys.exit(main())
