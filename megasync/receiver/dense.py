"""Masks of whole tiles: how publications are applied in which most words change, and anchors.

XOR runs over strided views of live memory (``layout.evaluate``), so it works on any device; digests are summed tile by
tile. Comes between fetch and apply. Must import nothing above bind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from megasync.digest import box_lanes
from megasync.errors import LiveMismatchError
from megasync.layout.evaluate import gather, xor_
from megasync.layout.modes import Layout, Remap
from megasync.receiver.backend import Backend, FetchedFrame, Placed
from megasync.receiver.bind import Binding
from megasync.receiver.leads import Held, inside
from megasync.receiver.sums import Sums
from megasync.types import WORD_DTYPES, Box, Entries, Lanes


def read_words(layout: Layout, live: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Live canonical words of a layout's slice through its leading records, ``<u{w}`` in the slice's shape, host."""
    data = gather(layout, live).cpu().numpy()
    return data.view(WORD_DTYPES[layout.word_nbytes]).reshape(layout.slice_shape)


def read_record(layout: Layout, record: Remap, live: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Live canonical words of one record's box, in its shape."""
    one = replace(layout, records=(replace(record, primary=True),), partial=True)
    return read_words(one, live)[inside(layout, record)]


def check_copies(name: str, held: Held, words: np.ndarray, live: Mapping[str, torch.Tensor]) -> None:
    """Compare every copy with the words that lead.

    Args:
        name: Of the tensor.
        held: The tensor, or a part of it.
        words: What its leading records hold, in the slice's shape.
        live: Whole storages by name.

    Raises:
        LiveMismatchError: Naming the tensor and the words.
    """
    for r in held.copies:
        if not np.array_equal(read_record(held.layout, r, live), words[inside(held.layout, r)]):
            raise LiveMismatchError(
                f"{name}: the engine's copies in {r.storage} of words {r.start}..{r.stop} differ from the first ones: load "
                "the weights anew, or correct the adapter's list of copies"
            )


def held_sums(binding: Binding, tensor_id: int, held: Held, words: np.ndarray) -> Sums:
    """Digest sums of words of a (clipped) tensor: primaries under its id, replicas under ``Binding.replica_id``.

    Args:
        binding: The bound rank.
        tensor_id: The tensor.
        held: The tensor, or a part of it.
        words: ``<u{w}`` in the slice's shape; 0 where they are not to count.
    """
    layout = held.layout
    box = Box(layout.start, layout.slice_shape)
    if held.whole:
        return _row(tensor_id, box_lanes(layout.shape, box, words))
    counted, here = held.counted(), held.here()
    mine = words if counted is None else words * counted
    found = [_row(tensor_id, box_lanes(layout.shape, box, mine))]
    if counted is not None:
        others = words * ~counted if here is None else words * (here & ~counted)
        found.append(_row(binding.replica_id(tensor_id), box_lanes(layout.shape, box, others)))
    return Sums.join(found)


def _row(tensor_id: int, lanes: Lanes) -> Sums:
    return Sums(np.array([tensor_id]), np.array([(lanes.a, lanes.b)], dtype=np.uint64))


class MaskPlaced(Placed):
    """The mask of one tile, as far as this rank holds it.

    Args:
        binding: The bound rank.
        tensor_id: Tensor of the tile.
        held: The tensor, clipped to the tile.
        mask: ``<u{w}`` in the clipped slice's shape: old XOR new; words that the rank does not hold are ignored.
        whole: All words count as touched (anchors), not only those whose mask is not 0.
    """

    def __init__(self, binding: Binding, tensor_id: int, held: Held, mask: np.ndarray, whole: bool = False) -> None:
        self.binding = binding
        self.tensor_id = tensor_id
        self.held = held
        here = held.here()
        self.mask = np.ascontiguousarray(mask if here is None else mask * here)
        self.whole = whole
        self.num_changed = int(np.count_nonzero(self.mask))
        self.nbytes = 2 * mask.nbytes
        self.shared = any(r.unit == "nibble" for r in held.layout.records)
        self._old: np.ndarray | None = None

    @property
    def _name(self) -> str:
        return self.binding.schema.tensors[self.tensor_id].name

    def prove(self) -> tuple[Sums, Sums]:
        """See ``Placed.prove``."""
        old = read_words(self.held.reading, self.binding.storages)
        check_copies(self._name, self.held, old, self.binding.storages)
        self._old = old
        return self._sums(old), self._sums(old ^ self.mask)

    def _sums(self, words: np.ndarray) -> Sums:
        if not self.whole:
            words = words * (self.mask != 0)
        return held_sums(self.binding, self.tensor_id, self.held, words)

    def _xor(self, layout: Layout, mask: np.ndarray) -> None:
        device = self.binding.storages[layout.records[0].storage].device
        raw = torch.from_numpy(np.ascontiguousarray(mask).reshape(-1).view(np.uint8))
        xor_(layout, self.binding.storages, raw.to(device))

    def xor_(self) -> None:
        """See ``Placed.xor_``."""
        assert self._old is not None, "prove() comes before xor_()"
        self._xor(self.held.layout, self.mask)

    def read_back(self) -> Sums:
        """See ``Placed.read_back``; copies are compared too."""
        live = read_words(self.held.reading, self.binding.storages)
        check_copies(self._name, self.held, live, self.binding.storages)
        return self._sums(live)

    def undo_(self) -> None:
        """See ``Placed.undo_``: each place gets the difference between what it holds now and what it held."""
        if self._old is None:
            return
        layout = self.held.layout
        for r in layout.records:
            box = inside(layout, r)
            wrong = np.zeros_like(self._old)
            wrong[box] = read_record(layout, r, self.binding.storages) ^ self._old[box]
            self._xor(replace(layout, records=(replace(r, primary=True),), partial=True), wrong)


class MaskBackend(Backend):
    """Every frame as masks of whole tiles, through ``layout.evaluate``: any device, digests on the host. Slow and
    plain: what other backends are compared with, and what works where none was written for the device."""

    name = "mask"

    def __init__(self, binding: Binding) -> None:
        self.binding = binding

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Backend.place``."""
        return [p for frame in frames for p in mask_placed(self.binding, frame.entries())]

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        """See ``Backend.write_``; on the caller's thread, so that a device sees one stream."""
        return super().write_(placed, None)


def mask_placed(binding: Binding, entries: Entries) -> list[Placed]:
    """Masks of the tiles of a frame that this rank holds words of.

    Args:
        binding: The bound rank.
        entries: Decoded changed words.
    """
    out: list[Placed] = []
    for t in np.flatnonzero(binding.needs(entries.tensor_ids, entries.tiles)):
        found = tile_words(binding, entries, int(t))
        if found is not None and found[1].any():
            out.append(MaskPlaced(binding, int(entries.tensor_ids[t]), *found))
    return out


def tile_words(binding: Binding, entries: Entries, t: int) -> tuple[Held, np.ndarray] | None:
    """One tile of a frame as dense words, cut to the slice that this rank holds.

    Args:
        binding: The bound rank.
        entries: The frame.
        t: Which of its tiles; words of it that are not among the entries are 0.

    Returns:
        The clipped tensor and its words in the slice's shape, None where this rank holds nothing of the tile.
    """
    tensor_id = int(entries.tensor_ids[t])
    box = binding.schema.grids[tensor_id].box(int(entries.tiles[t]))
    held = binding.held[tensor_id].clipped(box)
    if held is None:
        return None
    at = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(held.layout.start, box.start, held.layout.slice_shape, strict=True)
    )
    return held, entries.mask(t).reshape(box.extent)[at]
