"""Packing on the command line: how full, how fast, how even; plans on disk."""
