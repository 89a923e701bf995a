"""Builds the site: `make docs`. Any broken link, missing page or name that is not found ends it.

The pages are those of docs/, the README as the first one, and a reference of every public name, which is what stands in
`__all__`; neither is imported, so that PyTorch is not needed.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
ROOMS = ("tensor3d", "models")
"""For use in programs of others. Of tools/, the Python call of tools.predict."""
PYTHON_CALLS = ("tools.predict",)


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "reference").mkdir(parents=True)
    for page in (ROOT / "docs").glob("*.*"):
        if page.suffix == ".md":
            (PAGES / page.name).write_text(as_page(page.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copy(page, PAGES)
    (PAGES / "README.md").rename(PAGES / "pages.md")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (PAGES / "index.md").write_text(as_page(readme.replace("](docs/", "](")), encoding="utf-8")
    for module, names in public_names().items():
        (PAGES / "reference" / f"{module}.md").write_text(reference(module, names), encoding="utf-8")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", HERE / "mkdocs.yml"]
    status = subprocess.run(build, check=False).returncode
    for name in () if status else undocumented():
        print(f"docs/site/build.py: {name} is public and not in the reference. Has it a docstring?", file=sys.stderr)
        status = 1
    return status


def undocumented() -> list[str]:
    """Public names that the site, when it is built, has nothing of."""
    missing = []
    for module, names in public_names().items():
        page = (SITE / "reference" / f"{module}.html").read_text(encoding="utf-8")
        shown = {found.rpartition(".")[2] for found in re.findall(r'id="([^"]+)"', page)}
        links = set(re.findall(r"<code>(\w+)</code></a>", page))
        missing += [f"{module}.{name}" for name in names if name not in shown | links]
    return missing


def as_page(text: str) -> str:
    """Its links lead to pages. Those to other files of the repository become their names."""
    text = text.replace("](../README.md", "](index.md").replace("](README.md", "](pages.md")
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", text)


def public_names() -> dict[str, list[str]]:
    """Each package or module with an `__all__`, and what stands there."""
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    files += [ROOT / call.replace(".", "/") / "__init__.py" for call in PYTHON_CALLS]
    return {module_of(file): names for file in files if (names := names_of(file))}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def names_of(file: Path) -> list[str]:
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


def reference(module: str, names: list[str]) -> str:
    """A page of the reference, for mkdocstrings: what the module says of itself, then its names."""
    # A function that is called like the file or package that it stands in would be taken for that.
    shadowed = {name: origin for name, origin in imported(module).items() if origin.endswith(f".{name}")}
    listed = ", ".join(name for name in names if name not in shadowed)
    options = f"options:\n      show_root_heading: false\n      members: [{listed}]"
    page = [f"# {module}", f"::: {module}\n    {options}"]
    for name in filter(shadowed.__contains__, names):
        origin = shadowed[name]
        page.append(f"::: {origin}.{name}" if name in defined(origin) else f"[`{name}`]({origin}.md)")
    return "\n\n".join(page) + "\n"


def imported(module: str) -> dict[str, str]:
    """Names that a module imports, with the modules that they come from; a module comes from itself."""
    found = {}
    # Some stand `if TYPE_CHECKING`: those of a package that imports its names when they are asked for.
    for statement in ast.walk(ast.parse(file_of(module).read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                own = f"{statement.module}.{alias.name}"
                found[alias.name] = own if file_of(own).is_file() else statement.module
    return found


def defined(module: str) -> set[str]:
    """Functions and classes of a module, its own and those that it imports."""
    body = ast.parse(file_of(module).read_text(encoding="utf-8")).body
    own = {each.name for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    return own | {name for name, origin in imported(module).items() if not origin.endswith(f".{name}")}


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


if __name__ == "__main__":
    sys.exit(main())
