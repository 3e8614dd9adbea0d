"""First pass of ``kernels.compact``: imported only by that module, only where Triton is installed.

``find`` reads old and new once, at copy bandwidth, and keeps only the numbers of the vectors that differ (two bytes
each, so the scratch holds any density). ``close`` adds up pieces to segments. ``_emit_triton`` does the rest.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import word_flags
from megasync.kernels._vectors_triton import count_flags, load_vectors, row_of, top_word
from megasync.kernels.compact_runs import PIECE_COLUMNS

_COLUMNS = tl.constexpr(PIECE_COLUMNS)

# Sizes, offsets and slices differ from span to span: a variant compiled for one value would stall the next span.
_FIND = ["first_piece", "first_vector", "old_step"]
_CLOSE = ["first_piece", "num_segments", "host_totals_address"]


@triton.jit(do_not_specialize=_FIND, do_not_specialize_on_alignment=["ids_ptr", "old_offsets_ptr"])
def find_kernel(
    ids_ptr,
    pieces_ptr,
    old_address,
    old_offsets_ptr,
    old_step,
    found_ptr,
    stored_ptr,
    words_ptr,
    last_ptr,
    first_piece,
    first_vector,
    VB: tl.constexpr,
    W: tl.constexpr,
    IDS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One piece: which vectors differ, how many words, and where the last one is.

    ``old_address`` + the piece's old offset is where vector 0 of its old bytes is. Outputs and old offsets count pieces
    from ``first_piece``, the scratch counts vectors from ``first_vector``.
    """
    piece = tl.program_id(0) + first_piece
    if IDS:
        piece = tl.load(ids_ptr + tl.program_id(0))
    piece_ptr = pieces_ptr + piece.to(tl.int64) * _COLUMNS
    piece -= first_piece
    found_ptr += tl.load(piece_ptr + 14) - first_vector
    live = tl.load(piece_ptr)
    live_step = tl.load(piece_ptr + 1)
    multiplier = tl.load(piece_ptr + 2)
    shift = tl.load(piece_ptr + 3)
    per_row = tl.load(piece_ptr + 4).to(tl.int32)
    begin = tl.load(piece_ptr + 5).to(tl.int32)
    num = tl.load(piece_ptr + 6).to(tl.int32)
    old_address += tl.load(old_offsets_ptr + piece.to(tl.int64) * old_step)
    lane = tl.arange(0, STEP)
    stored = 0
    words = 0
    last = -1
    for start in range(0, num, STEP):
        i = start + lane
        valid = i < num
        k = begin + i
        row, column = row_of(k, multiplier, shift, per_row)
        old = load_vectors(old_address + k.to(tl.int64) * VB, valid, VB)
        new = load_vectors(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, valid, VB)
        x = old ^ new
        hit = x != 0
        if tl.max(hit.to(tl.int32), 0) > 0:
            # Both counts in one scan: a step has at most 2,048 words, so neither half overflows.
            both = hit.to(tl.int32) + (count_flags(word_flags(x, W), W) << 16)
            scan = tl.cumsum(both, 0)
            tl.store(found_ptr + stored + (scan & 0xFFFF) - 1, i.to(tl.int16), mask=hit)
            total = tl.sum(both, 0)
            stored += total & 0xFFFF
            words += total >> 16
            last = tl.max(tl.where(hit, i, -1), 0)
    tl.store(stored_ptr + piece, stored)
    tl.store(words_ptr + piece, words)
    if last >= 0:
        k = begin + last
        row, column = row_of(k, multiplier, shift, per_row)
        old = load_vectors(old_address + k.to(tl.int64) * VB, True, VB)
        x = old ^ load_vectors(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, True, VB)
        step = tl.load(piece_ptr + 9).to(tl.int32)
        last = tl.load(piece_ptr + 8).to(tl.int32) + row * step + column * (VB // W) + top_word(x, VB, W)
    tl.store(last_ptr + piece, last)


@triton.jit(do_not_specialize=_CLOSE, do_not_specialize_on_alignment=["first_piece_ptr", "segment_words_ptr"])
def close_kernel(
    first_piece_ptr,
    segment_words_ptr,
    stored_ptr,
    words_ptr,
    last_ptr,
    base_ptr,
    before_ptr,
    counts_ptr,
    starts_ptr,
    blocks_ptr,
    finished_ptr,
    totals_ptr,
    host_totals_address,
    first_piece,
    num_segments,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of segments: changed words of each, where it begins in the planes of its block, and where its pieces do.

    The last program to finish turns the blocks' sizes into their beginnings, so that a span needs no launch more and
    no host. ``starts`` has two rows (entries, dense words) of a segment each, ``blocks`` two of a block each, ``totals``
    the two sums; they also go to ``host_totals_address``, which may be mapped host memory. ``finished`` is zero before.
    """
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    s = block * BLOCK + tl.arange(0, BLOCK)
    valid = s < num_segments
    begin = tl.load(first_piece_ptr + s, mask=valid, other=0) - first_piece
    end = tl.load(first_piece_ptr + s + 1, mask=valid, other=0) - first_piece
    longest = tl.max(tl.where(valid, end - begin, 0), 0)
    total = tl.zeros((BLOCK,), tl.int32)
    before = tl.full((BLOCK,), -1, tl.int32)
    for j in range(0, longest):
        piece = begin + j
        mine = valid & (piece < end)
        tl.store(base_ptr + piece, total, mask=mine)
        tl.store(before_ptr + piece, before, mask=mine)
        total += tl.load(words_ptr + piece, mask=mine, other=0)
        last = tl.load(last_ptr + piece, mask=mine, other=-1)
        before = tl.where(last >= 0, last, before)
    words = tl.load(segment_words_ptr + s, mask=valid, other=1)
    dense = total.to(tl.int64) * (2 + W) >= words * W
    entries = tl.where(dense | (s >= num_segments), 0, total.to(tl.int64))
    masks = tl.where(dense & valid, words, 0)
    tl.store(counts_ptr + s, total, mask=valid)
    tl.store(starts_ptr + s, tl.cumsum(entries, 0) - entries, mask=valid)
    tl.store(starts_ptr + num_segments + s, tl.cumsum(masks, 0) - masks, mask=valid)
    tl.store(blocks_ptr + block, tl.sum(entries, 0))
    tl.store(blocks_ptr + num_blocks + block, tl.sum(masks, 0))
    # The sums must be out before this program counts as finished, whichever warp wrote them.
    tl.debug_barrier()
    if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == num_blocks - 1:
        all_entries = tl.full((), 0, tl.int64)
        all_masks = tl.full((), 0, tl.int64)
        for at in range(0, num_blocks, BLOCK):
            b = at + tl.arange(0, BLOCK)
            there = b < num_blocks
            # Volatile: written by programs on other multiprocessors.
            e = tl.load(blocks_ptr + b, mask=there, other=0, volatile=True)
            m = tl.load(blocks_ptr + num_blocks + b, mask=there, other=0, volatile=True)
            tl.store(blocks_ptr + b, all_entries + tl.cumsum(e, 0) - e, mask=there)
            tl.store(blocks_ptr + num_blocks + b, all_masks + tl.cumsum(m, 0) - m, mask=there)
            all_entries += tl.sum(e, 0)
            all_masks += tl.sum(m, 0)
        host_ptr = host_totals_address.to(tl.pointer_type(tl.int64))
        tl.store(totals_ptr, all_entries)
        tl.store(totals_ptr + 1, all_masks)
        tl.store(host_ptr, all_entries)
        tl.store(host_ptr + 1, all_masks)
