"""Sequences of the zero-run encoders and their bytes, many blocks in one vectorised numpy pass.

The rules are those of ``kernels.zero_run_rules``. Comes after ``codecs.zero_run`` has cut its input into groups of
blocks small enough for int32 (and for the cache); gives it the encoded bytes of a group. Cost goes with the changed
bytes, not with the mask: a run of zeros is two numbers, and the only work per mask byte is Snappy's one element per 64
zeros.
Must not import torch, triton or a compression library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.kernels.zero_run_rules import END_RULES, MIN_MATCH_NBYTES, BlockKind

Int32 = np.ndarray
"""int32 array; positions, lengths and offsets of one group."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a group of blocks, in order; int32 ``[S]`` each unless stated.

    Attributes:
        literal_start: Mask position of the first literal.
        literal_nbytes: Literal bytes, 0 or more.
        match_nbytes: Bytes of the match that follows the literals; 0 in the last sequence of a block.
        num_changed: Changed bytes among the literals.
        last: Index of the last sequence of each block, int64 ``[B]``.
        block_nbytes: Mask bytes of each block, int32 ``[B]``.
    """

    literal_start: Int32
    literal_nbytes: Int32
    match_nbytes: Int32
    num_changed: Int32
    last: np.ndarray
    block_nbytes: Int32

    @property
    def first(self) -> np.ndarray:
        """Index of the first sequence of each block, int64 ``[B]``."""
        first = np.zeros_like(self.last)
        first[1:] = self.last[:-1] + 1
        return first


def changed_bytes(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of the bytes of a mask that are not 0.

    Args:
        mask: uint8 ``[n]``, C-contiguous.

    Returns:
        int64 positions, ascending; uint8 values.
    """
    whole = len(mask) & ~7
    words = mask[:whole].view(np.uint64)
    word = np.flatnonzero(words != 0)
    if 8 * len(word) > len(mask) // 2:
        found = np.flatnonzero(mask != 0)
        return found, mask[found]
    lanes = words[word].view(np.uint8)
    found = np.flatnonzero(lanes != 0)
    values = lanes[found]
    # lane index of a byte = 8 x rank of its word + byte in the word, so one table turns lane indexes into positions
    positions = (8 * (word - np.arange(len(word))))[found >> 3] + found
    rest = np.flatnonzero(mask[whole:])
    return np.concatenate((positions, rest + whole)), np.concatenate((values, mask[whole:][rest]))


def byte_changes(positions: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Changed words as changed bytes (little-endian), for a sparse frame on its way to dense blocks.

    Args:
        positions: integer ``[n]``, word positions, strictly ascending.
        values: uint8, ``<u2``, ``<u4`` or ``<u8`` ``[n]``, C-contiguous, none of them 0.

    Returns:
        int64 byte positions, strictly ascending; uint8 values.
    """
    lanes = np.ascontiguousarray(values).view(np.uint8)
    width = values.dtype.itemsize
    found = np.flatnonzero(lanes)
    word = found // width
    return (positions.astype(np.int64) - np.arange(len(positions)))[word] * width + found, lanes[found]


def cut_sequences(kind: BlockKind, positions: Int32, bounds: Int32) -> Sequences:
    """Cut a group of adjacent blocks into sequences.

    Args:
        kind: Block format.
        positions: int32 ``[n]``, changed bytes, strictly ascending, inside the group.
        bounds: int32 ``[B + 1]``, strictly ascending block bounds from 0; ``B >= 1``.

    Returns:
        The sequences of all blocks.
    """
    num_blocks = len(bounds) - 1
    first_entry = np.searchsorted(positions, bounds).astype(np.int32)
    block = np.arange(num_blocks, dtype=np.int32)
    # Each entry ends a run; each block has its trailing run, then an empty one that stands for its last sequence.
    trailing = first_entry[1:] + 2 * block
    closing = trailing + 1
    first_run = first_entry[:-1] + 2 * block
    entry_run = np.arange(len(positions), dtype=np.int32)
    if num_blocks > 1:
        entry_run += np.repeat(2 * block, np.diff(first_entry))
    match_end = np.empty(len(positions) + 2 * num_blocks, dtype=np.int32)
    match_end[entry_run] = positions
    match_end[trailing] = match_end[closing] = bounds[1:]
    match_start = np.empty_like(match_end)
    match_start[1:] = match_end[:-1]
    match_start[1:] += 2  # past the entry before the run, and past the zero that stays a literal
    match_start[first_run] = bounds[:-1] + 1

    _end_blocks(kind, match_start, match_end, first_run, trailing, bounds[1:])
    match_start[closing] = bounds[1:]
    match_nbytes = match_end - match_start
    match_nbytes[closing] = MIN_MATCH_NBYTES  # so that the selection keeps them; 0 again below
    chosen = np.flatnonzero(match_nbytes >= MIN_MATCH_NBYTES)
    match_start, match_nbytes = match_start[chosen], match_nbytes[chosen]
    last = np.searchsorted(chosen, closing)
    match_nbytes[last] = 0

    literal_start = np.empty_like(match_start)
    literal_start[0] = bounds[0]
    np.add(match_start[:-1], match_nbytes[:-1], out=literal_start[1:])
    # Between two chosen runs lie as many entries as runs, less the one run of each block that no entry ends.
    num_changed = np.diff(chosen, prepend=0).astype(np.int32)
    num_changed[last] -= 1
    num_changed[last[:-1] + 1] -= 1
    return Sequences(literal_start, match_start - literal_start, match_nbytes, num_changed, last, np.diff(bounds))


def _end_blocks(
    kind: BlockKind, match_start: Int32, match_end: Int32, first_run: Int32, trailing: Int32, block_end: Int32
) -> None:
    """Apply the end rule in place. Only the last runs of a block can be near its end, so only those are looked at."""
    rule = END_RULES[kind]
    if not rule.match_guard:
        return
    near = trailing[:, None] - np.arange(rule.match_guard + 1, dtype=np.int32)
    row, column = np.nonzero(near >= first_run[:, None])
    run = near[row, column]
    match_end[run] = np.minimum(match_end[run], block_end[row] - rule.last_literals)
    guarded = run[match_start[run] > block_end[row] - rule.match_guard]
    match_end[guarded] = match_start[guarded]


def emit_lz4(sequences: Sequences, positions: Int32, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """LZ4 blocks of a group.

    Args:
        sequences: Of kind ``lz4``.
        positions: int32 ``[n]``, the changed bytes they were cut from.
        values: uint8 ``[n]``, none of them 0.

    Returns:
        uint8 bytes of all blocks one after the other; int64 ``[B + 1]`` bounds of the blocks in them.
    """
    literals, match, last = sequences.literal_nbytes, sequences.match_nbytes, sequences.last
    literal_extra = (literals + 240) // 255  # bytes of the extension, 0 for lengths below 15
    match_extra = (match + 236) // 255  # the same for lengths below 19
    size = literals + literal_extra + match_extra + 3
    size[last] -= 2
    end = np.cumsum(size, dtype=np.int32)
    start, total = end - size, int(end[-1])
    # 255 everywhere first: long extensions need no further write. Two spare bytes take what last sequences do not have.
    out = np.full(total + 2, 255, dtype=np.uint8)
    literal_out = start + 1 + literal_extra
    offset_out = literal_out + literals
    offset_out[last] = total
    # Without an extension this hits the offset's high byte, so it comes before it.
    out[offset_out + 1 + match_extra] = (match + 236) % 255
    out[offset_out] = 1
    out[offset_out + 1] = 0
    out[start] = (np.minimum(literals, 15) << 4) | np.clip(match - MIN_MATCH_NBYTES, 0, 15)
    extended = np.flatnonzero(literal_extra)
    out[start[extended] + literal_extra[extended]] = (literals[extended] - 15) % 255
    # One or two literals before a match end in its zero and hold no other: only that one is cleared. All others, whole.
    out[literal_out + literals - 1] = 0
    long = literals > 2
    long[last] = True
    out[_ranges(literal_out[long], literals[long])] = 0
    _write_values(out, sequences, literal_out, positions, values)
    return out[:total], _block_bounds(end, last)


def emit_snappy(sequences: Sequences, positions: Int32, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Snappy blocks of a group; arguments and result as in ``emit_lz4``."""
    literals, match, last, first = sequences.literal_nbytes, sequences.match_nbytes, sequences.last, sequences.first
    num_full, rest = match >> 6, match & 63
    short = (rest > 0) & (rest < 12)
    rest_nbytes = np.where(rest == 0, 0, np.where(short, 2, 3)).astype(np.int32)
    header = (literals > 0).astype(np.int32) + (literals > 60) + (literals > 256) + (literals > 65536)
    block_nbytes = sequences.block_nbytes
    preamble = 1 + (block_nbytes >= 1 << 7).astype(np.int32) + (block_nbytes >= 1 << 14)
    size = header + literals + 3 * num_full + rest_nbytes
    size[first] += preamble
    end = np.cumsum(size, dtype=np.int32)
    start, total = end - size, int(end[-1])
    out = np.zeros(total, dtype=np.uint8)

    for i in range(3):
        has = np.flatnonzero(preamble > i)
        more = (preamble[has] > i + 1).astype(np.int32) << 7
        out[start[first[has]] + i] = ((block_nbytes[has] >> (7 * i)) & 127) | more
    start[first] += preamble

    literal_out = start + header
    copy_out = literal_out + literals
    before = np.cumsum(num_full, dtype=np.int32) - num_full
    full = np.repeat(copy_out - 3 * before, num_full)
    full += 3 * np.arange(len(full), dtype=np.int32)
    out[full] = 0xFE
    out[full + 1] = 1
    rest_out = copy_out + 3 * num_full
    tiny = np.flatnonzero((rest > 0) & (rest < 4))  # a match has 4 bytes at least, so a full copy comes before
    out[rest_out[tiny] - 3] = 0xEE
    rest[tiny] += 4
    some = np.flatnonzero(rest)
    at, length = rest_out[some], rest[some]
    out[at] = np.where(short[some], ((length - 4) << 2) | 1, ((length - 1) << 2) | 2)
    out[at + 1] = 1

    tagged = np.flatnonzero(header == 1)
    out[start[tagged]] = (literals[tagged] - 1) << 2
    tagged = np.flatnonzero(header > 1)
    out[start[tagged]] = (58 + header[tagged]) << 2
    for i in range(3):
        has = tagged[header[tagged] > i + 1]
        out[start[has] + 1 + i] = ((literals[has] - 1) >> (8 * i)) & 255
    _write_values(out, sequences, literal_out, positions, values)
    return out, _block_bounds(end, last)


def _write_values(
    out: np.ndarray, sequences: Sequences, literal_out: Int32, positions: Int32, values: np.ndarray
) -> None:
    out[positions + np.repeat(literal_out - sequences.literal_start, sequences.num_changed)] = values


def _ranges(start: Int32, length: Int32) -> np.ndarray:
    """All indexes of the ranges ``start[i] .. start[i] + length[i]``."""
    stop = np.cumsum(length, dtype=np.int32)
    index = np.repeat(start - (stop - length), length)
    index += np.arange(len(index), dtype=np.int32)
    return index


def _block_bounds(end: Int32, last: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, np.int64), end[last].astype(np.int64)))
