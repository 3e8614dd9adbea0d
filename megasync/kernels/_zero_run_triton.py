"""Triton side of ``kernels.zero_run``: imported only where Triton is installed, and only by that module.

Equal, byte for byte, to ``zero_run_reference``: integers only, no atomics, every output byte written once by one lane.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _changed_flags(word):  # type: ignore[no-untyped-def]
    """1 in each byte of an int64 that is not 0. Carries stay inside their byte, as each adds 127 to at most 127."""
    low = word & 0x7F7F7F7F7F7F7F7F
    high = ((low + 0x7F7F7F7F7F7F7F7F) | word) >> 7
    return high & 0x0101010101010101


@triton.jit
def _sum_of_bytes(flags):  # type: ignore[no-untyped-def]
    """Sum of the bytes of ``_changed_flags``, 0 to 8, int32."""
    half = flags + (flags >> 32)
    quarter = half + (half >> 16)
    return ((quarter + (quarter >> 8)) & 15).to(tl.int32)


@triton.jit
def count_kernel(word_ptr, count_ptr, num_words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Changed bytes of each stretch of ``WORDS`` eight-byte words, int32. One program a stretch."""
    pid = tl.program_id(0)
    index = pid.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(word_ptr + index, mask=index < num_words, other=0)
    tl.store(count_ptr + pid, tl.sum(_sum_of_bytes(_changed_flags(word)), axis=0))


@triton.jit
def positions_kernel(  # type: ignore[no-untyped-def]
    word_ptr, before_ptr, position_ptr, num_words, WORDS: tl.constexpr
):
    """Write the positions of a stretch's changed bytes, in order, from entry ``before_ptr[pid]`` on."""
    pid = tl.program_id(0)
    index = pid.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(word_ptr + index, mask=index < num_words, other=0)
    flags = _changed_flags(word)
    count = _sum_of_bytes(flags)
    entry = tl.load(before_ptr + pid) + (tl.cumsum(count, axis=0) - count)
    for byte in tl.static_range(8):
        hit = (flags >> (8 * byte)) & 1
        tl.store(position_ptr + entry, index * 8 + byte, mask=hit != 0)
        entry += hit


@triton.jit
def _last_not_after(offset_ptr, first, count, target):  # type: ignore[no-untyped-def]
    """Greatest ``i`` in ``first .. first + count - 1`` with ``offset[i] <= target``, given that ``first`` is one.

    ``count`` is a scalar, so all lanes take the same number of steps.
    """
    found = first
    left = count
    while left > 1:
        half = left // 2
        probe = found + half
        found = tl.where(tl.load(offset_ptr + probe) <= target, probe, found)
        left -= half
    return found


@triton.jit
def _lz4_byte(mask_ptr, at, start, literals, match, valid):  # type: ignore[no-untyped-def]
    """Byte ``at`` of an LZ4 sequence, int32."""
    extra = (literals + 240) // 255
    literal_at = at - 1 - extra
    match_at = literal_at - literals
    plain = tl.load(mask_ptr + start + literal_at, mask=valid & (literal_at >= 0) & (match_at < 0), other=0)
    value = tl.where(match_at == (match + 236) // 255 + 1, (match + 236) % 255, 255)
    value = tl.where(match_at == 1, 0, value)
    value = tl.where(match_at == 0, 1, value)
    value = tl.where(match_at < 0, plain.to(tl.int32), value)
    value = tl.where(literal_at < 0, tl.where(at == extra, (literals + 240) % 255, 255), value)
    token = tl.minimum(literals, 15) * 16 + tl.minimum(tl.maximum(match - 4, 0), 15)
    return tl.where(at == 0, token, value)


@triton.jit
def _snappy_byte(mask_ptr, at, start, literals, match, header, valid):  # type: ignore[no-untyped-def]
    """Byte ``at`` of the elements of a Snappy sequence, the block's length before them, int32."""
    varint_nbytes = (header > 0).to(tl.int32) + (header >= 128).to(tl.int32) + (header >= 16384).to(tl.int32)
    tag_nbytes = (literals > 0).to(tl.int32) + (literals > 60).to(tl.int32)
    tag_nbytes += (literals > 256).to(tl.int32) + (literals > 65536).to(tl.int32)
    tag_at = at - varint_nbytes
    literal_at = tag_at - tag_nbytes
    copy_at = literal_at - literals
    plain = tl.load(mask_ptr + start + literal_at, mask=valid & (literal_at >= 0) & (copy_at < 0), other=0)
    full_nbytes = match // 64 * 3
    rest = match % 64
    tiny = (rest > 0) & (rest < 4)
    length = tl.where(tiny, rest + 4, rest)
    value = tl.where(rest < 12, (length - 4) * 4 + 1, (length - 1) * 4 + 2)
    inside = copy_at < full_nbytes
    value = tl.where(inside, tl.where(tiny & (copy_at >= full_nbytes - 3), 0xEE, 0xFE), value)
    in_copy = tl.where(inside, tl.maximum(copy_at, 0) % 3, copy_at - full_nbytes)
    value = tl.where(in_copy > 0, 2 - in_copy, value)
    value = tl.where(copy_at < 0, plain.to(tl.int32), value)
    tag = tl.where(tag_nbytes == 1, (literals - 1) * 4, (58 + tag_nbytes) * 4)
    shift = 8 * tl.minimum(tl.maximum(tag_at - 1, 0), 3)
    tag = tl.where(tag_at > 0, ((literals - 1) >> shift) & 255, tag)
    value = tl.where(literal_at < 0, tag, value)
    varint = (header >> (7 * tl.minimum(at, 3))) & 127
    varint = tl.where(at < varint_nbytes - 1, varint | 128, varint)
    return tl.where(tag_at < 0, varint, value)


@triton.jit(do_not_specialize=["num_sequences", "total"])  # the loops need them as values even where they are 1
def emit_kernel(  # type: ignore[no-untyped-def]
    mask_ptr,
    out_ptr,
    offset_ptr,
    literal_start_ptr,
    literal_nbytes_ptr,
    match_nbytes_ptr,
    header_nbytes_ptr,
    num_sequences,
    total,
    IS_LZ4: tl.constexpr,
    BYTES: tl.constexpr,
):
    """``BYTES`` output bytes a program, one lane each: coalesced writes, and no lane has more work than another.

    Two binary searches for the program's first and last sequence, then one among those few for each lane.
    """
    first_byte = tl.program_id(0).to(tl.int64) * BYTES
    last_byte = tl.minimum(first_byte + BYTES, total) - 1
    zero = num_sequences * 0
    first = _last_not_after(offset_ptr, zero, num_sequences, first_byte)
    count = _last_not_after(offset_ptr, first, num_sequences - first, last_byte) - first + 1
    out = first_byte + tl.arange(0, BYTES)
    valid = out < total
    of = _last_not_after(offset_ptr, first + tl.zeros([BYTES], dtype=tl.int32), count, out)
    at = (out - tl.load(offset_ptr + of)).to(tl.int32)
    start = tl.load(literal_start_ptr + of)
    literals = tl.load(literal_nbytes_ptr + of)
    match = tl.load(match_nbytes_ptr + of)
    if IS_LZ4:
        value = _lz4_byte(mask_ptr, at, start, literals, match, valid)
    else:
        header = tl.load(header_nbytes_ptr + of)
        value = _snappy_byte(mask_ptr, at, start, literals, match, header, valid)
    tl.store(out_ptr + out, value.to(tl.uint8), mask=valid)
