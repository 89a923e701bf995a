"""The planner: which box for which model on which machines."""
