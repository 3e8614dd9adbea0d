"""Checks of the Triton kernels against the oracles: run on a GPU by tests/gpu, on the CPU in Triton's interpreter.

``python -m tests.gpu.kernel_checks NAME...`` runs checks in the interpreter; TRITON_INTERPRET=1 must be set.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from megasync.kernels import dispatch
from megasync.kernels.scatter import new_lanes, scatter_xor_, touched_sums_
from tests.gpu import kernel_cases as cases


def scatter(device: str, w: int, density: float, seed: int = 0) -> None:
    """Apply, sums, check without writing, and undo."""
    case = cases.scatter_case(w, density, seed, device)
    after, sums = cases.oracle(case)
    before = {k: v.clone() for k, v in case.storages.items()}
    checked, faults = new_lanes(case.plan), torch.zeros(1, dtype=torch.int32, device=device)
    touched_sums_(case.plan, case.planes, checked, faults)
    assert int(faults) == 0
    assert [cases.as_lanes(r) for r in checked.cpu()] == sums
    assert all(torch.equal(case.storages[k], before[k]) for k in before)
    lanes = new_lanes(case.plan)
    scatter_xor_(case.plan, case.planes, lanes)
    assert [cases.as_lanes(r)[1] for r in lanes.cpu()] == [s[1] for s in sums]
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].cpu().numpy(), want, err_msg=name)
    scatter_xor_(case.plan, case.planes)
    assert all(torch.equal(case.storages[k], before[k]) for k in before)


def scatter_tiny(device: str) -> None:
    """All word sizes, few words."""
    for w in (1, 2, 4, 8):
        scatter(device, w, 0.0006)


if __name__ == "__main__":
    dispatch.uses_triton = lambda device: True
    for name in sys.argv[1:]:
        globals()[name]("cpu")
        print(name, "ok", flush=True)
