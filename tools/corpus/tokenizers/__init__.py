"""Tokenizers of three makes behind one interface: sentencepiece models, WordPiece vocabularies, `tokenizer.json`."""

from tools.corpus.tokenizers.base import FlatIds, Tokenizer
from tools.corpus.tokenizers.folder import copy_tokenizer, install_tokenizer, load_tokenizer
from tools.corpus.tokenizers.kinds import FILES, SETTINGS, Kind

__all__ = ["FILES", "SETTINGS", "FlatIds", "Kind", "Tokenizer", "copy_tokenizer", "install_tokenizer", "load_tokenizer"]
