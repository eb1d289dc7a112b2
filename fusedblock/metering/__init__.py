"""Launches, memory traffic and time, before and after the swap."""

from __future__ import annotations

from .compare import measure
from .counter import TrafficCounter
from .report import OpRow, Report, Side

__all__ = ["OpRow", "Report", "Side", "TrafficCounter", "measure"]
