"""Imports go one way, the environment is read in one place, nothing is `global`: read off the source with `ast`.

The rules are functions of a folder, so that each is also shown to refuse a small tree that breaks it.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = ("tensor3d", "models", "tools")

# The rooms of a folder, lowest first. One may import those of its own line and of the lines before it; a new room, or a
# new module beside them, is given its place here. docs/architecture.md says what each is for.
LEVELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tensor3d": (
        ("files", "lazy_package", "live_objects", "torch_private", "versions"),
        ("ops",),
        ("packing",),
        ("distributed",),
        ("sharding",),
        ("cost_model",),
        ("batches",),
        ("attention",),
        ("layers",),
        ("checkpoint", "optim"),
        ("data",),
        ("explain", "parallelize"),
        ("testing",),
    ),
    "models": (("folder_kinds",), ("bert", "gpt", "vit"), ("transformers_bert",), ("transformers_causal_lm",)),
    "tools": (
        ("common",),
        ("corpus",),
        ("doctor", "packing", "training"),
        ("squad",),
        ("tagging",),
        ("predict",),
        ("checkpoint", "convert", "finetune", "gpt", "plan", "plot", "pretrain", "report"),
        # Nothing of the product imports benchmarks; tools.scaling is one of their commands.
        ("bench",),
        ("scaling",),
    ),
}
LEVEL_OF = {
    f"{root}.{name}": level for root, rooms in LEVELS.items() for level, names in enumerate(rooms) for name in names
}

# Folder: the top-level folders that it must not import.
FOREIGN = {
    "tensor3d": {"models", "tools", "tests", "launch"},
    "models": {"tools", "tests", "launch"},
    "tools": {"tests", "launch"},
}
# What a folder must not reach, even by way of others: packing and data run where no model is, planning without ranks.
UNREACHABLE = {
    "tensor3d.packing": "tensor3d.layers",
    "tensor3d.data": "tensor3d.layers",
    "tensor3d.cost_model": "torch.distributed",
}
READS_ENVIRONMENT = "tensor3d.distributed.process_group"
# Puts the whole environment back as it was, and reads no variable of it.
PUTS_ENVIRONMENT_BACK = "tensor3d.testing.process_state"
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    path: Path
    nodes: tuple[ast.AST, ...]
    """Of the kinds that the rules look at."""

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}"


Modules = dict[str, Module]
KINDS = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.Global)


def read(root: Path) -> Modules:
    """Every module of the three folders, by its dotted name; a package stands under the folder's name."""
    modules = {}
    for path in sorted(file for folder in ROOTS for file in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        walk = ast.walk(ast.parse(path.read_bytes(), filename=str(path)))
        modules[name] = Module(name=name, path=relative, nodes=tuple(node for node in walk if isinstance(node, KINDS)))
    return modules


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Trees of syntax are many objects without cycles: looking there for garbage takes two thirds of the time."""
    gc.disable()
    yield
    gc.enable()


def imports(module: Module, modules: Modules) -> Iterator[tuple[str, ast.AST]]:
    """The full names a module imports, wherever the import stands; of `from a import b` it is a.b if that is a module.

    Attributes of torch count too (`torch.distributed.all_reduce` needs no import of its own), and names given to
    importlib.
    """
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in modules or base == "torch" else base), node
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}", node
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if function in {"import_module", "__import__"}:
                yield str(node.args[0].value), node


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room(name: str) -> str:
    """`tensor3d.layers` of any module in it; a module beside the rooms is one of its own."""
    return ".".join(name.split(".")[:2])


def graph(modules: Modules) -> dict[str, set[str]]:
    """Module to the modules of the repository it imports. A package's mere passing-through is no edge."""
    return {name: {other for other, _ in imports(module, modules)} & set(modules) for name, module in modules.items()}


def folders(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for name, node in imports(module, modules):
            top = name.partition(".")[0]
            if top in FOREIGN[module.name.partition(".")[0]]:
                yield f"{module.at(node)}: imports {name}; {module.name.partition('.')[0]} never imports {top}"


def levels(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        root, _, rest = module.name.partition(".")
        if not rest:
            continue
        own = room(module.name)
        if own not in LEVEL_OF:
            yield f"{module.path}: {own} has no level; give it its place in LEVELS"
            continue
        for name, node in imports(module, modules):
            if name == "tensor3d" and root == "tensor3d":
                yield f"{module.at(node)}: imports the package itself, which imports everything; name the module"
            elif inside(name, root) and LEVEL_OF.get(room(name), -1) > LEVEL_OF[own]:
                yield f"{module.at(node)}: {own} imports {name}, which lies above it"


def cycles(modules: Modules) -> Iterator[str]:
    try:
        TopologicalSorter(graph(modules)).prepare()
    except CycleError as error:
        yield f"modules import each other in a circle: {' -> '.join(reversed(error.args[1]))}"


def reach(modules: Modules) -> Iterator[str]:
    edges = {name: {other for other, _ in imports(module, modules)} for name, module in modules.items()}
    for package, forbidden in UNREACHABLE.items():
        for start in (name for name in modules if inside(name, package)):
            trails = [[start]]
            seen = {start}
            while trails:
                trail = trails.pop()
                if any(inside(name, forbidden) for name in edges[trail[-1]]):
                    yield f"{modules[start].path}: reaches {forbidden} by {' -> '.join(trail)}"
                    break
                fresh = edges[trail[-1]] & set(modules) - seen
                seen |= fresh
                trails += [[*trail, name] for name in sorted(fresh)]


def environment(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        if module.name in (READS_ENVIRONMENT, PUTS_ENVIRONMENT_BACK):
            continue
        found = ((node, names & ENVIRONMENT) for node, names in names_of_os(module.nodes))
        yield from (
            f"{module.at(node)}: touches {min(names)}; only launch/ and {READS_ENVIRONMENT} touch the environment"
            for node, names in found
            if names
        )


def names_of_os(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, set[str]]]:
    """What each node takes out of `os`, under whatever name the module knows it."""
    plain = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    known_as = {alias.asname or alias.name for alias in plain if alias.name == "os"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "os" and not node.level:
            yield node, {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known_as:
            yield node, {node.attr}


def global_names(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, ast.Global):
                yield f"{module.at(node)}: global {', '.join(node.names)}; pass an object instead"


def packages(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        package = module.name.rpartition(".")[0]
        if module.path.name != "__init__.py" and inside(module.name, "tensor3d") and package not in modules:
            yield f"{module.path}: {module.path.parent}/__init__.py is missing; an installation would lack the folder"


RULES: tuple[Callable[[Modules], Iterator[str]], ...] = (
    folders,
    levels,
    cycles,
    reach,
    environment,
    global_names,
    packages,
)


@pytest.fixture(scope="module")
def repository() -> Modules:
    modules = read(ROOT)
    known = {"tensor3d.distributed.cube", "tensor3d.layers", "tools.bench.step"}
    assert known <= modules.keys(), "the rules below must see the library"
    return modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(repository: Modules, rule: Callable[[Modules], Iterator[str]]) -> None:
    violations = list(rule(repository))
    assert not violations, "\n".join(violations)


# A tree that keeps every rule; each case below adds or replaces files of it.
CLEAN = {
    "tensor3d/__init__.py": "from tensor3d.distributed.cube import Cube",
    "tensor3d/distributed/comm_stats.py": "import os\nHERE = os.getcwd()",
    "tensor3d/distributed/collectives.py": "import torch.distributed\nfrom tensor3d.distributed import comm_stats",
    "tensor3d/distributed/process_group.py": "import os\nWORLD = os.environ.get('WORLD_SIZE')",
    "tensor3d/distributed/cube.py": "from tensor3d.distributed.collectives import Axis\nfrom . import process_group",
    "tensor3d/layers/__init__.py": "from tensor3d.layers.linear import Linear3D",
    "tensor3d/layers/linear.py": "from ..distributed.cube import Cube",
    "tensor3d/distributed/__init__.py": "",
    "tensor3d/data/__init__.py": "import tensor3d.distributed.comm_stats",
    "tensor3d/cost_model/__init__.py": "from tensor3d.distributed.comm_stats import Traffic",
    "models/bert.py": "import torch\nfrom tensor3d import Cube\nfrom tensor3d.layers import Linear3D",
    "tools/pretrain.py": "from models.bert import Bert\nimport tensor3d",
    "tools/bench/step.py": "from tools import pretrain",
}


def tree(root: Path, changes: dict[str, str]) -> Modules:
    for path, text in {**CLEAN, **changes}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return read(root)


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    modules = tree(tmp_path, {})
    assert [violation for rule in RULES for violation in rule(modules)] == []
    assert graph(modules)["tensor3d.distributed.cube"] == {
        "tensor3d.distributed.collectives",
        "tensor3d.distributed.process_group",
    }


@pytest.mark.parametrize(
    ("rule", "path", "text", "message"),
    [
        (folders, "tensor3d/distributed/cube.py", "from models.bert import Bert", "cube.py:1: imports models.bert"),
        (folders, "tensor3d/distributed/cube.py", "def f():\n    import tools", "cube.py:2: imports tools"),
        (
            folders,
            "tensor3d/distributed/cube.py",
            "import importlib\nimportlib.import_module('models.bert')",
            "cube.py:2",
        ),
        (folders, "models/bert.py", "from tools import pretrain", "models never imports tools"),
        (folders, "tools/pretrain.py", "import tests.ranks", "tools never imports tests"),
        (
            levels,
            "tensor3d/distributed/comm_stats.py",
            "import torch\nfrom tensor3d.layers.linear import Linear3D",
            "comm_stats.py:2: tensor3d.distributed imports",
        ),
        (
            levels,
            "tensor3d/distributed/cube.py",
            "from ..layers import Linear3D",
            "tensor3d.distributed imports tensor3d.layers, which lies above",
        ),
        (levels, "tensor3d/layers/linear.py", "from ..data import Loader", "layers imports tensor3d.data"),
        (levels, "tensor3d/layers/linear.py", "from tensor3d import Cube", "imports the package itself"),
        (levels, "tensor3d/novelty.py", "", "tensor3d.novelty has no level"),
        (levels, "models/novelty.py", "", "models.novelty has no level"),
        (levels, "tools/pretrain.py", "import tools.bench.step", "tools.pretrain imports tools.bench"),
        (cycles, "tensor3d/layers/linear.py", "from tensor3d.layers import norm", "in a circle: tensor3d.layers"),
        (cycles, "tensor3d/distributed/comm_stats.py", "from tensor3d.distributed import collectives", "in a circle"),
        (
            reach,
            "tensor3d/data/__init__.py",
            "import tensor3d.layers.linear",
            "reaches tensor3d.layers",
        ),
        (
            reach,
            "tensor3d/cost_model/__init__.py",
            "import tensor3d.distributed.cube",
            "tensor3d.distributed.cube -> tensor3d.distributed.collectives",
        ),
        (reach, "tensor3d/cost_model/__init__.py", "from torch import distributed", "reaches torch.distributed"),
        (
            reach,
            "tensor3d/cost_model/__init__.py",
            "import torch\ntorch.distributed.barrier()",
            "reaches torch.distributed",
        ),
        (environment, "tensor3d/distributed/cube.py", "import os\nos.environ['A'] = '1'", "cube.py:2: touches environ"),
        (environment, "models/bert.py", "import os as system\nsystem.getenv('A')", "bert.py:2: touches getenv"),
        (environment, "tools/pretrain.py", "from os import environ as e", "pretrain.py:1: touches"),
        (
            global_names,
            "tensor3d/distributed/cube.py",
            "def f():\n    global count, total",
            "cube.py:2: global count, total",
        ),
        (packages, "tensor3d/packing/plan.py", "", "packing/__init__.py is missing"),
    ],
)
def test_a_violation_is_found(
    tmp_path: Path, rule: Callable[[Modules], Iterator[str]], path: str, text: str, message: str
) -> None:
    violations = list(rule(tree(tmp_path, {path: text})))
    assert len(violations) == 1
    assert message in violations[0]


# --- tests ---------------------------------------------------------------------------------------------------------


def borrowed(root: Path) -> Iterator[str]:
    """Imports from a module of tests or from a conftest: what two modules need stands in a module without tests."""
    statement = re.compile(rb"^\s*(?:from\s+[\w.]+\s+)?import\s+(?:\([^)]*\)|.*)", re.MULTILINE)
    suspicious = re.compile(rb"\bconftest\b|\btest_")
    for path in sorted((root / "tests").rglob("*.py")):
        content = path.read_bytes()
        if not any(suspicious.search(found) for found in statement.findall(content)):
            continue  # reading the syntax of all takes seconds
        for node in ast.walk(ast.parse(content, filename=str(path))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            origin = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            parts = {part for name in [*origin, *names] for part in name.split(".")}
            if any(name.partition(".")[0] == "tests" for name in origin) and any(
                part == "conftest" or part.startswith("test_") for part in parts
            ):
                yield f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}: imports from {', '.join(origin)}"


def test_no_test_imports_from_another() -> None:
    violations = list(borrowed(ROOT))
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from tests.layers.test_layers import check", 1),
        ("from tests import test_layers", 1),
        ("import tests.models.bert.test_model", 1),
        ("def f():\n    from tests.tools.conftest import write", 1),
        ("from tests.single_device_reference import error", 0),
        ("from tests.test_layers_helpers.single import error\nimport pytest", 1),
        ("import test_layers", 0),
    ],
)
def test_a_borrowed_name_is_found(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_new.py").write_text(text)
    assert len(list(borrowed(tmp_path))) == found


@pytest.mark.slow
def test_a_start_waits_for_nothing_that_it_may_not_need() -> None:
    """torch's compiler alone is a fifth of an import, in every process of every launch."""
    dear = {"torch._dynamo", "torch._inductor", "scipy", "matplotlib", "transformers", "tensorboard", "tokenizers"}
    code = (
        f"import sys, tensor3d, models.bert, tools.pretrain, tools.training.trainer; print({dear} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
