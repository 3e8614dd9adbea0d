"""Checks of what a caller asks a layout for, so that a misspelt or impossible wish is refused where it is made.

Before it come calls of `compose`, `named` and `experts`; after it nothing, or an error that says what there is. This module
must import nothing of megasync but ``errors`` and ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Sequence

from megasync.errors import PlanError
from megasync.layout.modes import Remap
from megasync.layout.views import physical_range


def chosen(what: str, given: str, names: Sequence[str]) -> int:
    """Index of a name among those that there are, so that a misspelt one is never taken for another.

    Args:
        what: What is chosen, for the message.
        given: The name.
        names: All there are.

    Raises:
        ValueError: It is none of them.
    """
    if given not in names:
        raise ValueError(f"{what} {given!r} is none of {', '.join(map(repr, names))}")
    return names.index(given)


def require_rank(tp_rank: int, tp_size: int) -> None:
    """Refuse a rank outside its group.

    Raises:
        PlanError: With both numbers.
    """
    if not 0 <= tp_rank < tp_size:
        raise PlanError(f"rank {tp_rank} is not in a tensor-parallel group of {tp_size}")


def require_strides(storage: object, extents: Sequence[int], steps: Sequence[int]) -> None:
    """Refuse strides that cannot place a tensor, and a storage that has no name.

    Args:
        storage: Name of the live storage.
        extents: Of the tensor that is placed.
        steps: Its strides.

    Raises:
        PlanError: Another number of strides than axes, or two words in one place (stride 0).
        TypeError: The storage is no name.
    """
    if not isinstance(storage, str):
        raise TypeError(f"a live storage goes by its name, got {storage!r}")
    if len(steps) != len(extents):
        raise PlanError(f"{len(steps)} strides for {len(extents)} axes")
    stuck = [a for a, (n, s) in enumerate(zip(extents, steps, strict=True)) if n > 1 and not s]
    if stuck:
        raise PlanError(f"axis {stuck[0]} of {tuple(extents)} has stride 0: its words would share a place")


def require_inside(record: Remap) -> None:
    """Refuse a record that reaches places before its storage.

    Raises:
        PlanError: With the first offset.
    """
    first, last = physical_range(record)
    if first < 0:
        raise PlanError(
            f"offsets {first}..{last} leave live storage {record.storage!r} at its start: correct base and strides"
        )
