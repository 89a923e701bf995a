"""Fetching a corpus: a Wikipedia dump, or files of any URLs; resumed, checked, tried again."""
