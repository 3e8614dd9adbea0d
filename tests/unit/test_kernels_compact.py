"""Compaction: the plain-torch specification against the canonical tensors."""

from __future__ import annotations

import pytest

from tests.gpu import kernel_checks as checks


@pytest.mark.parametrize("density", [0.001, 0.05, 0.6])
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_planes_sums_and_snapshot_equal_the_oracle(w: int, density: float) -> None:
    checks.compact("cpu", w, density, seed=w, span_nbytes=300_000)
