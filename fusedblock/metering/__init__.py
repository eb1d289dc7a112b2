"""Launches, memory traffic and time, before and after the swap."""
