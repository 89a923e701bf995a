"""Proposes a plan for a model that the rules do not know, from one trace of its code."""
