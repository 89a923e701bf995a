"""What a folder of the preparation holds: figures, histograms and a few pieces of it to read."""

from tools.corpus.inspection.command import InspectOptions, inspect

__all__ = ["InspectOptions", "inspect"]
