"""The walk over an anchor's tiles: what it keeps while a tile waits for its other part."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megasync.receiver import anchor
from megasync.receiver.fetch import Fetched


def test_a_tile_that_waits_for_its_other_part_keeps_itself_and_not_the_range_it_came_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An anchor may be larger than memory: of a tile that a cut crosses, only its own words may stay."""
    ids, tiles = np.array([0, 1, 0]), np.array([0, 0, 0])

    def batches(*_: Any, **__: Any) -> Iterator[list[tuple[int, int, None, np.ndarray]]]:
        read = np.arange(1000, dtype="<u2")
        range_read = weakref.ref(read)
        yield [(0, 0, None, read[10:14])]
        del read
        yield [(1, 0, None, np.zeros(4, "<u2"))]
        assert range_read() is None
        yield [(0, 0, None, np.array([1, 2, 3, 4], "<u2"))]

    monkeypatch.setattr(anchor, "fetch", batches)
    monkeypatch.setattr(anchor, "published", lambda binding: np.empty(0, np.int64))
    binding: Any = SimpleNamespace(
        frames_of=lambda manifest: np.arange(3), needs=lambda ids, tiles: np.ones(3, bool), schema=None
    )
    manifest: Any = SimpleNamespace(frames=SimpleNamespace(touched=(np.arange(3), ids, tiles)))
    reader: Any = None
    found = [(i, words.tolist()) for i, _, _, words in anchor.tiles_of(binding, reader, manifest, None, Fetched())]
    assert found == [(1, [0, 0, 0, 0]), (0, [10 ^ 1, 11 ^ 2, 12 ^ 3, 13 ^ 4])]
