"""Settings for every test, the ranks that tests share, and where the time of a run went."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import settings

from tensor3d.live_objects import objects_of
from tests.default_type import default_type
from tests.ranks import PRELOAD, STANDING

# The same examples in every run, nothing stored between runs, and no deadline: the machine may be busy elsewhere.
settings.register_profile("tensor3d", max_examples=40, derandomize=True, database=None, deadline=None)
# Other examples in each run, and ten times as many: `make test-long`.
settings.register_profile("thorough", max_examples=400, database=None, deadline=None)
settings.load_profile("tensor3d")
# Models here are small: threads that wait for each other on a busy machine made them ten times slower.
torch.set_num_threads(1)
# Also in containers whose TORCH_ALLOW_TF32_CUBLAS_OVERRIDE says otherwise: tests on a GPU hold fp32 to 1e-4.
torch.set_float32_matmul_precision("highest")


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handles a signal that whoever started the tests had ignored, as `nohup` does."""


# What is ignored stays ignored in every child, and a shell cannot even trap it; what is handled is its default there.
for _signal in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _nothing)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    # What is imported from here on stays: to look through it for garbage again and again took a fifth of the time.
    gc.disable()
    worker = getattr(session.config, "workerinput", {}).get("workerid", "gw0")
    if worker != "gw0" and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        _import_from_the_end(session.config.rootpath)


def _import_from_the_end(root: Path) -> None:
    """All files of tests, the last first, in a process that is not the first of those that share a run. In a new clone
    pytest rewrites every assertion, longer than all else of a collection takes: each process does half of the files,
    and reads what the other has written of the rest."""
    for path in sorted((root / "tests").rglob("test_*.py"), reverse=True):
        with suppress(Exception, pytest.skip.Exception):  # which the collection that follows reports
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


CACHES = pytest.StashKey[list["functools._lru_cache_wrapper[Any]"]]()
"""Those of torch.distributed that a cube no longer finds and empties when it ends; done here after each test."""


def pytest_collection_finish(session: pytest.Session) -> None:
    caches = objects_of(functools._lru_cache_wrapper)
    session.config.stash[CACHES] = [each for each in caches if each.__module__.startswith("torch.distributed")]
    # Every cube that ends has the collector look through all objects. Half a million stay until the end of the run, and
    # took it 0.3 s each time.
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly and any(_has_ranks(item.path) for item in session.items):
        _start_forkserver(session.config)


def _start_forkserver(config: pytest.Config) -> None:
    """Starts the server that all ranks are forked from, beside the first tests. One server serves the whole process:
    if a tool under test starts it first, with what that tool preloads, every later rank has to import torch anew."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()  # ranks inherit it: what they write is shown with a test that fails
    forkserver.ensure_running()
    capture.suspend_global_capture()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    for each in item.config.stash[CACHES]:
        each.cache_clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--folder-times", action="store_true", help="print the seconds of each folder of tests, and starts of ranks"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How two processes share a run by `--dist loadscope` (`make test`, `make test-slow`): tests with ranks and whole
    jobs go to one, where they take both cores in turn; beside it the other takes the rest, file by file, which takes
    one core or waits. None: as another `--dist` says, test by test on the many cores of a GPU's host (`bench gpu`)."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class RanksAlone(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if _has_ranks(config.rootpath / file) or _has_jobs(config.rootpath / file) else file

    return RanksAlone(config, log)


@cache
def _has_ranks(file: Path) -> bool:
    return "from tests.ranks import" in file.read_text()


def _has_jobs(file: Path) -> bool:
    """Jobs through their launchers, which have limits of time; or hosts, whose network namespaces are the machine's."""
    return file.parent.name == "slow" or "from tests.hosts import" in file.read_text()


STARTS = pytest.StashKey[list[str]]()
"""For each start of standing ranks, in whatever process, why it was needed."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTS] = STANDING.starts


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes
        session.config.workeroutput["starts"] = STANDING.starts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[STARTS].extend(getattr(node, "workeroutput", {}).get("starts", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--folder-times"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{taken:8.1f}  {folder}")
    terminalreporter.section("starts of standing ranks")
    for start in config.stash[STARTS]:
        terminalreporter.line(start)


def pytest_unconfigure() -> None:
    STANDING.close()


@pytest.fixture
def fp64() -> Iterator[None]:
    with default_type(torch.float64):
        yield
