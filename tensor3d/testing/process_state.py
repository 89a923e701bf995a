"""What a function may change of the process that calls it: noted beforehand, put back afterwards.

A process that serves many tests in turn must give each the state that a new process would have.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tensor3d.torch_private import compiler_settings, modes_entered, reset_compiler

_SECONDS_TO_END = 1.0
"""That a thread or process of the function's is given to end by itself."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One setting of the process, as it was."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    value: Any

    def put_back(self) -> None:
        found = self.read()
        same = torch.equal(found, self.value) if isinstance(found, torch.Tensor) else found == self.value
        if not same:
            self.write(self.value)


class ProcessState:
    """The state of this process now: settings of torch, random generators, environment, signals, the modules' names.

    Args:
        packages: top-level packages whose modules are watched: names that a function sets or deletes in a module, a
            class or a table of theirs are put back, and their `functools` caches emptied.
    """

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self._packages = tuple(packages)
        self._settings = [_Setting(read=read, write=write, value=read()) for read, write in _settings()]
        self._random, self._numpy = random.getstate(), np.random.get_state()
        self._environment = dict(os.environ)
        self._paths = list(sys.path), list(sys.argv)
        catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        self._signals = {number: signal.getsignal(number) for number in catchable}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._filters = list(warnings.filters)
        self._root_handlers = list(logging.root.handlers)
        self._levels = {name: logger.level for name, logger in _loggers()}
        self._configurations = [(config, config.get_config_copy()) for config in compiler_settings()]
        self._rights = _rights()
        self._threads = set(threading.enumerate())
        self._device = torch.get_default_device()
        self._modules = 0
        self._names: dict[object, dict[str, Any]] = {}
        self._tables: dict[int, tuple[Any, Any]] = {}
        self._caches: list[functools._lru_cache_wrapper[Any]] = []
        self.watch_new_modules()

    def watch_new_modules(self) -> None:
        """Notes the names of modules that were imported since; call it before a function of theirs runs."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        for module in [module for name, module in sys.modules.items() if self._is_watched(name)]:
            for owner in (module, *_classes_of(module)):
                if owner not in self._names:
                    self._names[owner] = dict(vars(owner))
                    for name, value in self._names[owner].items():
                        if isinstance(value, (dict, list, set)) and not _is_own(name):
                            self._tables[id(value)] = value, value.copy()
                        if isinstance(value, functools._lru_cache_wrapper) and self._is_watched(value.__module__):
                            self._caches.append(value)

    def put_back(self) -> list[str]:
        """Puts back what changed since. Returns what could not be, for a person: threads or processes that live on."""
        self._put_back_names()
        for setting in self._settings:
            setting.put_back()
        if torch.get_default_device() != self._device:
            torch.set_default_device(None)
        torch.set_flush_denormal(False)
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        sys.path[:], sys.argv[:] = self._paths
        self._put_back_signals()
        self._put_back_logging()
        if warnings.filters != self._filters:
            warnings.filters[:] = self._filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        for config, values in self._configurations:
            if config.get_config_copy() != values:
                with warnings.catch_warnings():  # of settings that are there but deprecated
                    warnings.simplefilter("ignore")
                    config.load_config(values)
        reset_compiler()
        return [*self.left_running(), *self._left_changed()]

    def _put_back_names(self) -> None:
        for owner, names in self._names.items():
            now = vars(owner)
            if _equal(now, names):
                continue
            for name in [name for name in now if name not in names and not _is_own(name)]:
                if not isinstance(now[name], ModuleType):  # a submodule that was imported since
                    delattr(owner, name)
            for name, value in names.items():
                if not _is_own(name) and (name not in now or now[name] is not value):
                    setattr(owner, name, value)
        for cache in self._caches:
            cache.cache_clear()
        for table, content in self._tables.values():
            if not _equal(table, content):
                table.clear()
                table.extend(content) if isinstance(table, list) else table.update(content)

    def _put_back_signals(self) -> None:
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        faulthandler.cancel_dump_traceback_later()

    def _put_back_logging(self) -> None:
        logging.disable(logging.NOTSET)
        logging.root.handlers[:] = self._root_handlers
        for name, logger in _loggers():
            level = self._levels.get(name, logging.NOTSET)
            if logger.level != level:
                logger.setLevel(level)

    def left_running(self) -> Iterator[str]:
        """Threads and processes that were not there before and do not end by themselves."""
        deadline = time.monotonic() + _SECONDS_TO_END
        for thread in threading.enumerate():
            if type(thread).__name__ == "TMonitor":  # which tqdm keeps for all bars to come
                thread.exit()  # type: ignore[attr-defined]
                thread.tqdm_cls.monitor = None  # type: ignore[attr-defined]
        for thread in set(threading.enumerate()) - self._threads:
            # A thread may itself wait until this one runs Python code, as that at the end of a cube does.
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(0.001)
            if thread.is_alive():
                yield f"thread {thread.name}"
        for child in multiprocessing.active_children():
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive():
                yield f"process {child.name}"

    def _left_changed(self) -> Iterator[str]:
        if _rights() != self._rights:
            yield "the process with other rights or limits"
        if modes_entered():
            yield "a mode of torch that was entered and not left"

    def _is_watched(self, name: str) -> bool:
        return name.partition(".")[0] in self._packages


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How each setting is read and written."""
    backends = torch.backends
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_rng_state, torch.set_rng_state
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _attribute(torch.utils.deterministic, "fill_uninitialized_memory")
    yield _attribute(backends.mkldnn, "enabled")
    yield _attribute(backends.cuda.matmul, "allow_tf32")
    yield backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp
    yield backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp
    yield backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp
    yield lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)
    yield sys.getrecursionlimit, sys.setrecursionlimit
    yield gc.isenabled, lambda on: gc.enable() if on else gc.disable()
    for name in ("stdin", "stdout", "stderr", "excepthook", "unraisablehook"):
        yield _attribute(sys, name)
    yield _attribute(threading, "excepthook")
    yield _attribute(warnings, "showwarning")


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _rights() -> list[Any]:
    """User, group, and what the system grants the process: much of it cannot be taken back."""
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)]
    return [os.getuid(), os.geteuid(), os.getgid(), os.getegid(), *limits]


def _loggers() -> list[tuple[str, logging.Logger]]:
    known = [(name, logger) for name, logger in logging.root.manager.loggerDict.items()]
    return [("root", logging.root), *((name, logger) for name, logger in known if isinstance(logger, logging.Logger))]


def _classes_of(module: ModuleType) -> list[type]:
    return [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]


def _is_own(name: str) -> bool:
    """Whether Python itself writes the name of a module or class, such as `__warningregistry__` or `_abc_impl`."""
    return name.startswith("__") or name == "_abc_impl"


def _equal(now: Any, before: Any) -> bool:
    """Whether two tables hold the same. Python looks at identity first, so that this is quick where nothing changed."""
    try:
        return bool(now == before)
    except Exception:  # values that do not compare, such as tensors: another one than before
        return False
