"""Optimisers of logical tensors, the loss scale of fp16, and learning rates over a run."""

from tensor3d.optim.adamw import AdamW
from tensor3d.optim.groups import decay_groups
from tensor3d.optim.lamb import Lamb
from tensor3d.optim.scaler import LossScaler
from tensor3d.optim.schedule import LearningRate

__all__ = ["AdamW", "Lamb", "LearningRate", "LossScaler", "decay_groups"]
