"""The receiver's own suites over the scatter backend: with CPU tensors its kernels' references run, and must do the same."""

from __future__ import annotations

import pytest

from megasync.receiver import backends
from tests.unit.test_receiver_layouts import *  # noqa: F403
from tests.unit.test_receiver_ranks import *  # noqa: F403
from tests.unit.test_receiver_shadow import *  # noqa: F403
from tests.unit.test_receiver_update import *  # noqa: F403


@pytest.fixture(autouse=True)
def _scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._BY_DEVICE, "cpu", "scatter")
