"""Modules of others that keep their own code: their parameters lie on the cube, and the code is given blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from tensor3d.cube import Cube
from tensor3d.faces import Face, own_block
from tensor3d.layout import Layout
from tensor3d.parameters import use


class Wrapped3D(nn.Module):
    """Runs a module's own code with this rank's block of each parameter; gradients go to the ledger.

    Names of parameters, buffers and modules are those of the module itself; other attributes are found as well.

    Args:
        code: the module. Its parameters are already on the cube; its hooks are this module's from now on.
        layouts: of the parameters by name; those not named are used by modules inside, which know their own.
        enters: face onto which the result is cut, which all ranks of a plane have computed alike.
    """

    def __init__(self, code: nn.Module, layouts: Mapping[str, Layout], cube: Cube, enters: Face | None = None) -> None:
        super().__init__()
        # One set of dicts for both: what replaces a parameter here (`double`, `load_state_dict`) replaces it there.
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[shared] = vars(code)[shared]
        vars(self)["code"] = code  # not registered, or every name would begin with it
        self.layouts, self.cube, self.enters = dict(layouts), cube, enters
        self.training = code.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward gives for this rank's blocks."""
        code = vars(self)["code"]
        code.training = self.training
        blocks = {
            name: use(parameter, self.layouts[name], self.cube)
            for name, parameter in self.named_parameters()
            if name in self.layouts
        }
        result = functional_call(code, blocks, args, kwargs)
        return result if self.enters is None else self._cut(result, self.enters)

    def _cut(self, result: Any, face: Face) -> Tensor:
        if not isinstance(result, Tensor) or result.dim() < 2:
            found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{self._get_name()} enters face {face}: its result must be a tensor (..., columns) of the rows of a "
                f"plane. Got {found}."
            )
        block = own_block(result.flatten(0, -2), self.cube, face)
        return block if result.dim() == 2 else block.unsqueeze(0)

    def __getattr__(self, name: str) -> Any:
        code = vars(self).get("code")
        return super().__getattr__(name) if code is None else getattr(code, name)

    def _get_name(self) -> str:
        code = vars(self).get("code")
        return f"Wrapped3D[{'?' if code is None else code._get_name()}]"

    def extra_repr(self) -> str:
        said = [part for part in (vars(self)["code"].extra_repr(), *map(self._line, self.layouts)) if part]
        return ", ".join(said if self.enters is None else [*said, f"enters face {self.enters}"])

    def _line(self, name: str) -> str:
        layout = self.layouts[name]
        cut = "".join(f", cut over {axis}" for axis, _ in layout.cut) or ", whole"
        return (
            f"{name}: {tuple(self.get_parameter(name).shape)}{cut}, summed over {'+'.join(layout.sum_over) or 'none'}"
        )
