"""Scatter: the plain-torch specification against numpy and the layout floor, word by word."""

from __future__ import annotations

import pytest
import torch

from megasync.kernels.records import pack_records
from megasync.kernels.scatter import new_lanes, touched_sums_
from megasync.kernels.scatter_plan import plan_scatter
from tests.gpu import kernel_cases as cases
from tests.gpu import kernel_checks as checks


@pytest.mark.parametrize("density", [0.003, 0.2, 0.9])
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_apply_and_sums_equal_the_oracle(w: int, density: float) -> None:
    checks.scatter("cpu", w, density, seed=w)


def test_sums_of_copies_equal_those_of_the_words_they_copy() -> None:
    case = cases.scatter_case(1, 0.02, 1)
    case.storages["copy"][:] = 0
    base, n = 10_000, 500 * 75
    case.storages["copy"][:n] = case.storages["s"][base : base + n]
    shapes, records = [t.shape for t in case.tensors], [t.records for t in case.tensors]
    copies = pack_records(1, shapes, records, case.storages, digest="copies")
    plan = plan_scatter(case.plan.tiles, case.plan.counts, copies)
    faults = torch.zeros(1, dtype=torch.int32)
    primary, copied = new_lanes(case.plan), new_lanes(plan)
    touched_sums_(case.plan, case.planes, primary, faults)
    touched_sums_(plan, case.planes, copied, faults)
    assert torch.equal(copied[1], primary[1])
    assert not bool(copied[[0, 2, 3]].any())
    case.storages["copy"][:n] ^= 1
    touched_sums_(plan, case.planes, copied.zero_(), faults)
    assert not torch.equal(copied[1], primary[1])


def test_broken_entries_are_counted_and_write_nothing() -> None:
    checks.broken("cpu")


def test_case_23_counts_past_a_segment_never_reach_the_kernel() -> None:
    case = cases.scatter_case(2, 0.003, 2)
    counts = case.plan.counts.copy()
    counts[-1] = 1 << 20
    with pytest.raises(ValueError, match="counts do not fit"):
        plan_scatter(case.plan.tiles, counts, case.records)


def test_case_62_words_past_4_gib_are_reached_exactly() -> None:
    checks.large("cpu")
