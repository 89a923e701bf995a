"""Commands about checkpoints: `python -m tools.checkpoint inspect|verify DIR`."""
