"""Checks machines before training: `python -m tools.doctor` on ranks, `python -m tools.doctor.nodes` on nodes.

What would keep training from starting is a finding: told once, by the rank or node that knows, and exit status 2.
"""
