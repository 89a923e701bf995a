"""Processes of the cube: its axes and groups, collectives and their counts, gradients, and failures."""
