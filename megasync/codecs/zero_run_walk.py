"""Strict walkers of raw LZ4 and Snappy blocks: bounds, offsets and exact length, without producing the bytes.

A GPU decoder does undefined things on malformed input, so blocks from an unsigned source are walked on the CPU before
one sees them. Comes after the digest of the stored bytes, before nvCOMP or the Decompression Engine. The walkers are
stricter than the usual CPU decoders: offset 0 (which some accept) and a Snappy length that is not its shortest varint
are refused, and so are LZ4 blocks that ignore the rules for the end of a block. Many blocks go through ``walk_blocks``.

Formats: LZ4 block format description and google/snappy format_description.txt. Must not import torch or triton.
"""

from __future__ import annotations

import re
from typing import NoReturn

import numpy as np

from megasync.codecs.zero_run_lockstep import suspects
from megasync.errors import FormatError
from megasync.kernels.zero_run_rules import END_RULES, MIN_MATCH_NBYTES, BlockKind, check_kind

_REPEATED_COPY = re.compile(
    b"(?:\xfe\x01\x00)+"
)  # the one element that makes up nearly all of a Snappy block of a mask
_GROUP_NBYTES = 4 << 20  # encoded bytes and blocks that one vectorised pass takes: it stays in the cache
_GROUP_BLOCKS = 1 << 12
_MIN_FILTERED_NBYTES = 16 << 10  # fewer bytes than these are walked faster one by one


def walk_lz4(block: bytes | memoryview | np.ndarray, expected_nbytes: int) -> None:
    """Walk one LZ4 block.

    Args:
        block: The raw block.
        expected_nbytes: Bytes that it must decode to.

    Raises:
        FormatError: The block breaks the format, or holds more or fewer bytes.
    """
    src = bytes(block)
    end = len(src)
    at = produced = 0
    match_start = -1
    while True:
        if at >= end:
            _refuse("LZ4", f"ends at byte {at} where a token is due", end, expected_nbytes)
        token = src[at]
        at += 1
        literals = token >> 4
        if literals == 15:
            more = 255
            while more == 255:
                if at >= end:
                    _refuse("LZ4", "ends inside a literal length", end, expected_nbytes)
                more = src[at]
                literals += more
                at += 1
        at += literals
        produced += literals
        if at >= end:
            break
        if at + 2 > end:
            _refuse("LZ4", f"ends inside the offset at byte {at}", end, expected_nbytes)
        offset = src[at] | src[at + 1] << 8
        if not 0 < offset <= produced:
            _refuse("LZ4", f"has offset {offset} after {produced} bytes of output", end, expected_nbytes)
        at += 2
        length = (token & 15) + MIN_MATCH_NBYTES
        if length == 15 + MIN_MATCH_NBYTES:
            more = 255
            while more == 255:
                if at >= end:
                    _refuse("LZ4", "ends inside a match length", end, expected_nbytes)
                more = src[at]
                length += more
                at += 1
        match_start = produced
        produced += length
        if produced > expected_nbytes:
            _refuse("LZ4", f"holds {produced} bytes or more", end, expected_nbytes)
    if at > end:
        _refuse("LZ4", f"ends {at - end} bytes before its literals do", end, expected_nbytes)
    if produced != expected_nbytes:
        _refuse("LZ4", f"holds {produced} bytes", end, expected_nbytes)
    rule = END_RULES["lz4"]
    if match_start >= 0 and (literals < rule.last_literals or produced - match_start < rule.match_guard):
        _refuse(
            "LZ4",
            f"has a match {produced - match_start} bytes before its end and {literals} literals after it, at least "
            f"{rule.match_guard} and {rule.last_literals} are the rule",
            end,
            expected_nbytes,
        )


def walk_snappy(block: bytes | memoryview | np.ndarray, expected_nbytes: int) -> None:
    """Walk one Snappy block, its length varint included; arguments and errors as in ``walk_lz4``."""
    src = bytes(block)
    end = len(src)
    at = 0
    for at, want in enumerate(shortest_varint(expected_nbytes), start=1):
        if at > end or src[at - 1] != want:
            _refuse("Snappy", f"begins {src[:5].hex()}, not with its length as a varint", end, expected_nbytes)
    produced = 0
    while at < end:
        tag = src[at]
        if tag == 0xFE and (run := _REPEATED_COPY.match(src, at)) and produced:
            produced += (run.end() - at) // 3 * 64
            at = run.end()
        elif tag & 3 == 0:
            length = (tag >> 2) + 1
            at += 1
            if length > 60:
                width = length - 60
                if at + width > end:
                    _refuse("Snappy", "ends inside a literal length", end, expected_nbytes)
                length = int.from_bytes(src[at : at + width], "little") + 1
                at += width
            at += length
            produced += length
            if at > end:
                _refuse("Snappy", f"ends {at - end} bytes before its literals do", end, expected_nbytes)
        else:
            kind = tag & 3
            width = 5 if kind == 3 else kind + 1
            if at + width > end:
                _refuse("Snappy", f"ends inside the copy at byte {at}", end, expected_nbytes)
            if kind == 1:
                offset = (tag >> 5) << 8 | src[at + 1]
                length = 4 + (tag >> 2 & 7)
            else:
                offset = int.from_bytes(src[at + 1 : at + width], "little")
                length = (tag >> 2) + 1
            if not 0 < offset <= produced:
                _refuse("Snappy", f"has offset {offset} after {produced} bytes of output", end, expected_nbytes)
            at += width
            produced += length
        if produced > expected_nbytes:
            _refuse("Snappy", f"holds {produced} bytes or more", end, expected_nbytes)
    if produced != expected_nbytes:
        _refuse("Snappy", f"holds {produced} bytes", end, expected_nbytes)


def walk_blocks(
    kind: BlockKind, data: np.ndarray, starts: np.ndarray, nbytes: np.ndarray, expected_nbytes: np.ndarray
) -> None:
    """Walk many blocks of one buffer; a vectorised filter proves most, the rest go one by one.

    Args:
        kind: Block format.
        data: uint8 ``[n]``, C-contiguous, holds the blocks (frames of a payload, or an arena with padding).
        starts: integer ``[B]``, where each block starts in ``data``.
        nbytes: integer ``[B]``, bytes of each block.
        expected_nbytes: integer ``[B]``, bytes that each must decode to.

    Raises:
        FormatError: A block breaks its format or has another length; the message has its number.
        ValueError: The arrays differ in length, or a block lies outside ``data``.
    """
    check_kind(kind)
    starts, nbytes, expected = (np.asarray(a, dtype=np.int64) for a in (starts, nbytes, expected_nbytes))
    if not starts.shape == nbytes.shape == expected.shape or starts.ndim != 1:
        raise ValueError(f"walk_blocks: {starts.shape} starts, {nbytes.shape} sizes, {expected.shape} lengths")
    ends = starts + nbytes
    # Each by itself first: the sum of two hostile numbers may wrap around.
    if len(starts) and (min(starts.min(), nbytes.min()) < 0 or max(starts.max(), nbytes.max(), ends.max()) > len(data)):
        raise ValueError(f"walk_blocks: a block lies outside the {len(data)} bytes given")
    walk = walk_lz4 if kind == "lz4" else walk_snappy
    order = np.argsort(starts, kind="stable")
    starts_in_order, ends_in_order = starts[order], ends[order]
    disjoint = bool((starts_in_order[1:] >= ends_in_order[:-1]).all())
    a = 0
    while a < len(order):
        base = int(starts_in_order[a])
        b = a + int(np.searchsorted(starts_in_order[a : a + _GROUP_BLOCKS], base + _GROUP_NBYTES))
        group, stop = order[a:b], int(ends_in_order[b - 1])
        if disjoint and stop - base >= _MIN_FILTERED_NBYTES:
            found = suspects(kind, data[base:stop], starts[group] - base, ends[group] - base, expected[group])
            group = group[found]
        for i in group:
            try:
                walk(data[starts[i] : ends[i]], int(expected[i]))
            except FormatError as error:
                raise FormatError(f"block {i} of {len(starts)}: {error}") from None
        a = b


def shortest_varint(value: int) -> bytes:
    """LEB128 of a non-negative integer in as few bytes as it takes: Snappy's length header."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _refuse(name: str, what: str, block_nbytes: int, expected_nbytes: int) -> NoReturn:
    raise FormatError(
        f"{name} block of {block_nbytes} bytes, expected to decode to {expected_nbytes} bytes: it {what}; "
        "it was given to no decoder, report the publisher"
    )
