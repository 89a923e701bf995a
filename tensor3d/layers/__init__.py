"""The layers. Each takes its cube and its face as arguments."""
