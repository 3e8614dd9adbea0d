"""Audit and dense XOR: the plain-torch specification against numpy and the layout floor."""

from __future__ import annotations

import pytest

from tests.gpu import kernel_checks as checks


@pytest.mark.parametrize("density", [0.001, 0.4])
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_audit_and_dense_xor_equal_the_oracle(w: int, density: float) -> None:
    checks.walk("cpu", w, density, seed=w)
