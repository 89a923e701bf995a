"""What a plan says of a module: its rule. Users get one from `rules`; each is a class of `torch_layer_rules`,
`own_code_rules` or `torch_attention`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from torch import nn

from tensor3d.parallelize.module_copy import ModuleBuilder


@dataclass(frozen=True, kw_only=True)
class ParallelRule(ABC):
    """How a module comes onto the cube. Rules are made by the functions of `tensor3d.parallelize.rules`."""

    covers_children: ClassVar[bool] = True
    """Whether the rule takes the modules inside along, so that the plan says nothing of them."""

    @abstractmethod
    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        """The module's counterpart on the workshop's cube; `module` stays as it is. `name` is for messages.

        Raises:
            ValueError: the rule does not fit the module, or its sizes do not divide.
        """

    def __str__(self) -> str:
        """Its name and what it was told, for messages."""
        said = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.default is MISSING or getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__.lower()}({', '.join(said)})"
