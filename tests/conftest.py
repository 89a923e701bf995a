"""Settings for every test."""

import torch
from hypothesis import settings

# The same examples in every run, nothing stored between runs, and no deadline: the machine may be busy elsewhere.
settings.register_profile("tensor3d", derandomize=True, database=None, deadline=None)
settings.load_profile("tensor3d")
# Models here are small: threads that wait for each other on a busy machine made them ten times slower.
torch.set_num_threads(1)
