"""Measurements: `python -m tools.bench SUBCOMMAND`. What the numbers mean is said in docs/benchmarks.md."""
