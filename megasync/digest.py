"""Digests: digests of stored bytes, and the linear state digest of a parameter.

The state digest is two lanes of ``sum of u32[i] * K_lane(i) mod 2^64`` over the aligned little-endian 4-byte units of
the canonical bytes. It is linear, so a changed word contributes alone, shards and ranks add up, and trainer, applier
and fold keep it up to date from the changed words. It finds accidents, not attackers. Formula and constants are part
of the wire format (format 1); kernels run the same sums on a GPU. Must import nothing but types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Protocol

import numpy as np
import xxhash

from megasync.errors import MissingPackageError
from megasync.types import Box, Lanes, TensorSpec

# Eight odd constants (lane, unit in its group of four) and a seed per lane: the first eight bytes, little-endian, of
# sha256("megasync state digest C {lane} {k}") with the lowest bit set, and of sha256("megasync state digest S {lane} 0").
C: tuple[tuple[int, ...], ...] = (
    (0x023E03ABED4E7E41, 0xA07823558450690B, 0x9D8ABE36E32B3FCD, 0xC6FF12B08CD4BB57),
    (0x449DFDF1FF9FB0E1, 0x59D1F3A285CF54C7, 0xCE30206D1D05705D, 0x6B393835A4811069),
)
S: tuple[int, int] = (0xD05273B75E8B8D4E, 0xA04D625DEA6955D4)

_C = np.array(C, dtype=np.uint64)
_CHUNK = 1 << 18  # words handled at a time, so that temporaries stay in the cache
_GROUP_NBYTES = 16
_GROUPS = 1 << 16  # 16-byte groups whose multipliers are kept together
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
MASK64 = (1 << 64) - 1
_ONE = np.uint64(1)


class Digester(Protocol):
    """What a hash object must offer."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in more bytes."""

    def digest(self) -> bytes:
        """The digest of all bytes taken in."""


def _blake3() -> Digester:
    try:
        import blake3  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        raise MissingPackageError("digest algorithm blake3 needs the package blake3: pip install blake3") from e
    return blake3.blake3()  # type: ignore[no-any-return,unused-ignore]


XXH3_128, BLAKE3, SHA256 = 1, 2, 3
_ALGORITHMS: dict[int, tuple[str, Callable[[], Digester]]] = {
    XXH3_128: ("xxh3-128", xxhash.xxh3_128),
    BLAKE3: ("blake3", _blake3),
    SHA256: ("sha256", sha256),
}


def content_digest(parts: bytes | memoryview | Iterable[bytes | memoryview], algorithm: int = XXH3_128) -> bytes:
    """Digest of stored bytes.

    Args:
        parts: One buffer, or several that follow each other.
        algorithm: Id of the format: 1 xxh3-128, 2 blake3, 3 sha256.

    Returns:
        16 bytes (big-endian, as xxhash prints it) or 32.

    Raises:
        ValueError: Unknown id.
        MissingPackageError: The package of the algorithm is not installed.
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"digest algorithm {algorithm} is unknown: format 1 has {sorted(_ALGORITHMS)}")
    digester = _ALGORITHMS[algorithm][1]()
    for part in [parts] if isinstance(parts, bytes | memoryview) else parts:
        digester.update(part)
    return digester.digest()


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's splitmix64 finaliser (Java 8 SplittableRandom), element-wise on uint64."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    shifted = np.empty_like(z)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= np.right_shift(z, np.uint64(shift), out=shifted)
        z *= np.uint64(factor)
    z ^= np.right_shift(z, np.uint64(31), out=shifted)
    return z


def unit_weights(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``K_lane(i)`` of both lanes for 4-byte unit numbers.

    Args:
        units: uint64 ``[n]``.

    Returns:
        Two uint64 ``[n]``.
    """
    group, k = units >> np.uint64(2), units & np.uint64(3)
    a = (splitmix64(group + np.uint64(S[0])) | _ONE) * _C[0][k]
    b = (splitmix64(group + np.uint64(S[1])) | _ONE) * _C[1][k]
    return a, b


@dataclass(frozen=True, slots=True)
class WordWeights:
    """Weights of words at given canonical positions; sum any values at those words with ``lanes``.

    Attributes:
        word_nbytes: Bytes of a word.
        a: uint64, weight of each word's lowest 4-byte unit in lane 0, shifted to the word's place in it. 8-byte words
            have two weights each: ``[n, 2]``.
        b: The same for lane 1.
    """

    word_nbytes: int
    a: np.ndarray
    b: np.ndarray

    @classmethod
    def of(cls, flat_index: np.ndarray, word_nbytes: int) -> WordWeights:
        """Weights of the words numbered ``flat_index`` (row-major in the canonical tensor, any integer dtype)."""
        index = flat_index.astype(np.uint64)
        if word_nbytes == 8:
            units = np.stack((index * np.uint64(2), index * np.uint64(2) + _ONE), axis=-1)
            return cls(8, *unit_weights(units))
        if word_nbytes == 4:
            return cls(4, *unit_weights(index))
        per_unit = 4 // word_nbytes
        a, b = unit_weights(index >> np.uint64(per_unit.bit_length() - 1))
        shift = (index & np.uint64(per_unit - 1)) * np.uint64(8 * word_nbytes)
        return cls(word_nbytes, a << shift, b << shift)

    def lanes(self, values: np.ndarray) -> Lanes:
        """Digest sum of ``values`` (``<u{word_nbytes}`` ``[n]``) at these words."""
        if self.word_nbytes == 8:
            v = np.ascontiguousarray(values).view("<u4").astype(np.uint64)
            return Lanes(int((v * self.a.ravel()).sum()), int((v * self.b.ravel()).sum()))
        v = values.astype(np.uint64)
        return Lanes(int(np.dot(v, self.a)), int(np.dot(v, self.b)))

    def change(self, old: np.ndarray, new: np.ndarray) -> Lanes:
        """Digest sum of ``new`` minus that of ``old`` at these words."""
        if self.word_nbytes == 8:
            return self.lanes(new) - self.lanes(old)
        v = new.astype(np.uint64) - old.astype(np.uint64)
        return Lanes(int(np.dot(v, self.a)), int(np.dot(v, self.b)))


def bytes_lanes(data: np.ndarray, first_byte: int = 0) -> Lanes:
    """Digest sum of a run of consecutive canonical bytes.

    Args:
        data: uint8 ``[n]``, contiguous.
        first_byte: Canonical offset of ``data[0]``; runs that start on 16 bytes take the fast path throughout.

    Returns:
        The sums of both lanes.
    """
    total = Lanes()
    head = min(-first_byte % 16, data.size)
    body = (data.size - head) // 16 * 16
    for start, stop in ((0, head), (head + body, data.size)):
        if stop > start:
            index = np.arange(first_byte + start, first_byte + stop, dtype=np.uint64)
            total += WordWeights.of(index, 1).lanes(data[start:stop])
    first = (first_byte + head) // 16
    words = data[head : head + body].view("<u8").reshape(-1, 2)
    at = 0
    while at < len(words):
        # Chunks end on multiples of _GROUPS, so that tensors of one size share their tables of multipliers.
        stop = min(at + _GROUPS - (first + at) % _GROUPS, len(words))
        chunk, offset = divmod(first + at, _GROUPS)
        tables = _multipliers(chunk)[:, offset : offset + stop - at]
        total += _groups_lanes(words[at:stop], tables)
        at = stop
    return total


def _groups_lanes(words: np.ndarray, tables: np.ndarray) -> Lanes:
    """Digest sum of 16-byte groups (u64 ``[n, 2]``) given their multipliers (u64 ``[2, n]``)."""
    sums = [0, 0]
    for k in range(4):
        # The constants C factor out of the sum over groups: four dot products a lane instead of four products a group.
        column = words[:, k // 2] >> _HALF if k % 2 else words[:, k // 2] & _LOW
        for lane in range(2):
            sums[lane] += int(np.dot(column, tables[lane])) * C[lane][k]
    return Lanes(sums[0] & MASK64, sums[1] & MASK64)


@lru_cache(maxsize=64)
def _multipliers(chunk: int) -> np.ndarray:
    """``M`` of both lanes for the groups of a chunk: u64 ``[2, _GROUPS]``, 1 MiB a chunk."""
    return _group_weights(np.arange(chunk * _GROUPS, (chunk + 1) * _GROUPS, dtype=np.uint64))


def _group_weights(group: np.ndarray) -> np.ndarray:
    """``M`` of both lanes, u64 ``[2, n]``, for numbers of 16-byte groups (u64 ``[n]``)."""
    return np.stack([splitmix64(group + np.uint64(seed)) | _ONE for seed in S])


def box_lanes(shape: tuple[int, ...], box: Box, words: np.ndarray) -> Lanes:
    """Digest sum of a box of a canonical tensor.

    Args:
        shape: Extents of the whole tensor in words.
        box: The box.
        words: ``<u{w}``, the box's words row-major, contiguous.

    Returns:
        The sums of both lanes; adding them over boxes that cover the tensor once gives the whole tensor's.
    """
    flat = np.ascontiguousarray(words).reshape(-1)
    if not flat.size:
        return Lanes()
    nbytes = flat.dtype.itemsize
    run = 1  # words that lie together in the canonical tensor
    for i in range(len(box.extent) - 1, -1, -1):
        run *= box.extent[i]
        if box.extent[i] != shape[i]:
            break
    starts = _run_starts(shape, box, run)
    if run * nbytes >= 4096 or len(starts) == 1:
        total = Lanes()
        for i, start in enumerate(starts):
            total += bytes_lanes(flat[i * run : (i + 1) * run].view(np.uint8), int(start) * nbytes)
        return total
    total = Lanes()
    runs = max(1, _CHUNK // run)
    if run * nbytes % _GROUP_NBYTES == 0 and not (starts * nbytes % _GROUP_NBYTES).any():
        # Rows of a column band: whole 16-byte groups, so one weight a group does for all its words.
        groups, inside = flat.view("<u8").reshape(-1, 2), np.arange(run * nbytes // _GROUP_NBYTES)
        for at in range(0, len(starts), runs):
            index = (starts[at : at + runs, None] * nbytes // _GROUP_NBYTES + inside).ravel()
            first = at * len(inside)
            total += _groups_lanes(groups[first : first + index.size], _group_weights(index.astype(np.uint64)))
        return total
    for at in range(0, len(starts), runs):
        index = (starts[at : at + runs, None] + np.arange(run)).ravel()
        total += WordWeights.of(index, nbytes).lanes(flat[at * run : at * run + index.size])
    return total


def _run_starts(shape: tuple[int, ...], box: Box, run: int) -> np.ndarray:
    """Canonical word index of the first word of each run of ``run`` consecutive words of a box."""
    starts = np.zeros(1, dtype=np.int64)
    left = run
    inner: list[bool] = []
    for extent in reversed(box.extent):
        inner.append((left > 1 and left % extent == 0) or extent == 1)
        left = left // extent if inner[-1] else left
    for extent, whole, start, one_run in zip(box.extent, shape, box.start, reversed(inner), strict=True):
        cells = np.array([start]) if one_run else np.arange(start, start + extent)
        starts = (starts[:, None] * whole + cells).ravel()
    return starts


def state_digest(spec: TensorSpec, lanes: Lanes) -> bytes:
    """The state digest of a parameter from its digest sums.

    Args:
        spec: Name, dtype and shape are mixed in.
        lanes: Sums over all its canonical bytes.

    Returns:
        16 bytes: both lanes little-endian after adding the halves of xxh3-128 of ``name NUL dtype NUL shape`` (shape
        as decimal extents joined by commas). Zero for an empty tensor.
    """
    if not spec.num_words:
        return bytes(16)
    mix = xxhash.xxh3_128_digest(f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}".encode())
    total = lanes + Lanes(int.from_bytes(mix[:8], "big"), int.from_bytes(mix[8:], "big"))
    return total.a.to_bytes(8, "little") + total.b.to_bytes(8, "little")


def state_lanes(spec: TensorSpec, digest: bytes) -> Lanes:
    """The digest sums that ``state_digest`` made ``digest`` from."""
    if not spec.num_words:
        return Lanes()
    zero = state_digest(spec, Lanes())
    return lanes_from_bytes(digest) - lanes_from_bytes(zero)


def lanes_to_bytes(lanes: Lanes) -> bytes:
    """Both lanes, little-endian, 16 bytes."""
    return lanes.a.to_bytes(8, "little") + lanes.b.to_bytes(8, "little")


def lanes_from_bytes(data: bytes) -> Lanes:
    """The inverse of ``lanes_to_bytes``."""
    return Lanes(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little"))
