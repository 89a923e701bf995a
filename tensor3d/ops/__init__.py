"""Operators that need no process group."""
