"""Benchmarks of fusedblock beside its peers, in one process. Run with `python -m benchmarks`; see README.md."""
