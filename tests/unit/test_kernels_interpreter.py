"""The Triton kernels on the CPU, in Triton's interpreter, on tiny inputs. Skipped where Triton is not installed.

The interpreter is chosen when Triton is imported, so each check runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", ["scatter_tiny", "compact_tiny", "compact_rooms", "walk_tiny"])
def test_interpreted(check: str) -> None:
    """Compares with the same oracles as the GPU tests."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "tests.gpu.kernel_checks", check]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{check} ok" in done.stdout
