"""Water-filling against a naive pour and against the bound over all subsets of ranks (max-flow min-cut)."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megasync.trainer.plan_fill import divide, fill, level, lower_bound


def pour(loads: list[int], total: int) -> list[int]:
    """One byte at a time onto the lowest rank."""
    given = [0] * len(loads)
    for _ in range(total):
        i = min(range(len(loads)), key=lambda r: (loads[r] + given[r], loads[r]))
        given[i] += 1
    return [g + x for g, x in zip(given, loads, strict=True)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 120))
def test_level_is_a_pour_byte_by_byte(loads: list[int], total: int) -> None:
    given = level(np.array(loads, dtype=np.int64), total)
    assert given.sum() == total
    assert (given >= 0).all()
    assert sorted((np.array(loads) + given).tolist()) == sorted(pour(loads, total))


def test_level_is_exact_beyond_53_bits() -> None:
    total = (1 << 60) + 1
    given = level(np.array([0, 1 << 59, 3], dtype=np.int64), total)
    assert int(given.sum()) == total
    assert np.ptp(given + np.array([0, 1 << 59, 3])) <= 1


def best_possible(members: list[list[int]], weights: list[int], num_ranks: int) -> int:
    """Largest load of the best plan: over all subsets of ranks, the bytes that must lie on them, divided."""
    best = 0
    for size in range(1, num_ranks + 1):
        for ranks in combinations(range(num_ranks), size):
            inside = sum(w for m, w in zip(members, weights, strict=True) if set(m) <= set(ranks))
            best = max(best, -(-inside // size))
    return best


@st.composite
def any_sets(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    num_ranks = draw(st.integers(1, 7))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted)
    members = draw(st.lists(ranks, min_size=1, max_size=9, unique_by=tuple))
    weights = draw(st.lists(st.integers(0, 10**9), min_size=len(members), max_size=len(members)))
    return members, weights, num_ranks


@settings(deadline=None, max_examples=200)
@given(any_sets())
@example(([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]], [10**9, 0, 0, 0, 1], 6))
@example(([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [0]], [1, 1, 1, 1, 1, 10**9], 6))
def test_fill_reaches_the_optimum_of_any_holder_sets(case: tuple[list[list[int]], list[int], int]) -> None:
    members, weights, num_ranks = case
    arrays, w = [np.array(m) for m in members], np.array(weights, dtype=np.int64)
    shares, loads = fill(arrays, w, num_ranks)
    again = np.zeros(num_ranks, dtype=np.int64)
    for m, share, weight in zip(arrays, shares, weights, strict=True):
        assert share.sum() == weight
        assert (share >= 0).all()
        again[m] += share
    assert again.tolist() == loads.tolist()
    best = best_possible(members, weights, num_ranks)
    bound = lower_bound(arrays, w, loads)
    assert bound <= best <= loads.max()
    assert loads.max() <= best * 1.002 + num_ranks


def test_nested_groups_need_one_pass_and_end_exactly_level() -> None:
    # Experts on 4 ranks each (EP 4 of 16), dense shards on 8 (TP 2), norms on all 16.
    experts = [np.arange(e, 16, 4) for e in range(4)]
    dense = [np.arange(t, 16, 2) for t in range(2)]
    members = [*experts, *dense, np.arange(16)]
    weights = np.array([4000, 400, 800, 1200, 5000, 5000, 3001], dtype=np.int64)
    _, loads = fill(members, weights, 16)
    # Even ranks must bear experts 0 and 2 and their dense shard, 9,800 bytes, whatever the plan; the norms go to the others.
    assert loads[0::2].tolist() == [1225] * 8
    assert sorted(loads[1::2].tolist()) == [1200] * 7 + [1201]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_divide_gives_runs_and_misses_a_share_by_less_than_a_unit(weights: list[int], loads: list[int]) -> None:
    w = np.array(weights, dtype=np.int64)
    shares = level(np.array(loads, dtype=np.int64), int(w.sum()))
    owner = divide(w, shares)
    assert (np.diff(owner) >= 0).all()
    got = np.bincount(owner, weights=w, minlength=len(loads))
    assert (np.abs(got - shares) <= max(weights)).all()
