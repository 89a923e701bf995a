"""What PyTorch calls private is used in one file, is there in this PyTorch, and says so where it is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d import Sequences, attention, torch_private
from tensor3d.attention import cpu
from tensor3d.attention.backends import SUPPORT, AttentionRequest
from tensor3d.torch_private import accept_mesh_order, compiling_often, has_bf16_products, is_there, private

ROOT = Path(__file__).parent.parent
SHIM = ROOT / "tensor3d" / "torch_private.py"
REPLACES = ROOT / "tools" / "bench" / "harness" / "absent_gpu.py"

# Private names of others that may stand anywhere in tensor3d/, models/, tools/ and launch/.
ALLOWED = {
    # Documented by PyTorch, as a beta, under these names.
    *(
        f"_foreach_{name}"
        for name in ("add_", "clamp_min_", "copy_", "div", "mul", "mul_", "norm", "reciprocal_", "sqrt_", "zero_")
    ),
    # Attributes and base classes that have stayed as they are since 2.0, on which pickles and subclasses rely.
    *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks"),
    *("_base", "_buffers", "_is_full_backward_hook", "_modules", "_parameters", "_version"),
    *("_BatchNorm", "_ConvNd", "_DropoutNd", "_NormBase"),
    # torch.distributed.elastic's agent, of which launch/torchrun.py derives its own.
    *("_pcontext", "_popen"),
    # How a model of transformers computes attention, as its configuration calls it.
    "_attn_implementation",
    # Python's own.
    *("_current_frames", "_exit", "_filters_mutated", "_getframe", "_lru_cache_wrapper", "_stderr", "_stdout"),
}


OUR_OWN = re.compile(r"(?:(?<![.\w])|\b(?:self|cls)\.)(_[A-Za-z]\w*)")
FOREIGN = re.compile(r"\._[A-Za-z]\w*")
FROM_TORCH = re.compile(r"from torch[\w.]* import (?:\([^)]*|.*)\b_")


def private_names(paths: list[Path]) -> Iterator[str]:
    """Where files use private names that none of them defines, and that are not allowed.

    Only files in which the text has such a name are parsed: it may stand in a comment or a docstring.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    own = {name for text in texts.values() for name in OUR_OWN.findall(text)} | ALLOWED
    for path, text in texts.items():
        if FROM_TORCH.search(text) or any(name[1:] not in own for name in FOREIGN.findall(text)):
            for node in ast.walk(ast.parse(text)):
                yield from (f"{path}:{node.lineno}: {name}" for name in named(node, own))  # type: ignore[attr-defined]


def named(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield from {node.attr} - own if is_private(node.attr) else ()
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        parts = [part for module in modules for part in module.split(".")]
        if isinstance(node, ast.ImportFrom) and parts[0] == "torch":
            parts += [alias.name for alias in node.names]
        yield from (part for part in parts if is_private(part) and part not in ALLOWED)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_stand_in_one_file() -> None:
    files = [path for folder in ("tensor3d", "models", "tools", "launch") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = private_names([path for path in files if path != SHIM])
    assert list(found) == [], "give them a name of our own in tensor3d/torch_private.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch._dynamo", 1),
        ("from torch._C import x", 1),
        ("from torch.utils import (\n    a,\n    _pytree,\n)", 1),
        ("torch.ops.aten._new(t._other)", 2),
        ("def _names():\n    made._names", 0),
        ("t._base", 0),
        ("a = 1  # as torch._C does it", 0),
    ],
)
def test_a_private_name_is_found(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "new.py").write_text(text)
    assert len(list(private_names([tmp_path / "new.py"]))) == found


def test_this_pytorch_has_them_all() -> None:
    asked = [name for path in (SHIM, REPLACES) for name in re.findall(r'private\("([\w.]+)"\)', path.read_text())]
    assert len(asked) > 25
    assert [path for path in asked if not is_there(private(path))] == []


@pytest.mark.parametrize("path", ["_C._gone", "no.module._at_all", "ops.mkldnn._gone"])
def test_what_is_missing_says_so_when_it_is_called(path: str) -> None:
    found = private(path)
    assert not is_there(found)
    with pytest.raises(ImportError, match=rf"^torch {re.escape(torch.__version__)} has no torch\.{path}, .*README"):
        found(1, of=2)


def test_what_one_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = private("_C._gone")
    monkeypatch.setattr(torch_private, "private", lambda path: missing)
    assert not has_bf16_products()
    request = AttentionRequest(device="cuda", dtype=torch.bfloat16, head_dim=64, capability=(9, 0))
    assert SUPPORT["varlen"].refusals(request) == []
    (told,) = replace(SUPPORT["varlen"], operator=missing).refusals(request)
    assert told == f"needs an operator that torch {torch.__version__} does not have"
    # Sequences on a CPU go through SDPA, to the same numbers.
    sequences, q, k, v = Sequences.from_lengths([5, 3]), *torch.randn(3, 8, 2, 8).unbind()
    wanted = attention(q, k, v, sequences)
    monkeypatch.setattr(cpu, "flash_attention_cpu", missing)
    torch.testing.assert_close(attention(q, k, v, sequences), wanted)


def test_a_look_up_that_older_torch_ends_by_a_key_error_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = torch.distributed.tensor._redistribute  # type: ignore[attr-defined]

    def strict(mesh: object, dims: tuple[int, ...]) -> object:
        if list(dims) != sorted(dims):
            raise KeyError("Invalid mesh_dim_names")
        return mesh

    monkeypatch.setattr(module, "_get_flattened_mesh_by_layout", strict)
    monkeypatch.setattr(torch_private, "_release", lambda: (2, 13))
    accept_mesh_order()
    assert module._get_flattened_mesh_by_layout is strict
    monkeypatch.setattr(torch_private, "_release", lambda: (2, 12))
    accept_mesh_order()
    accept_mesh_order()  # once is enough
    mended = module._get_flattened_mesh_by_layout
    assert (mended("mesh", (0, 1)), mended("mesh", (1, 0)), mended._before) == ("mesh", None, strict)


def test_many_kinds_of_code_of_one_function() -> None:
    """More than PyTorch makes by default; and no kind beyond those runs as it is written without a word."""
    made: list[object] = []

    def backend(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph.forward

    def function(x: torch.Tensor, kind: str) -> torch.Tensor:
        return x + len(kind)

    compiled, x = torch.compile(function, backend=backend, dynamic=False), torch.ones(2)
    kinds = ["x" * number for number in range(12)]
    assert torch._dynamo.config.recompile_limit < len(kinds)
    with compiling_often(12):
        for kind in kinds:
            compiled(x, kind)
        assert len(made) == 12
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(x, "y" * 12)
    assert compiled(x, kinds[5]).tolist() == [6.0, 6.0]
    assert len(made) == 12, "what is compiled is kept outside"
