"""The faces that a module reads and returns."""

from __future__ import annotations

from torch import Tensor, nn

from tensor3d.faces import other
from tensor3d.graph import walk
from tensor3d.layers.embedding import Embedding3D, TableEmbedding3D, TiedProjection3D
from tensor3d.layers.heads import NarrowHead3D
from tensor3d.layers.linear import Linear3D
from tensor3d.layers.projection import Projection3D
from tensor3d.origin import keeps_face


def face_of(tensor: Tensor) -> str:
    """The face on which the functions that `tensor` comes from put their results; `""` where they do not tell or agree.

    They mark their nodes: see `tensor3d.origin`.
    """
    found = walk(tensor, keeps_face)
    faces = {face for node in found if (face := getattr(node, "result_face", None)) is not None}
    return str(faces.pop()) if len(faces) == 1 else ""


def faces_of(module: nn.Module) -> tuple[str, str]:
    """Face of the input and of the output, by what the module says of itself; `""` for what lies on none.

    A layer that is not of this library may tell by an attribute `face`: it reads that one, and stays on it.
    """
    if isinstance(module, Linear3D):
        return module.reads, other(module.face)
    if isinstance(module, (Embedding3D, TableEmbedding3D)):
        return "", "z"
    if isinstance(module, Projection3D):
        return module.reads, "y"
    if isinstance(module, TiedProjection3D):
        return "z", "y"
    if isinstance(module, NarrowHead3D):
        return module.face, ""
    face = getattr(module, "face", None)
    return (face, face) if face in ("y", "z") else ("", "")
