"""Plans of the streaming apply: what is decoded into a slot, and the launches that XOR it into the weights.

A step is what fits a slot, normally one layer. Its tables stay on the host and go up with its blocks, so that HBM holds two
steps and nothing else; plans of equal steps are kept from version to version, since at usual densities every tile is touched
every time. Comes between ``stream_blocks`` and ``stream_placed``. Must import nothing above scatter_layout but kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeVar

import numpy as np
import torch

from megasync.codecs.zero_run import BlockKind
from megasync.kernels.records import PackedRecords
from megasync.kernels.scatter_plan import Tiles
from megasync.kernels.walk_plan import WalkPlan, plan_dense
from megasync.receiver.scatter_layout import DeviceLayout, WordLayout, packs_of
from megasync.receiver.stream_blocks import TileBlocks

ALIGN = 16
"""Bytes on which masks begin in a slot and blocks in host memory."""

_PLANS_KEPT = 4096
_Bytes = TypeVar("_Bytes", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of one word size that no other tile of the launch shares words with.

    Attributes:
        word_nbytes: Bytes of a word.
        plans: Plan of each pack (in the order of ``packs_of``), tables on the host; None where no tile meets it.
    """

    word_nbytes: int
    plans: tuple[WalkPlan | None, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one format in a step; int64 columns ``[n]``.

    Attributes:
        source: Where each begins in host memory.
        nbytes: Encoded bytes.
        target: Where each goes in the slot, ascending.
        plain_nbytes: Bytes that it decodes to.
    """

    source: np.ndarray
    nbytes: np.ndarray
    target: np.ndarray
    plain_nbytes: np.ndarray


@dataclass(frozen=True, slots=True)
class Step:
    """What is decoded into one slot.

    Attributes:
        layer: Layer of all its tiles.
        mask_nbytes: Bytes of the slot that it takes.
        end: Where its blocks end in host memory.
        batches: Encoded blocks by format.
        stored: Blocks that are copied as they are.
        absent: First byte and end of stretches of the slot that are zero.
        launches: In order.
    """

    layer: int
    mask_nbytes: int
    end: int
    batches: dict[BlockKind, Batch]
    stored: Batch
    absent: tuple[tuple[int, int], ...]
    launches: tuple[Launch, ...]

    @property
    def num_blocks(self) -> int:
        """Encoded blocks."""
        return sum(len(b.source) for b in self.batches.values())


class Planner:
    """Makes the plans of launches and remembers them. Thread-safe."""

    def __init__(self, layout: DeviceLayout) -> None:
        self.layout = layout
        self._kept: OrderedDict[bytes, Launch] = OrderedDict()
        self._lock = Lock()

    def launch(self, word_nbytes: int, tensor_ids: np.ndarray, tiles: np.ndarray, offsets: np.ndarray) -> Launch:
        """The launch of some tiles whose masks begin at ``offsets`` of a slot."""
        key = b"".join((bytes([word_nbytes]), *(x.astype("<i8").tobytes() for x in (tensor_ids, tiles, offsets))))
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        words = self.layout.words[word_nbytes]
        made = Launch(word_nbytes, tuple(self._plan(p, words, tensor_ids, tiles, offsets) for p in packs_of(words)))
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _PLANS_KEPT:
                self._kept.popitem(last=False)
        return made

    def _plan(
        self, pack: PackedRecords, words: WordLayout, tensor_ids: np.ndarray, tiles: np.ndarray, offsets: np.ndarray
    ) -> WalkPlan | None:
        rows = self.layout.row[tensor_ids].astype(np.int64)
        owners = np.unique(np.concatenate([g.owners for g in pack.groups]))
        mine = np.isin(rows, owners)
        if not mine.any():
            return None
        at = self.layout.binding.schema.first_tile[tensor_ids[mine]] + tiles[mine]
        starts, extents = (x[at][:, -words.places.num_axes :].astype(np.int64) for x in self.layout.boxes)
        # Planned against the same records as if they were on the host, so that the tables stay there.
        on_host = replace(pack, storages=(torch.empty(0, dtype=torch.uint8),))
        plan = plan_dense(Tiles(rows[mine], starts, extents), offsets[mine], on_host)
        if pack.device.type == "cuda":
            plan = _moved(plan, lambda t: t.pin_memory())
        return replace(plan, records=pack)


def on_device(plan: WalkPlan) -> WalkPlan:
    """A plan with its tables on the device of its records.

    *Stream*: the current one. *Memory*: the tables are the result's.
    """
    device = plan.records.device
    return plan if device.type == "cpu" else _moved(plan, lambda t: t.to(device, non_blocking=True))


def idle(plan: WalkPlan) -> WalkPlan:
    """The launches of a plan with nothing to do in them, on the device of its records: they load the kernels, no more."""

    def none(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(t[:1], device=plan.records.device)

    return replace(_moved(plan, none), boxes=())


def kernels_of(plan: WalkPlan) -> Iterator[object]:
    """What tells the kernels of a plan's launches from those of other plans."""
    w = plan.records.word_nbytes
    yield from ((w, c.piece_nbytes, c.num_digits, c.num_checks) for c in plan.fast)
    yield from ((w, plan.records.num_axes, c.group.num_terms, c.group.nibble, c.group.wide) for c in plan.slow)


def _moved(plan: WalkPlan, move: Callable[[torch.Tensor], torch.Tensor]) -> WalkPlan:
    return replace(
        plan,
        fast=tuple(replace(c, items=move(c.items), pieces=move(c.pieces)) for c in plan.fast),
        slow=tuple(replace(c, boxes=move(c.boxes), masks=move(c.masks), pieces=move(c.pieces)) for c in plan.slow),
    )


def slot_nbytes(layout: DeviceLayout) -> int:
    """Bytes of the masks of the largest layer, as far as this rank holds its tiles."""
    schema = layout.binding.schema
    ids = np.repeat(np.arange(len(schema.tensors)), np.diff(schema.first_tile))
    tiles = np.arange(int(schema.first_tile[-1])) - schema.first_tile[ids]
    mine = layout.binding.needs(ids, tiles) & (layout.row[ids] >= 0)
    ids, tiles = ids[mine], tiles[mine]
    if not len(ids):
        return ALIGN
    sizes = _aligned(schema.tile_words(ids, tiles).astype(np.int64) * schema.word_nbytes[ids])
    return int(np.bincount(schema.layers[ids] + 1, sizes).max())


def cut_steps(found: Sequence[TileBlocks], slot: int) -> Iterator[list[tuple[TileBlocks, int]]]:
    """Tiles of each step: as many of a layer as fit a slot, in (layer, word size, tensor, tile) order.

    Args:
        found: Blocks of all frames.
        slot: Bytes of a slot; at least the largest tile.
    """
    tiles = [(b, i) for b in found for i in range(len(b.tiles))]
    tiles.sort(key=lambda x: (x[0].layer, x[0].word_nbytes, int(x[0].tensor_ids[x[1]]), int(x[0].tiles[x[1]])))
    step: list[tuple[TileBlocks, int]] = []
    used = 0
    for blocks, i in tiles:
        size = _aligned(int(blocks.tile_nbytes[i]))
        if step and (step[0][0].layer != blocks.layer or used + size > slot):
            yield step
            step, used = [], 0
        step.append((blocks, i))
        used += size
    if step:
        yield step


def make_step(
    planner: Planner, tiles: Sequence[tuple[TileBlocks, int]], first: int
) -> tuple[Step, list[tuple[TileBlocks, int, int]]]:
    """Plan a step.

    Args:
        planner: Makes the launches.
        tiles: From ``cut_steps``.
        first: Where its blocks begin in host memory.

    Returns:
        The step, and where the bytes of each block go: the blocks, a block's number, its place in host memory.
    """
    sizes = _aligned(np.array([b.tile_nbytes[i] for b, i in tiles], dtype=np.int64))
    offsets = np.cumsum(sizes) - sizes
    rows: dict[object, list[tuple[int, int, int, int]]] = {"stored": []}
    absent: list[tuple[int, int]] = []
    places: list[tuple[TileBlocks, int, int]] = []
    at = first
    for (blocks, i), offset in zip(tiles, offsets.tolist(), strict=True):
        for k in range(*np.searchsorted(blocks.tile_of, [i, i + 1]).tolist()):
            target, plain, size = offset + int(blocks.begin[k]), int(blocks.plain_nbytes[k]), int(blocks.nbytes[k])
            if not size:
                absent.append((target, target + plain))
                continue
            key = "stored" if blocks.stored[k] else blocks.kind
            rows.setdefault(key, []).append((at, size, target, plain))
            places.append((blocks, k, at))
            at += _aligned(size)
    batches = {k: _batch(v) for k, v in rows.items()}
    stored = batches.pop("stored")
    step = Step(
        tiles[0][0].layer,
        int(sizes.sum()),
        at,
        batches,  # type: ignore[arg-type]
        stored,
        tuple(_merged(absent)),
        tuple(_launches(planner, tiles, offsets)),
    )
    return step, places


def _launches(planner: Planner, tiles: Sequence[tuple[TileBlocks, int]], offsets: np.ndarray) -> Iterator[Launch]:
    """Tiles by word size; one that comes in several frames goes to as many launches, one after the other."""
    w = np.array([b.word_nbytes for b, _ in tiles])
    ids = np.array([b.tensor_ids[i] for b, i in tiles], dtype=np.int64)
    numbers = np.array([b.tiles[i] for b, i in tiles], dtype=np.int64)
    again = np.zeros(len(tiles), dtype=np.int64)
    for k in range(1, len(tiles)):
        if ids[k] == ids[k - 1] and numbers[k] == numbers[k - 1]:
            again[k] = again[k - 1] + 1
    for key in sorted(set(zip(w.tolist(), again.tolist(), strict=True))):
        mine = (w == key[0]) & (again == key[1])
        yield planner.launch(key[0], ids[mine], numbers[mine], offsets[mine])


def _batch(rows: list[tuple[int, int, int, int]]) -> Batch:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Batch(*(np.ascontiguousarray(c) for c in columns))


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin = end = -1
    for a, b in spans:
        if a != end:
            if end > begin:
                yield begin, end
            begin = a
        end = b
    if end > begin:
        yield begin, end


def _aligned(nbytes: _Bytes) -> _Bytes:
    return -(-nbytes // ALIGN) * ALIGN  # type: ignore[return-value]
