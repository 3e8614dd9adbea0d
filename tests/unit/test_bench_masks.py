"""Masks of the benchmarks: densities, values and the bound, against other ways to count."""

from __future__ import annotations

from math import comb, log2

import numpy as np
import pytest

from launch.bench.masks import KINDS, STEPS, Histogram, bound_nbytes, draw, position_bits, uniform_positions, value_bits

NUM = 1 << 20


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_has_its_density_and_no_zero_value(name: str) -> None:
    kind = KINDS[name]
    positions, values = draw(kind, NUM, np.random.default_rng(0))
    assert (np.diff(positions) > 0).all()
    assert positions[0] >= 0
    assert positions[-1] < NUM * kind.eligible
    assert values.all()
    assert values.dtype.itemsize == kind.word_nbytes
    assert len(values) == len(positions) == pytest.approx(kind.density * NUM, rel=0.5 if kind.clustered else 0.15)


@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.03, 0.3])
def test_uniform_positions_are_uniform(density: float) -> None:
    found = uniform_positions(NUM, density, np.random.default_rng(1))
    assert len(found) == len(np.unique(found)) == pytest.approx(density * NUM, abs=5 * (density * NUM) ** 0.5)
    assert float(found.mean()) == pytest.approx(NUM / 2, rel=3 / len(found) ** 0.5)


def test_clustered_masks_are_clustered() -> None:
    rng = np.random.default_rng(2)
    blocks, _ = draw(KINDS["fp4-blocks"], NUM, rng)
    _, filled = np.unique(blocks // 8, return_counts=True)
    assert float(filled.mean()) == pytest.approx(0.6 * 8, rel=0.1)
    rows, _ = draw(KINDS["fp4-rows"], NUM, rng)
    per_row = np.bincount(rows // 16_384, minlength=NUM // 16_384)
    assert float(per_row.var()) > 10 * float(per_row.mean())


def test_position_bits_are_the_binomial_coefficient() -> None:
    for n, k in ((1, 1), (10, 3), (1000, 1), (5000, 2500)):
        assert position_bits(n, k) == pytest.approx(log2(comb(n, k)), abs=1e-6)


def test_value_bits_are_the_entropy() -> None:
    assert value_bits(np.array([7, 7, 7], np.uint8)) == 0
    assert value_bits(np.arange(256, dtype=np.uint16)) == pytest.approx(256 * 8)
    assert value_bits(np.array([1, 1, 1, 2], np.uint8)) == pytest.approx(4 * (2 - 0.75 * log2(3)))


def test_published_bounds_are_reproduced() -> None:
    """Bounds of masks A to D in percent of the mask, as measured by other code."""
    published = {"article": 0.122, "uniform": 0.209, "fp4": 0.283}
    for name, percent in published.items():
        kind = KINDS[name]
        _, values = draw(kind, 8 << 20, np.random.default_rng(3))
        found = bound_nbytes(int((8 << 20) * kind.eligible), values) / (8 << 20) * 100
        assert found == pytest.approx(percent, rel=0.03), name


@pytest.mark.parametrize("dtype", STEPS)
def test_a_bound_of_pieces_is_that_of_the_whole(dtype: str) -> None:
    rng = np.random.default_rng(4)
    pieces = [STEPS[dtype](rng, n) for n in (10, 0, 500)]
    histogram = Histogram(pieces[0].dtype.itemsize)
    for values in pieces:
        histogram.add(4000, values)
    whole = np.concatenate(pieces)
    assert histogram.num_changed == 510
    assert histogram.bound_nbytes == pytest.approx(bound_nbytes(12_000, whole))
    assert Histogram(1).bound_nbytes == 0


def test_densities_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask article: density 0\.9"):
        draw(KINDS["article"], 1000, np.random.default_rng(0), 0.9)
