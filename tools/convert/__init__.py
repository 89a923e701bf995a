"""Models of the Hugging Face library in and out."""
