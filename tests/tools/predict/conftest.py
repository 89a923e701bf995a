"""What every prediction of the tests would count anew."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen_objects_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/conftest.py` has frozen what was imported, and Python goes through all of it to say that there is some."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
