"""The Triton kernels on a GPU: the same checks as on the CPU, and what only a GPU has (pinned memory, streams)."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import kernel_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WORDS = pytest.mark.parametrize("w", [1, 2, 4, 8])


@WORDS
@pytest.mark.parametrize("density", [0.003, 0.2, 0.9])
def test_scatter(w: int, density: float) -> None:
    checks.scatter("cuda", w, density, seed=w)


@WORDS
@pytest.mark.parametrize("density", [0.003, 0.9])
def test_scatter_from_pinned_memory(w: int, density: float) -> None:
    checks.streamed(w, density, seed=w)


@WORDS
@pytest.mark.parametrize("density", [0.001, 0.05, 0.6])
def test_compact(w: int, density: float) -> None:
    checks.compact("cuda", w, density, seed=w, span_nbytes=300_000)


@WORDS
def test_compact_with_the_snapshot_in_pinned_memory(w: int) -> None:
    checks.compact("cuda", w, 0.01, seed=w, span_nbytes=100_000, pinned=True)


@pytest.mark.parametrize("pinned", [False, True])
def test_compact_of_more_than_there_is_room_for(pinned: bool) -> None:
    checks.compact_rooms("cuda", pinned)


@WORDS
@pytest.mark.parametrize("density", [0.001, 0.4])
def test_audit_and_dense_xor(w: int, density: float) -> None:
    checks.walk("cuda", w, density, seed=w)


def test_broken_entries_are_counted_and_write_nothing() -> None:
    checks.broken("cuda")


def test_case_62_tensor_larger_than_4_gib() -> None:
    checks.large("cuda")
