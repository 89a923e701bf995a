"""Texts in batches by their token slots, and workers whose start is not interrupted."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tools.common.workers import split, split_groups, starting_workers


def test_a_batch_is_split_by_its_slots() -> None:
    lengths = [3, 4, 5, 6, 20, 1]
    assert split(lengths, 12) == [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    assert split(lengths, 10, padded=True) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    assert split(lengths, 1000) == [slice(0, 6)]


def test_groups_of_texts_stay_whole() -> None:
    groups = [[2, 3], [4], [9, 9], [1, 1, 1]]
    assert split_groups(groups, 10) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    # With padding the first two need 3 * 4 slots, and the first alone 2 * 3.
    assert split_groups(groups, 11, padded=True) == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]
    assert split_groups(groups, 12, padded=True) == [slice(0, 2), slice(2, 3), slice(3, 4)]


def test_workers_are_started_whole_whenever_ctrl_c_comes() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), starting_workers():  # noqa: PT012 - it is raised at the end of the inner one
        signal.raise_signal(signal.SIGINT)
        told = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True, check=True)
        done.append(int(told.stdout.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    assert done == [1]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with starting_workers():
        done.append(2)
    assert done == [1, 2]
