"""Checks of the Triton kernels against the oracles: run on a GPU by tests/gpu, on the CPU in Triton's interpreter.

``python -m tests.gpu.kernel_checks NAME...`` runs checks in the interpreter; TRITON_INTERPRET=1 must be set.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from megasync.kernels import dispatch
from megasync.kernels.compact import compact_
from megasync.kernels.scatter import new_lanes, scatter_xor_, touched_sums_
from megasync.kernels.walk import audit_, dense_xor_
from megasync.kernels.walk_plan import plan_audit, plan_dense
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


def compact(
    device: str,
    w: int,
    density: float,
    seed: int = 0,
    span_nbytes: int | None = None,
    pinned: bool = False,
    tiny: bool = False,
) -> None:
    """Planes, sums and snapshot of every span; a second pass finds nothing."""
    case = cases.compact_case(w, density, seed, device, tiny, pinned)
    want, sums = cases.compact_oracle(case)
    lanes = torch.zeros((len(case.shapes), 4), dtype=torch.int64, device=device)
    parts = list(compact_(case.plan, case.snapshot, lanes, span_nbytes=span_nbytes))
    got = cases.join([p.planes for p in parts])
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.entries, want.entries)
    assert torch.equal(got.dense, want.dense)
    assert [cases.as_lanes(r) for r in lanes.cpu()] == sums
    assert cases.updated(case)
    again = cases.join([p.planes for p in compact_(case.plan, case.snapshot, lanes)])
    assert int(again.counts.sum()) == 0
    assert [cases.as_lanes(r) for r in lanes.cpu()] == sums


def compact_tiny(device: str) -> None:
    """All word sizes, dense, sparse and unchanged segments."""
    for w in (1, 2, 4, 8):
        compact(device, w, 0.001, span_nbytes=40_000, tiny=True)


def walk(device: str, w: int, density: float, seed: int = 0, tiny: bool = False) -> None:
    """Audit, dense XOR with sums, audit again, and the XOR undone."""
    case = cases.walk_case(w, density, seed, device, tiny)
    plan = plan_audit(case.records)
    lanes = torch.zeros((len(case.tensors), 4), dtype=torch.int64, device=device)
    audit_(plan, lanes)
    assert [cases.as_lanes(r)[0] for r in lanes.cpu()] == cases.audit_oracle(case)
    after, sums = cases.oracle(cases.dense_as_scatter(case))
    before = {k: v.clone() for k, v in case.storages.items()}
    dense = plan_dense(case.tiles, case.offsets, case.records)
    assert dense.fast
    assert tiny or dense.slow
    changed = torch.zeros_like(lanes)
    dense_xor_(dense, case.mask, changed)
    assert [cases.as_lanes(r) for r in changed.cpu()] == sums
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].cpu().numpy(), want, err_msg=name)
    again = torch.zeros_like(lanes)
    audit_(plan, again)
    assert torch.equal(again[:, :2], lanes[:, :2] + changed[:, 2:])
    dense_xor_(dense, case.mask)
    assert all(torch.equal(case.storages[k], before[k]) for k in before)


def walk_tiny(device: str) -> None:
    """All word sizes; nibbles and odd layouts for bytes."""
    for w in (1, 2, 4, 8):
        walk(device, w, 0.01, tiny=True)


def scatter_tiny(device: str) -> None:
    """All word sizes, few words."""
    for w in (1, 2, 4, 8):
        scatter(device, w, 0.0006)


if __name__ == "__main__":
    dispatch.uses_triton = lambda device: True
    for name in sys.argv[1:]:
        globals()[name]("cpu")
        print(name, "ok", flush=True)
