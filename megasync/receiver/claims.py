"""Claims: what the ranks of an engine tell each other when they bind, and what follows from it.

Each rank says which words have their primary place on it, and which slices it holds as a replica of another rank's.
Used by bind. Must import nothing above leads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from megasync.errors import PlanError
from megasync.layout.modes import Layout
from megasync.receiver.engine import Engine
from megasync.receiver.leads import Held
from megasync.schema import Schema

_SHOWN = 50
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mirror:
    """A slice that one rank holds as a replica of another rank's primary.

    Attributes:
        tensor_id: The tensor.
        replica: Rank of the replica.
        primary: Rank of the primary.
    """

    tensor_id: int
    replica: int
    primary: int


class Claims(msgspec.Struct, array_like=True, frozen=True):
    """What a rank tells the others.

    Attributes:
        words: int64 by tensor, words with their primary place on it.
        slices: From ``slices``.
    """

    words: bytes
    slices: list[tuple[int, list[int], bool]]


def coverage(schema: Schema, layouts: Mapping[int, Layout]) -> np.ndarray:
    """Words of each tensor that have their primary place on this rank."""
    out = np.zeros(len(schema.tensors), dtype=np.int64)
    for i, x in layouts.items():
        units = sum(r.num_units * (2 * x.word_nbytes // x.units_per_word(r)) for r in x.records if r.primary)
        out[i] = units // (2 * x.word_nbytes)
    return out


def slices(held: Mapping[int, Held]) -> list[tuple[int, list[int], bool]]:
    """Slices that are all primaries or all replicas: tensor id, start and stop, and which of the two."""
    out = []
    for i, h in held.items():
        leading = {r.primary for r, ok in zip(h.layout.records, h.lead, strict=True) if ok}
        if len(leading) == 1:
            out.append((i, [*h.layout.start, *h.layout.stop], leading.pop()))
    return out


def mirrors(claims: Sequence[Claims]) -> tuple[Mirror, ...]:
    """Which replicas can be compared with a primary of the same slice.

    Args:
        claims: Of every rank, in rank order.
    """
    primary = {(i, tuple(box)): rank for rank, c in enumerate(claims) for i, box, ok in c.slices if ok}
    replicas = [(i, tuple(box), rank) for rank, c in enumerate(claims) for i, box, ok in c.slices if not ok]
    alone = sum((i, box) not in primary for i, box, _ in replicas)
    if alone:
        _log.warning("%d replicated slices have no rank with the same slice as primary: they are not compared", alone)
    return tuple(Mirror(i, rank, primary[i, box]) for i, box, rank in replicas if (i, box) in primary)


def check_coverage(schema: Schema, total: np.ndarray, excluded: Mapping[int, str], engine: Engine) -> None:
    """Every word of every tensor has one primary place on the engine's ranks together.

    Args:
        schema: The run's schema.
        total: int64 ``[num_tensors]``, words with a primary place, over all ranks.
        excluded: Tensor id to reason: no rank holds it.
        engine: For messages.

    Raises:
        PlanError: Listing the tensors that are not held, partly held, or held twice.
    """
    missing: list[str] = []
    partly: list[str] = []
    twice: list[str] = []
    for i, spec in enumerate(schema.tensors):
        found = int(total[i])
        if i in excluded and found:
            twice.append(f"{spec.name} (excluded by another rank, {found} words held)")
        elif i not in excluded and found != spec.num_words:
            (missing if not found else partly if found < spec.num_words else twice).append(
                f"{spec.name} ({found} of {spec.num_words} words)" if found else spec.name
            )
    listed = [
        f"{what}: {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for what, names in (("not held", missing), ("partly held", partly), ("held by several primaries", twice))
        if names
    ]
    if listed:
        raise PlanError(
            f"{engine.name} with {engine.num_ranks} ranks does not resolve {len(missing) + len(partly) + len(twice)} tensors "
            f"of run {schema.run!r}: {'; '.join(listed)}. Nothing was touched: correct the adapter, or let it exclude them"
        )
