"""The specification of the scatter and of the remap, in plain torch: what the Triton kernels must equal bit for bit.

Runs on any device. Comes with ``scatter``, which calls it where there is no Triton. Must import nothing of megasync
but ``types`` and kernels.
"""

from __future__ import annotations

import torch

from megasync.kernels.planes import WORD_DTYPES, Planes, expand_reference, segments_of
from megasync.kernels.records import AXIS_HEAD, HEAD, RecordGroup
from megasync.kernels.scatter_plan import TILE_HEAD, ScatterLaunch, ScatterPlan
from megasync.kernels.weights import change_terms_reference, word_terms_reference
from megasync.types import SEGMENT_WORDS

_CHUNK = 1 << 16  # words evaluated at a time: a row of the record table is gathered for each


def remap_reference(
    group: RecordGroup, record: torch.Tensor, coords: list[torch.Tensor], part: torch.Tensor | int, parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Evaluates packed records at canonical coordinates: the specification of the kernels' remap.

    Args:
        group: The records.
        record: int64 ``[n]``, record of each coordinate.
        coords: One int64 ``[n]`` per axis, in words.
        part: Nibble of the word, 0 for unit word.
        parts: Units per word.

    Returns:
        ``(inside, offset, flat)``: bool, physical offset in units, canonical word number, each ``[n]``.
    """
    rows = group.table[record]
    width = AXIS_HEAD + 3 * group.num_terms
    offset = rows[:, 1].clone()
    flat = torch.zeros_like(offset)
    z = torch.zeros_like(offset)
    inside = torch.ones_like(offset, dtype=torch.bool)
    for a in range(len(coords) - 1, -1, -1):
        axis = rows[:, HEAD + a * width : HEAD + (a + 1) * width]
        x = coords[a]
        flat += x * axis[:, 5]
        if a == len(coords) - 1 and parts > 1:
            x = x * parts + part
        inside &= (x >= axis[:, 0]) & (x < axis[:, 1])
        z += (x - axis[:, 2]) * axis[:, 3]
        for t in range(group.num_terms):
            m, shift, factor = axis[:, AXIS_HEAD + 3 * t : AXIS_HEAD + 3 * t + 3].unbind(1)
            quotient = z.clamp(min=0) // m if group.wide else (z * m) >> shift
            offset += quotient * factor
        z = z * axis[:, 4]
    return inside, offset, flat


def coordinates_reference(starts: torch.Tensor, extents: torch.Tensor, position: torch.Tensor) -> list[torch.Tensor]:
    """Canonical coordinates of row-major positions in tiles (starts and extents int64 ``[n, A]``)."""
    out: list[torch.Tensor] = []
    rest = position
    for a in range(starts.shape[1] - 1, 0, -1):
        out.append(rest % extents[:, a] + starts[:, a])
        rest = rest // extents[:, a]
    out.append(rest + starts[:, 0])
    return out[::-1]


def scatter_reference(plan: ScatterPlan, planes: Planes, lanes: torch.Tensor | None, *, write: bool, sums: int) -> int:
    """The scatter kernel in plain torch.

    Args:
        plan: Tables and layout.
        planes: Entries and dense planes, on the device of the storages.
        lanes: int64 ``[num_tensors, 4]``, added to; None where ``sums`` is 0.
        write: XOR; else only read.
        sums: 0 none, 1 the new words (columns 0 and 1), 2 new minus old (2 and 3), 4 touched-old words and new minus old.

    Returns:
        Entries that break the format: position past the segment or tile, or value 0. They are left out.
    """
    tile_of, number, segment_words = segments_of(plan.tiles.words)
    device = planes.entries.device
    given = Planes(planes.word_nbytes, torch.from_numpy(plan.counts), planes.entries, planes.dense)
    segment, position, value = expand_reference(given, segment_words)
    good = (position < torch.from_numpy(segment_words).to(device)[segment]) & (value != 0)
    faults = int((~good).sum())
    tile = torch.from_numpy(tile_of).to(device)[segment]
    position = position + torch.from_numpy(number).to(device)[segment] * SEGMENT_WORDS
    good &= position < torch.from_numpy(plan.tiles.words).to(device)[tile]
    tile, position, value = tile[good], position[good], value[good]
    for launch in plan.launches:
        for at in range(0, len(value), _CHUNK):
            part = slice(at, at + _CHUNK)
            _reference_chunk(plan, launch, tile[part], position[part], value[part], lanes, write, sums)
    return faults


def _reference_chunk(
    plan: ScatterPlan,
    launch: ScatterLaunch,
    tile: torch.Tensor,
    position: torch.Tensor,
    value: torch.Tensor,
    lanes: torch.Tensor | None,
    write: bool,
    sums: int,
) -> None:
    """One chunk of changed words through one record group."""
    group, w = launch.group, plan.records.word_nbytes
    rows = launch.tiles[tile].to(torch.int64)
    axes = rows[:, TILE_HEAD:]
    coords = coordinates_reference(axes[:, 0::2], axes[:, 1::2], position)
    parts = 2 * w if group.nibble else 1
    for k in range(int((rows[:, 1] - rows[:, 0]).max()) if len(rows) else 0):
        has = rows[:, 0] + k < rows[:, 1]
        record = (rows[:, 0] + k).clamp(max=len(group.rows) - 1)
        for part in range(parts):
            inside, offset, flat = remap_reference(group, record, coords, part, parts)
            change = (value >> (4 * part)) & 15 if group.nibble else value
            inside &= has
            if sums in (0, 2):  # sums of old or new words are of whole ones, nibbles that stay included
                inside &= change != 0
            storage = torch.from_numpy(group.storage).to(record.device)[record]
            for s in torch.unique(storage[inside]).tolist():
                mine = inside & (storage == s)
                old = touch_reference(plan.records.storages[s], offset[mine], change[mine], w, group.nibble, write)
                if lanes is None or not sums:
                    continue
                new, bit = old ^ change[mine], 4 * part if group.nibble else None
                if sums == 1:
                    terms = torch.nn.functional.pad(word_terms_reference(flat[mine], new, w, bit), (0, 2))
                else:
                    terms = change_terms_reference(flat[mine], old, new, w, bit)
                    terms[:, : 4 - sums] = 0
                counted = group.table[record[mine], 2] != 0
                lanes.index_add_(0, rows[mine, 2][counted], terms[counted])


def touch_reference(
    storage: torch.Tensor, offset: torch.Tensor, change: torch.Tensor, w: int, nibble: bool, write: bool
) -> torch.Tensor:
    """Old units at ``offset`` (int64, zero-extended below 8 bytes); XORs ``change`` in where asked."""
    if nibble:
        shift = (offset & 1) * 4
        old = (storage[offset >> 1].to(torch.int64) >> shift) & 15
        for half in (0, 1):  # the two nibbles of a byte may both change: one write each
            mine = (offset & 1) == half
            if write and bool(mine.any()):
                storage[offset[mine] >> 1] ^= (change[mine] << (4 * half)).to(torch.uint8)
        return old
    words = storage[: storage.numel() // w * w].view(WORD_DTYPES[w])
    raw = words[offset]
    if write:
        words[offset] = raw ^ change.to(WORD_DTYPES[w])
    return raw.to(torch.int64) if w == 8 else raw.to(torch.int64) & ((1 << (8 * w)) - 1)
