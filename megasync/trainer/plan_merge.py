"""Descriptions of what ranks hold: encode one, put all together, encode the whole. Pure; metadata.py moves the bytes.

A description is msgpack with packed columns: the spec rows, and of each box its row (u32) and start and extent (i64).
Spec rows are compared as bytes and decoded once each. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from megasync.errors import FormatError, PlanError
from megasync.schema import Schema, decode_schema, make_schema
from megasync.trainer.plan_holdings import (
    HolderSets,
    Holdings,
    SetTable,
    brief_ranks,
    collector_paused,
    num_axes_of,
    require,
)
from megasync.types import DTYPE_NBYTES, Box, CutAxis, TensorSpec

_FORMAT = 1


class _Spec(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int
    cut: CutAxis
    block: tuple[int, ...]
    frozen: bool
    aliases: tuple[str, ...]
    formula: str
    group: str


_SPEC = msgspec.msgpack.Decoder(_Spec)


class _Description(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What one rank holds: spec rows by name; of each box its spec's row (u32), and start and extent (i64)."""

    format: int
    specs: list[bytes]
    rows: bytes
    coords: bytes


class _Merged(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What all ranks hold, or why that is not a model."""

    error: str
    world_size: int = 0
    schema: bytes = b""
    tensor_ids: bytes = b""
    coords: bytes = b""
    set_ids: bytes = b""
    set_offsets: bytes = b""
    members: bytes = b""


@collector_paused()
def describe(specs: Sequence[TensorSpec], boxes: Iterable[tuple[str, Box]]) -> bytes:
    """Describe what one rank holds.

    Args:
        specs: Every tensor that it holds a part of, in any order.
        boxes: Canonical name and box of each part, in any order; equal ones count once.

    Returns:
        The description; equal holdings give equal bytes.

    Raises:
        PlanError: Listing tensors described twice, of an unknown dtype, and boxes of no tensor or of another shape.
    """
    ordered = sorted(set(specs), key=lambda t: t.name)
    index = {t.name: i for i, t in enumerate(ordered)}
    faults = [f"{a.name} has two specs: {a} and {b}" for a, b in pairwise(ordered) if a.name == b.name]
    faults += [
        f"{t.name} has dtype {t.dtype}, which format 1 does not know" for t in ordered if t.dtype not in DTYPE_NBYTES
    ]
    packed: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, box in boxes:
        row = index.get(name)
        if row is None:
            faults.append(f"{name} has a piece but no spec")
            continue
        shape = ordered[row].shape
        inside = len(shape) == len(box.start) == len(box.extent) and all(
            s >= 0 and e >= 0 and s + e <= n for s, e, n in zip(box.start, box.extent, shape, strict=True)
        )
        if not inside:
            faults.append(f"{name} {list(shape)} has a piece at {list(box.start)} of extent {list(box.extent)}")
            continue
        packed.add((row, box.start, box.extent))
    require(faults, f"{len(faults)} faults in what this rank exports", "Correct the exporter; nothing was published")
    columns = sorted(packed)
    rows = np.array([c[0] for c in columns], dtype="<u4")
    coords = np.array([x for _, start, extent in columns for x in (*start, *extent)], dtype="<i8")
    table = [msgspec.msgpack.encode(_Spec(*_fields(t))) for t in ordered]
    return msgspec.msgpack.encode(_Description(_FORMAT, table, rows.tobytes(), coords.tobytes()))


@collector_paused()
def merge(run: str, classes: Sequence[tuple[Sequence[int], bytes | memoryview]]) -> tuple[Schema, Holdings]:
    """Put the descriptions of all classes together; pure.

    Args:
        run: Name of the run.
        classes: Ranks and description of each class.

    Returns:
        The schema, and every distinct box with the ranks that hold it.

    Raises:
        PlanError: Listing tensors about which ranks disagree, or a description that cannot be read.
    """
    known: dict[bytes, int] = {}
    rows: list[np.ndarray] = []
    coords: list[np.ndarray] = []
    mentions: list[np.ndarray] = []
    for ranks, blob in classes:
        try:
            d = msgspec.msgpack.decode(blob, type=_Description)
            local = np.array([known.setdefault(row, len(known)) for row in d.specs], dtype=np.int64)
            if d.format != _FORMAT:
                raise ValueError(f"format {d.format}, expected {_FORMAT}")
            rows.append(local[np.frombuffer(d.rows, dtype="<u4")])
            coords.append(np.frombuffer(d.coords, dtype="<i8"))
        except (msgspec.MsgspecError, ValueError, IndexError) as e:
            raise PlanError(
                f"the description of rank {ranks[0]} cannot be read: {e}; do all ranks run one version?"
            ) from e
        mentions.append(local)
    specs = [_spec_of(row) for row in known]
    _refuse_conflicts(specs, [ranks for ranks, _ in classes], mentions)
    try:
        schema = make_schema(run, specs)
    except ValueError as e:
        raise PlanError(f"{e}; correct the exporter, nothing was published") from e
    ids = schema.ids
    of_row = np.array([ids[t.name] for t in specs], dtype=np.int64)
    owner = np.repeat(np.arange(len(classes)), [len(r) for r in rows])
    tensor_ids = of_row[np.concatenate(rows)] if rows else np.empty(0, dtype=np.int64)
    starts, extents = _padded(schema, tensor_ids, np.concatenate(coords) if coords else np.empty(0, dtype=np.int64))
    return schema, _collapse(tensor_ids, starts, extents, owner, [np.array(r) for r, _ in classes])


def _collapse(
    ids: np.ndarray, starts: np.ndarray, extents: np.ndarray, owner: np.ndarray, ranks: Sequence[np.ndarray]
) -> Holdings:
    """Equal boxes of several classes become one with all their ranks."""
    keys = [k for k in (*extents.T[::-1], *starts.T[::-1]) if k.size and (k != k[0]).any()]
    order = np.lexsort([owner, *keys, ids])
    ids, starts, extents, owner = ids[order], starts[order], extents[order], owner[order]
    new = np.ones(len(ids), dtype=bool)
    new[1:] = (
        (ids[1:] != ids[:-1]) | (starts[1:] != starts[:-1]).any(axis=1) | (extents[1:] != extents[:-1]).any(axis=1)
    )
    first = np.flatnonzero(new)
    bounds = (np.r_[first, len(ids)] * 4).tolist()
    raw = owner.astype("<u4").tobytes()
    table = SetTable()
    sets: dict[bytes, int] = {}
    set_ids = np.empty(len(first), dtype=np.uint32)
    for i, (a, b) in enumerate(pairwise(bounds)):
        key = raw[a:b]
        if key not in sets:
            sets[key] = table.add(np.concatenate([ranks[c] for c in np.frombuffer(key, dtype="<u4")]))
        set_ids[i] = sets[key]
    world_size = sum(len(r) for r in ranks)
    return Holdings(ids[first].astype(np.uint32), starts[first], extents[first], set_ids, table.sets(), world_size)


def _padded(schema: Schema, ids: np.ndarray, coords: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and extents with leading axes from the packed column, whose rows are as long as their tensor has axes."""
    all_axes = num_axes_of(schema)
    num_axes = max(int(all_axes.max(initial=0)), 1)
    axes = all_axes[ids]
    ends = np.cumsum(2 * axes)
    if (int(ends[-1]) if len(ends) else 0) != len(coords):
        raise PlanError(
            f"descriptions carry {len(coords)} coordinates, their boxes {int(ends[-1]) if len(ends) else 0}"
        )
    starts = np.zeros((len(ids), num_axes), dtype=np.int64)
    extents = np.ones((len(ids), num_axes), dtype=np.int64)
    for n in np.unique(axes[axes > 0]).tolist():
        some = np.flatnonzero(axes == n)
        values = coords[(ends[some] - 2 * n)[:, None] + np.arange(2 * n)]
        starts[some, num_axes - n :] = values[:, :n]
        extents[some, num_axes - n :] = values[:, n:]
    return starts, extents


def _packed(schema: Schema, held: Holdings) -> np.ndarray:
    """The inverse of ``_padded``."""
    axes = num_axes_of(schema)[held.tensor_ids]
    real = np.arange(held.starts.shape[1]) >= held.starts.shape[1] - axes[:, None]
    both = np.concatenate([held.starts, held.extents], axis=1)
    return both[np.concatenate([real, real], axis=1)].astype("<i8")


@collector_paused()
def encode_merged(schema: Schema, held: Holdings) -> bytes:
    """What all ranks hold, for the broadcast."""
    columns = (
        held.tensor_ids.astype("<u4"),
        _packed(schema, held),
        held.set_ids.astype("<u4"),
        held.sets.offsets.astype("<i8"),
        held.sets.members.astype("<u4"),
    )
    return msgspec.msgpack.encode(_Merged("", held.world_size, schema.encoded, *(c.tobytes() for c in columns)))


def refusal(error: Exception) -> bytes:
    """In place of ``encode_merged``: why what ranks hold is not a model."""
    return msgspec.msgpack.encode(_Merged(str(error)))


@collector_paused()
def decode_merged(document: memoryview | bytes) -> tuple[Schema, Holdings]:
    """The inverse of ``encode_merged``.

    Raises:
        PlanError: The refusal that was broadcast, or bytes that cannot be read.
    """
    try:
        m = msgspec.msgpack.decode(document, type=_Merged)
        if m.error:
            raise PlanError(m.error)
        schema = decode_schema(m.schema)
        ids, set_ids = np.frombuffer(m.tensor_ids, dtype="<u4"), np.frombuffer(m.set_ids, dtype="<u4")
        sets = HolderSets(np.frombuffer(m.set_offsets, dtype="<i8"), np.frombuffer(m.members, dtype="<u4"))
        if int(ids.max(initial=0)) >= max(len(schema.tensors), 1) or int(set_ids.max(initial=0)) >= max(len(sets), 1):
            raise ValueError("ids past the schema or the holder sets")
        starts, extents = _padded(schema, ids.astype(np.int64), np.frombuffer(m.coords, dtype="<i8"))
    except (msgspec.MsgspecError, ValueError, FormatError) as e:
        raise PlanError(f"the merged holdings cannot be read: {e}; do all ranks run one version?") from e
    return schema, Holdings(ids, starts, extents, set_ids, sets, m.world_size)


def _fields(t: TensorSpec) -> tuple:
    return t.name, t.dtype, t.shape, t.layer, t.cut, t.block, t.frozen, t.aliases, t.formula, t.group


def _spec_of(row: bytes) -> TensorSpec:
    try:
        s = _SPEC.decode(row)
    except msgspec.MsgspecError as e:
        raise PlanError(f"a tensor's description cannot be read: {e}; do all ranks run one version?") from e
    return TensorSpec(s.name, s.dtype, s.shape, s.layer, s.cut, s.block, s.frozen, s.aliases, s.formula, s.group)


def _refuse_conflicts(specs: list[TensorSpec], ranks: list[Sequence[int]], mentions: list[np.ndarray]) -> None:
    """Raise where one name has several specs, naming the ranks of each."""
    if len({s.name for s in specs}) == len(specs):
        return
    by_name: dict[str, list[int]] = {}
    for row, spec in enumerate(specs):
        by_name.setdefault(spec.name, []).append(row)
    faults: list[str] = []
    for name, rows in by_name.items():
        if len(rows) == 1:
            continue
        differing = [f for f in TensorSpec.__slots__ if len({repr(getattr(specs[r], f)) for r in rows}) > 1]
        said = []
        for row in rows:
            who = [r for own, local in zip(ranks, mentions, strict=True) if row in local for r in own]
            values = ", ".join(f"{f} {getattr(specs[row], f)!r}" for f in differing)
            said.append(f"ranks {brief_ranks(who)} have {values}")
        faults.append(f"{name}: " + ", ".join(said))
    require(faults, f"ranks disagree about {len(faults)} tensors", "Correct the exporter; nothing was published")
