"""The outline of many Zstd frames at once: content sizes and ends, read without decoding (RFC 8878, section 3.1.1).

A batch decoder neither asks whether a frame gives its content size nor notices bytes behind it; both are rules of the
format. All frames are walked together, block by block, with numpy. Must import nothing above errors.
"""

from __future__ import annotations

import numpy as np

from megasync.errors import FormatError

_MAGIC = np.frombuffer(b"\x28\xb5\x2f\xfd", np.uint8)
_SIZE_NBYTES = np.array([0, 2, 4, 8])  # 1 instead of 0 where the frame is a single segment
_HEADER_NBYTES = 18
_MAX_BLOCK_NBYTES = 128 << 10
_MAX_WINDOW = 0x88  # window descriptor of 128 MiB, as in ``planes``


def check_zstd_frames(data: np.ndarray, starts: np.ndarray, nbytes: np.ndarray, raw_nbytes: np.ndarray) -> None:
    """Check that each stretch is exactly one Zstd frame that gives its content size.

    Args:
        data: uint8, the bytes of all frames.
        starts: int64 ``[n]``, where each frame starts in it.
        nbytes: int64 ``[n]``, how long each is.
        raw_nbytes: int64 ``[n]``, the content size that each must give.

    Raises:
        FormatError: It is not; compressed data inside blocks is not looked at.
    """
    _require(nbytes > 0, "no Zstd frame with a content size")
    if not len(starts):
        return
    stops = starts + nbytes
    # Past the end of the data the last byte is read again: no field that reaches so far is believed.
    head = data[np.minimum(starts[:, None] + np.arange(_HEADER_NBYTES), len(data) - 1)].astype(np.int64)
    flags = head[:, 4]
    single = (flags >> 5) & 1
    size_nbytes = _SIZE_NBYTES[flags >> 6] + ((flags >> 6 == 0) & (single == 1))
    at = 5 + (1 - single)
    _require(
        (head[:, :4] == _MAGIC).all(axis=1) & (flags & 8 == 0) & (size_nbytes > 0) & (at + size_nbytes <= nbytes),
        "no Zstd frame with a content size",
    )
    _require(flags & 3 == 0, "a Zstd frame with a dictionary id")
    _require((single == 1) | (head[:, 5] <= _MAX_WINDOW), "a Zstd frame with a window above 128 MiB")
    size = np.zeros(len(starts), dtype=np.int64)
    rows = np.arange(len(starts))
    for k in range(int(size_nbytes.max())):
        inside = k < size_nbytes
        size |= np.where(inside, head[rows, np.minimum(at + k, _HEADER_NBYTES - 1)] << (8 * k), 0)
    size += 256 * (size_nbytes == 2)
    _require(size == raw_nbytes, "a Zstd content size is not the plane's length")
    at = starts + at + size_nbytes
    open_frames = rows
    ends = at.copy()
    while len(open_frames):
        here = at[open_frames]
        _require(here + 3 <= stops[open_frames], "a Zstd frame ends inside a block")
        header = data[here].astype(np.int64) | (data[here + 1].astype(np.int64) << 8)
        header |= data[here + 2].astype(np.int64) << 16
        kind, content = (header >> 1) & 3, header >> 3
        _require((kind != 3) & (content <= _MAX_BLOCK_NBYTES), "a Zstd frame has a block that cannot be")
        at[open_frames] = here + 3 + np.where(kind == 1, 1, content)
        ends[open_frames] = at[open_frames]
        open_frames = open_frames[header & 1 == 0]
    ends += 4 * ((flags >> 2) & 1)
    _require(ends == stops, "a Zstd frame is shorter or longer than its stored bytes")


def _require(good: np.ndarray, what: str) -> None:
    if not good.all():
        raise FormatError(f"stored plane {int(np.argmin(good))} of {len(good)}: {what}")
