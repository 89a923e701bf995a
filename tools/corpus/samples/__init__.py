"""Drawing the sequences of pre-training ahead of it: pairs or single texts, in shards, with a plan of their packs."""
