"""The steps `tokenizer` and `tokenize`: a vocabulary, and documents as ids."""
