"""Optimisers of logical tensors, the loss scale of fp16, and learning rates over a run."""

from tensor3d.optim.adam import AdamW, decay_groups
from tensor3d.optim.grad_scaler import GradScaler
from tensor3d.optim.lamb import Lamb
from tensor3d.optim.lr_schedule import LRSchedule
from tensor3d.optim.stable_adamw import StableAdamW

__all__ = ["AdamW", "GradScaler", "LRSchedule", "Lamb", "StableAdamW", "decay_groups"]
