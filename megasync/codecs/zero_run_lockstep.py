"""Raw blocks walked by numpy, all stretches of all blocks side by side: the fast filter in front of ``zero_run_walk``.

Where an element of a block begins depends on every element before it, so a walk is serial. But it can be guessed and
the guess proven: byte patterns that zero-run encoders (and others, on zeros) write mark *stretches*; all stretches are
walked at once, each until it comes upon a mark or the end of its block. Those that follow from one another, from the
first of each block on, are the elements; a mark that nobody came upon was part of a literal and is dropped. Sizes are
then added up and offsets checked. The filter names the blocks it could not prove, for a walk one by one, which decides
and words the error. So it may suspect a valid block and must never pass an invalid one.

Must not import torch or triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.kernels.zero_run_rules import END_RULES, MIN_MATCH_NBYTES, SNAPPY_COPY_NBYTES, BlockKind

_MAX_STEPS = 64  # elements of a stretch; longer ones are left to the walk one by one
_PADDING = 8  # zero bytes behind the span, so that reads just past a block stay inside the array


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Stretches of a group of blocks in order, int64 ``[S]`` each: some elements, a mark, then equal Snappy copies.

    ``begin``: first element. ``mark``: where the next mark is, the end of the block in its last stretch; ascending.
    ``num_copies``: copies of 64 bytes at that mark (Snappy). ``is_mark``: bool over the bytes of the span.
    """

    block: np.ndarray
    begin: np.ndarray
    mark: np.ndarray
    num_copies: np.ndarray
    is_mark: np.ndarray


@dataclass(frozen=True, slots=True)
class _Walked:
    """What a stretch turned out to hold; int64 ``[S]``.

    ``landed``: the mark or block end that it came upon, -1 where it is malformed. ``produced``: bytes of its elements.
    ``need``: bytes that must come before it, for its offsets to be valid. ``match_start``: where its last match begins,
    counted from its start, -1 without one (LZ4 only).
    """

    landed: np.ndarray
    produced: np.ndarray
    need: np.ndarray
    match_start: np.ndarray

    @classmethod
    def unknown(cls, num: int) -> _Walked:
        """Nothing walked yet."""
        return cls(*(np.full(num, fill) for fill in (-1, 0, 0, -1)))

    def store(self, live: np.ndarray, done: np.ndarray, landed: np.ndarray, *state: np.ndarray) -> None:
        """Write down the state of the stretches that are done: ``landed``, ``produced``, ``need``, ``match_start``."""
        index = live[done]
        self.landed[index] = landed[done]
        for result, now in zip((self.produced, self.need, self.match_start), state, strict=False):
            result[index] = now[done]


def suspects(
    kind: BlockKind, span: np.ndarray, starts: np.ndarray, ends: np.ndarray, expected: np.ndarray
) -> np.ndarray:
    """Indexes of the blocks that are not proven valid.

    Args:
        kind: Block format.
        span: uint8 ``[n]``, ``n`` below 2^31.
        starts: int64 ``[B]``, ascending from 0: where each block starts in ``span``.
        ends: int64 ``[B]``, where each ends, no later than the next starts.
        expected: int64 ``[B]``, bytes that each must decode to.

    Returns:
        int64, ascending.
    """
    src = np.concatenate((span, np.zeros(_PADDING, dtype=np.uint8)))
    if kind == "lz4":
        bad = starts >= ends
        stretches = _lz4_stretches(src, starts, ends)
        walked = _walk_lz4(src, stretches, starts, ends)
    else:
        first, bad = skip_preamble(src, starts, ends, expected)
        stretches = _snappy_stretches(src, starts, first, ends)
        walked = _walk_snappy(src, stretches, ends)
    head = np.searchsorted(stretches.block, np.arange(len(starts) + 1))
    real, copies_at = _follow(stretches, walked.landed, head, bad)
    if not len(real):
        return np.flatnonzero(bad)
    block, produced, need = stretches.block[real], walked.produced[real], walked.need[real]
    num_copies = stretches.num_copies[copies_at]
    need = np.where(num_copies > 0, np.maximum(need, 1 - produced), need)  # their offset 1
    produced = produced + SNAPPY_COPY_NBYTES * num_copies
    end = np.cumsum(produced)
    head = np.searchsorted(block, np.arange(len(starts) + 1))
    base = np.concatenate((np.zeros(1, np.int64), end))[head]
    before = end - produced - base[block]
    bad[block[need > before]] = True
    bad |= np.diff(base) != expected
    if kind == "lz4":
        match_start = walked.match_start[real]
        bad |= _breaks_guard(np.where(match_start < 0, -1, before + match_start), head, expected)
    return np.flatnonzero(bad)


def _follow(
    stretches: _Stretches, landed: np.ndarray, head: np.ndarray, bad: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Stretches that follow from the first of their block, and the stretch whose mark each came upon.

    Almost all come upon their own mark, so only the others are gone through. Sets ``bad`` where one is malformed.
    """
    via = np.arange(len(landed))
    other = np.flatnonzero(landed != stretches.mark)
    via[other] = np.where(landed[other] < 0, -1, np.searchsorted(stretches.mark, landed[other]))
    real = np.ones(len(landed), dtype=bool)
    done = 0
    for i in other.tolist():
        if i < done:
            continue
        if via[i] < 0:
            bad[stretches.block[i]] = True
            done = int(head[stretches.block[i] + 1])
        else:
            done = int(via[i]) + 1
        real[i + 1 : done] = False
    index = np.flatnonzero(real)
    return index, via[index]


def _lz4_stretches(src: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> _Stretches:
    """Marks: where a block begins, and two literals with a match at offset 1: ``2x vv 00 01 00``."""
    n = len(src) - 4
    sign = (src[:n] & 0xF0 == 0x20) & (src[2 : n + 2] == 0) & (src[3 : n + 3] == 1) & (src[4:] == 0)
    sign[starts] = True
    begin = np.flatnonzero(sign)
    block = np.searchsorted(starts, begin, side="right") - 1
    inside = begin < ends[block]
    begin, block = begin[inside], block[inside]
    mark = ends[block]
    mark[:-1] = np.where(block[1:] == block[:-1], begin[1:], mark[:-1])
    return _Stretches(block, begin, mark, np.zeros_like(begin), sign)


def _walk_lz4(src: np.ndarray, stretches: _Stretches, starts: np.ndarray, ends: np.ndarray) -> _Walked:
    index = np.where(src != 255, np.arange(len(src), dtype=np.int32), np.int32(len(src) - 1))
    length_end = np.minimum.accumulate(index[::-1])[::-1]  # where a length extension that passes this byte ends
    last_read = len(src) - 3

    def extend(length: np.ndarray, full: int, after: np.ndarray) -> None:
        """Add their extensions to lengths of ``full``, and move ``after`` past them; both in place."""
        some = np.flatnonzero(length == full)
        first = after[some]
        stop = length_end[first]
        length[some] += (stop - first) * 255 + src[stop]
        after[some] = stop + 1

    result = _Walked.unknown(len(stretches.begin))
    at, end, block_start = stretches.begin, ends[stretches.block], starts[stretches.block]
    live = np.arange(len(at))
    produced = need = np.zeros_like(at)
    match_start = np.full_like(at, -1)
    for _ in range(_MAX_STEPS):
        token = src[at].astype(np.int64)
        literals = token >> 4
        after = at + 1
        extend(literals, 15, after)
        after += literals
        produced = produced + literals
        closed = (after == end) & ((literals >= END_RULES["lz4"].last_literals) | (at == block_start))
        result.store(live, closed, after, produced, need, match_start)
        np.minimum(after, last_read, out=after)
        offset = src[after].astype(np.int64) | src[after + 1].astype(np.int64) << 8
        length = (token & 15) + MIN_MATCH_NBYTES
        after += 2
        extend(length, 15 + MIN_MATCH_NBYTES, after)
        need = np.maximum(need, offset - produced)
        match_start = produced
        produced = produced + length
        valid = ~closed & (offset > 0) & (after < end)
        landed = valid & stretches.is_mark[np.minimum(after, len(stretches.is_mark) - 1)]
        result.store(live, landed, after, produced, need, match_start)
        keep = np.flatnonzero(valid & ~landed)
        if not len(keep):
            break
        live, at, end, block_start = live[keep], after[keep], end[keep], block_start[keep]
        produced, need, match_start = produced[keep], need[keep], match_start[keep]
    return result


def _breaks_guard(match_start: np.ndarray, head: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Whether the last match of each block starts too near its end: it is in the last stretch or in the one before."""
    last = head[1:] - 1
    own = match_start[last]
    earlier = np.where(last > head[:-1], match_start[last - 1], -1)
    start = np.where(own < 0, earlier, own)
    return (start >= 0) & (expected - start < END_RULES["lz4"].match_guard)


def skip_preamble(
    src: np.ndarray, at: np.ndarray, end: np.ndarray, expected: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Skip the length headers of Snappy blocks.

    Args:
        src: uint8, not empty.
        at: int64 ``[B]``, where each block starts, inside ``src``.
        end: int64 ``[B]``, where each ends.
        expected: int64 ``[B]``, bytes that each must decode to.

    Returns:
        int64 ``[B]``, where the elements start, at most ``end``; bool ``[B]``, true where a block does not begin with
        the shortest varint of its length and then an element.
    """
    bad = (expected <= 0) | (expected >= 1 << 28)
    rest, more = expected, np.ones(len(at), dtype=bool)
    for _ in range(4):
        last = rest < 128
        bad = bad | (more & (src[np.minimum(at, len(src) - 1)] != (rest & 127 | np.where(last, 0, 128))))
        at = at + more
        more = more & ~last
        rest = rest >> 7
    bad |= at >= end
    return np.minimum(at, end), bad


def _snappy_stretches(src: np.ndarray, starts: np.ndarray, first: np.ndarray, ends: np.ndarray) -> _Stretches:
    """Marks: where runs of the copy ``FE 01 00`` begin."""
    n = len(src) - 2
    copy = (src[:n] == 0xFE) & (src[1 : n + 1] == 1) & (src[2:] == 0)
    for i in range(-2, 3):  # no element crosses a bound, and none of these begins with a block
        copy[np.clip(starts + i, 0, n - 1)] = False
        copy[np.clip(ends + i, 0, n - 1)] = False
    is_mark, tail = copy.copy(), copy.copy()
    is_mark[3:] &= ~copy[:-3]
    tail[:-3] &= ~copy[3:]
    run_begin, run_end = np.flatnonzero(is_mark), np.flatnonzero(tail) + 3
    run_block = np.searchsorted(starts, run_begin, side="right") - 1
    inside = (run_begin >= first[run_block]) & (run_end <= ends[run_block])
    is_mark[run_begin[~inside]] = False
    run_begin, run_end, run_block = run_begin[inside], run_end[inside], run_block[inside]
    # A block has one stretch more than runs; its last ends with the block, before no copies.
    block_of = np.arange(len(starts))
    run_at = np.arange(len(run_begin)) + run_block
    final = np.searchsorted(run_block, block_of, side="right") + block_of
    block = np.empty(len(run_begin) + len(starts), dtype=np.int64)
    begin, mark, num_copies = np.empty_like(block), np.empty_like(block), np.zeros_like(block)
    block[run_at], block[final] = run_block, block_of
    mark[run_at], mark[final] = run_begin, ends
    begin[run_at + 1] = run_end
    begin[np.concatenate((np.zeros(1, np.int64), final[:-1] + 1))] = first
    num_copies[run_at] = (run_end - run_begin) // 3
    return _Stretches(block, begin, mark, num_copies, is_mark)


def _walk_snappy(src: np.ndarray, stretches: _Stretches, ends: np.ndarray) -> _Walked:
    result = _Walked.unknown(len(stretches.begin))
    empty = stretches.begin == stretches.mark
    result.landed[empty] = stretches.mark[empty]
    live = np.flatnonzero(stretches.begin < stretches.mark)
    at, end = stretches.begin[live], ends[stretches.block[live]]
    produced = need = np.zeros_like(at)
    for _ in range(_MAX_STEPS):
        if not len(live):
            break
        tag = src[at]
        form = tag & 3
        length = (tag >> 2).astype(np.int64) + 1
        low, high = src[at + 1].astype(np.int64), src[at + 2].astype(np.int64) << 8
        after = at + form + 1  # copies; the four-byte offset of form 3 is only suspected
        valid = form != 3
        near = np.flatnonzero(form == 1)
        length[near] = 4 + (length[near] - 1 & 7)
        high[near] = (tag[near] >> 5).astype(np.int64) << 8
        literal = form == 0
        some = np.flatnonzero(literal & (length > 60))
        if len(some):
            width = length[some] - 60
            third = src[at[some] + 3].astype(np.int64) << 16
            length[some] = 1 + (low[some] | np.where(width > 1, high[some], 0) | np.where(width > 2, third, 0))
            after[some] += width
            valid[some] &= width < 4
        after += np.where(literal, length, 0)
        offset = low | high
        valid &= literal | (offset > 0)
        valid &= after <= end
        need = np.maximum(need, np.where(literal, 0, offset - produced))
        produced = produced + length
        landed = valid & ((after == end) | stretches.is_mark[np.minimum(after, end)])
        result.store(live, landed, after, produced, need)
        keep = np.flatnonzero(valid & ~landed)
        live, at, end, produced, need = live[keep], after[keep], end[keep], produced[keep], need[keep]
    return result
