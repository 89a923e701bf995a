"""Preparing a corpus: text to sentences, a tokenizer, documents of ids."""

from tools.corpus.info import Corpus, CorpusInfo, load_corpus
from tools.corpus.prepare import prepare

__all__ = ["Corpus", "CorpusInfo", "load_corpus", "prepare"]
