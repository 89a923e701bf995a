"""Models built from tensor3d's layers."""
