"""Tests that look at the free memory of the GPU have it to themselves: other workers of pytest-xdist wait meanwhile."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOLDER = Path(tempfile.gettempdir()) / f"megasync-gpu-tests-{os.getuid()}"


@pytest.fixture(autouse=True)
def _share_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Readers and writers over two files; the first keeps new readers from passing a writer that waits."""
    _FOLDER.mkdir(exist_ok=True)
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with (_FOLDER / "door").open("w") as door, (_FOLDER / "gpu").open("w") as gpu:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(gpu, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
