"""Tokenizers of three makes behind one interface: sentencepiece models, WordPiece vocabularies, `tokenizer.json`."""

from tools.corpus.tokenizers.base import FILES, SETTINGS, FlatIds, Kind, Tokenizer
from tools.corpus.tokenizers.folder import copy_tokenizer, install_tokenizer, load_tokenizer

__all__ = ["FILES", "SETTINGS", "FlatIds", "Kind", "Tokenizer", "copy_tokenizer", "install_tokenizer", "load_tokenizer"]
