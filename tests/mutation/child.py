"""What a forked child does: it runs tests in a copy of the tree, with torch and pytest already there."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.utils.checkpoint",
    "safetensors.torch",
    "tokenizers",
    "tqdm",
    "transformers.models.bert.modeling_bert",
)
OURS = ("tensor3d", "models", "tools", "tests")
_NO_IMPORT = 70
"""Exit status: the mutated module cannot be imported."""


def preload() -> None:
    """Imports, once for all children, what is slow and not ours. It starts no thread."""
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:  # an extra that is not installed
            continue


def run(root: Path, scratch: Path, tests: Sequence[str], module: str | None, all_of_them: bool) -> NoReturn:
    """Runs `tests` in the tree at `root` and ends the process. Leaves report.json and log.txt in `scratch`.

    Args:
        module: is imported first: tests that merely cannot import it would say nothing of the mutation.
        all_of_them: False stops at the first failure.
    """
    status = 1
    try:
        os.setsid()  # whoever ends this child by its group ends what its tests have started too
        _redirect(scratch / "log.txt")
        _settle(root, scratch)
        if module is not None:
            _import(module)
        report = Report()
        # Plugins of libraries that are imported already cannot be rewritten, which is nothing to these tests.
        known = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = ["-q", *known, "-p", "no:cacheprovider", f"--basetemp={scratch / 'base'}", f"--rootdir={root}"]
        status = int(pytest.main([*arguments, *([] if all_of_them else ["-x"]), *tests], plugins=[report]))
        (scratch / "report.json").write_text(json.dumps(report.outcomes), encoding="utf-8")
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # not the parent's exit handlers


class Report:
    """A plugin of pytest: the node ids by outcome."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "uncollected": []}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes["uncollected"].append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.when == "call" or report.skipped:
            self.outcomes[report.outcome].append(report.nodeid)


def _redirect(log: Path) -> None:
    null, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _settle(root: Path, scratch: Path) -> None:
    """Makes the copy the place from which this process, and every one that its tests start, imports our code."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")  # multiprocessing would import the audit into every rank
    # The server that the parent may have is not this process's child, and its ranks would run the original code.
    forkserver._forkserver.__init__()  # type: ignore[misc]
    original = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", original))]
    temporary = scratch / "tmp"
    temporary.mkdir(parents=True)
    # An installation that is editable maps tensor3d to another folder, but only for what no path has.
    os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(temporary))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    os.chdir(root)


def _import(module: str) -> None:
    try:
        found = importlib.import_module(module)
    except BaseException:
        traceback.print_exc()
        sys.exit(_NO_IMPORT)
    assert str(found.__file__).startswith(os.getcwd()), f"{module} comes from {found.__file__}, not from the copy"
