"""Settings for every test."""

from hypothesis import settings

# The same examples in every run, nothing stored between runs, and no deadline: the machine may be busy elsewhere.
settings.register_profile("tensor3d", derandomize=True, database=None, deadline=None)
settings.load_profile("tensor3d")
