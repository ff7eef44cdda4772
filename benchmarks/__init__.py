"""Benchmarks that compare model repositories side by side; see `python -m benchmarks --help`."""
