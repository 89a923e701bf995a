"""Fine-tuning: a pre-trained BERT learns to answer one kind of question about texts."""
