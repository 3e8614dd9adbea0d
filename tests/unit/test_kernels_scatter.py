"""Scatter: the plain-torch specification against numpy and the layout floor, word by word."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasync.kernels.scatter import new_lanes, scatter_xor_, touched_sums_
from tests.gpu import kernel_cases as cases


@pytest.mark.parametrize("density", [0.003, 0.2, 0.9])
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_apply_and_sums_equal_the_oracle(w: int, density: float) -> None:
    case = cases.scatter_case(w, density, seed=w)
    after, sums = cases.oracle(case)
    before = {k: v.clone() for k, v in case.storages.items()}
    checked, faults = new_lanes(case.plan), torch.zeros(1, dtype=torch.int32)
    touched_sums_(case.plan, case.planes, checked, faults)
    assert int(faults) == 0
    assert all(torch.equal(case.storages[k], before[k]) for k in before)
    lanes = new_lanes(case.plan)
    scatter_xor_(case.plan, case.planes, lanes, touched_old=True)
    assert torch.equal(lanes, checked)
    assert [cases.as_lanes(r) for r in lanes] == sums
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].numpy(), want, err_msg=name)
    scatter_xor_(case.plan, case.planes)
    assert all(torch.equal(case.storages[k], before[k]) for k in before)
