"""python -m benchmarks layer [--model NAME]... [--json FILE] [--quick] [--only REGEX] [--budget SECONDS] [--dry]"""

from __future__ import annotations

import argparse
import sys

from . import layer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks on one GPU; see benchmarks/README.md.")
    commands = parser.add_subparsers(dest="command", required=True)
    layer.add_arguments(commands.add_parser("layer", help="decoder layers of three models, and operators, beside their peers"))
    return layer.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
