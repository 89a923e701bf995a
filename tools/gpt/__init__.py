"""Training a small GPT, and text from it."""
