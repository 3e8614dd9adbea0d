"""Tallies: digest sums of all ranks of an engine, added up and compared where ranks hold the same words.

Primary words add up to the whole tensor. Words that a rank holds as a replica (a norm on every tensor-parallel rank) do
not enter the sum; they are compared with the rank that holds the same slice as its primary. Used by audit, stage and
apply. Must import nothing above bind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from megasync.errors import ReplicaDriftError
from megasync.receiver.bind import Binding
from megasync.receiver.sums import Sums
from megasync.receiver.votes import vote
from megasync.schema import names_of

_ROWS = 1 << 15
"""Tensors whose sums go to the other ranks at once: to pack those of 100,000 would keep the interpreter from an engine that
decodes in this process for longer than a token may wait."""

_NOTHING = memoryview(b"")


class _Count(msgspec.Struct, array_like=True, frozen=True):
    primaries: memoryview
    mirror_ids: memoryview
    mirrors: memoryview


def tally(
    binding: Binding, what: str, ids: np.ndarray, body: Callable[[], Sequence[Iterable[Sums]]]
) -> list[np.ndarray]:
    """Run the body on every rank and add up its sums. *Collective*.

    Args:
        binding: This rank.
        what: Names the stage in messages.
        ids: int64 ``[K]``, ascending: the tensors concerned, the same on every rank.
        body: Gives one or more columns of sums of this rank's words: primaries under their tensor id, replicas under
            id + number of tensors (`Binding.replica_id`).

    Returns:
        For each column uint64 ``[K, 2]``, totals over the engine.

    Raises:
        ReplicaDriftError: A replica's words are not those of its primary; every rank raises it.
        RankFailedError: The body failed on a rank.
    """
    with vote(binding.engine, what) as ballot:
        columns = [Sums.join(c) for c in body()]
        mine = np.stack([c.over(ids) for c in columns])
        ballot.data = msgspec.msgpack.encode(_count(binding, ids, columns, mine[:, :_ROWS]))
    counts = _counts(ballot.result)
    _compare(binding, what, counts)
    total = np.zeros(mine.shape, dtype=np.uint64)
    _add(total[:, :_ROWS], counts)
    for first in range(_ROWS, len(ids), _ROWS):
        with vote(binding.engine, what) as ballot:
            some = np.ascontiguousarray(mine[:, first : first + _ROWS])
            ballot.data = msgspec.msgpack.encode(_Count(_view(some.astype("<u8", copy=False)), _NOTHING, _NOTHING))
        _add(total[:, first : first + _ROWS], _counts(ballot.result))
    return list(total)


def _counts(ballots: Sequence[memoryview]) -> list[_Count]:
    return [msgspec.msgpack.decode(b, type=_Count) for b in ballots]


def _add(total: np.ndarray, counts: Sequence[_Count]) -> None:
    """Add every rank's sums of some tensors to ``total``, uint64 ``[columns, n, 2]``."""
    for c in counts:
        total += np.frombuffer(c.primaries, "<u8").reshape(total.shape)


def _count(binding: Binding, ids: np.ndarray, columns: Sequence[Sums], mine: np.ndarray) -> _Count:
    """Primaries' sums, and for every mirrored slice among ``ids`` that this rank has a side of, its own sums of it."""
    rows: list[int] = []
    keys: list[int] = []
    rank = binding.engine.rank
    for n, m in enumerate(binding.mirrors):
        if rank in (m.replica, m.primary) and _contains(ids, m.tensor_id):
            rows.append(n)
            keys.append(binding.replica_id(m.tensor_id) if rank == m.replica else m.tensor_id)
    wanted, which = np.unique(np.array(keys, dtype=np.int64), return_inverse=True)
    packed = np.stack([c.over(wanted)[which] for c in columns], axis=1)
    return _Count(_view(mine.astype("<u8", copy=False)), _view(np.array(rows, "<i8")), _view(packed.astype("<u8")))


def _view(x: np.ndarray) -> memoryview:
    """The bytes of an array, not copied where they lie together."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _compare(binding: Binding, what: str, counts: Sequence[_Count]) -> None:
    found: dict[tuple[int, int], memoryview] = {}
    for rank, c in enumerate(counts):
        numbers = np.frombuffer(c.mirror_ids, "<i8")
        size = len(c.mirrors) // max(len(numbers), 1)
        for i, n in enumerate(numbers.tolist()):
            found[rank, n] = c.mirrors[i * size : (i + 1) * size]
    drifted = [m for n, m in enumerate(binding.mirrors) if found.get((m.replica, n)) != found.get((m.primary, n))]
    if drifted:
        listed = "; ".join(
            f"{names_of(binding.schema, [m.tensor_id])} on rank {m.replica}, primary on rank {m.primary}"
            for m in drifted[:10]
        )
        raise ReplicaDriftError(
            f"{what}: {len(drifted)} replicas differ from their primaries ({listed}): load the weights anew"
        )


def _contains(ids: np.ndarray, tensor_id: int) -> bool:
    at = int(np.searchsorted(ids, tensor_id))
    return at < len(ids) and int(ids[at]) == tensor_id
