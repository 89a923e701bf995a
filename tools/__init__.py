"""Commands: prepare a corpus, pre-train, plot, benchmark. They run from a checkout, as `python -m tools.NAME`."""
