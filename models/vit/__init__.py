"""A Vision Transformer (Dosovitskiy et al. 2021) over packed images of different sizes, split three ways."""

from models.vit.config import PRESETS, VitConfig
from models.vit.model import Vit, VitOutput
from models.vit.patches import ImageBatch, cut_patches, pack_images

__all__ = ["PRESETS", "ImageBatch", "Vit", "VitConfig", "VitOutput", "cut_patches", "pack_images"]
