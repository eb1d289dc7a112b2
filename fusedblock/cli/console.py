"""What the commands print: numbered steps, checks, tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .compare import Check


class Steps:
    """Numbered steps with what was found in each, and the checks of all of them."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
        self.checks: list[Check] = []
        self._started = time.perf_counter()

    def step(self, title: str) -> None:
        self.done += 1
        elapsed = time.perf_counter() - self._started
        self.console.print(f"\n[bold]\\[{self.done}/{self.total}] {escape(title)}[/]  [dim]{elapsed:.0f} s[/]")

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self.console.print(f"      {line}", markup=False, highlight=False)

    def check(self, *checks: Check) -> None:
        for check in checks:
            self.checks.append(check)
            self.console.print("  " + line_of(check), highlight=False)

    def summary(self) -> bool:
        """Print how many checks passed; whether all did."""
        failed = [check for check in self.checks if not check.passed]
        total, seconds = len(self.checks), time.perf_counter() - self._started
        color, verdict = ("red", f"{len(failed)} of {total} checks failed") if failed else ("green", f"all {total} checks passed")
        self.console.print(f"\n[bold {color}]{verdict}[/] in {seconds:.0f} s", highlight=False)
        for check in failed:
            self.console.print("  " + line_of(check), highlight=False)
        return not failed


def line_of(check: Check) -> str:
    mark = "[green]ok[/]  " if check.passed else "[bold red]FAIL[/]"
    return f"{mark} {escape(check.name)}: {escape(check.found)}, wanted {escape(check.wanted)}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold")
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
