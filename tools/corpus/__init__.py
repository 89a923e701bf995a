"""Preparing a corpus: from dumps and text to sentences, a tokenizer, ids and packed sequences.

Nothing is imported here: steps that only read and write text need no torch, and start without it.
"""
