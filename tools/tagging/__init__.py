"""Tags of words: their schemes, the entities that they spell, and texts as windows of pieces whose words are tagged."""
