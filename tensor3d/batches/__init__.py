"""What layers are told of a batch: where its sequences begin, and which of its rows are read."""
