"""Checkpoints on disk: safetensors files read box by box and written stream by stream, every dtype, any size.

Bytes are what counts here, so the data section is mapped and addressed directly; torch and numpy have no dtype for
some of what safetensors knows. Used to seed snapshots, by the tools, and by anchors. Must not import trainer or receiver.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megasync.errors import FormatError
from megasync.tiles import TileGrid
from megasync.types import DTYPE_NBYTES, WORD_DTYPES, Box, TensorSpec

_MAX_HEADER_NBYTES = 100 << 20
SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        name: Its name.
        dtype: safetensors dtype name.
        shape: Extents in words (bytes for packed dtypes: the last extent counts bytes).
        file: The file.
        offset: First byte in the file.
        nbytes: Its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, everything checked against the file's size.

    Raises:
        FormatError: Naming the file and the tensor.
    """
    if not file.is_file():
        # Opening a FIFO would wait for its writer for ever.
        raise FormatError(f"{file}: no regular file, or a link that leads nowhere; give safetensors files")
    size = file.stat().st_size
    with file.open("rb") as f:
        prefix = f.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_NBYTES, size - 8):
            raise FormatError(f"{file.name}: header of {length} bytes in a file of {size}; not a safetensors file")
        header = _json_object(f.read(length), f"{file.name}: header")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise FormatError(f"{file.name}: __metadata__ is {_kind_of(metadata)}, expected an object")
    try:
        items = [_item(name, row) for name, row in header.items()]
    except FormatError as e:
        raise FormatError(f"{file.name}: unreadable header: {e}") from e
    out: dict[str, StoredTensor] = {}
    at = 0
    for name, dtype, shape, start, stop in sorted(items, key=lambda t: (t[3], t[4])):
        if dtype not in DTYPE_NBYTES:
            raise FormatError(f"{file.name}: {name} has dtype {dtype!r:.60}; known: {', '.join(DTYPE_NBYTES)}")
        if start != at or stop < start or min(shape, default=0) < 0:
            raise FormatError(f"{file.name}: {name} lies at {start}..{stop}, expected to start at {at}")
        bits = prod(shape) * SUB_BYTE_BITS.get(dtype, 8 * DTYPE_NBYTES[dtype])
        if bits % 8 or bits // 8 != stop - start:
            raise FormatError(
                f"{file.name}: {name} {dtype}{list(shape)} has {stop - start} bytes, expected {bits / 8:g}"
            )
        out[name] = StoredTensor(
            name, dtype, _words(dtype, shape, stop - start), file, 8 + length + start, stop - start
        )
        at = stop
    if 8 + length + at != size:
        raise FormatError(f"{file.name}: {size} bytes, its header speaks of {8 + length + at}")
    return out, metadata


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object; FormatError for what is none, however broken it is."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{what} is unreadable: {e}") from e
    if not isinstance(found, dict):
        raise FormatError(f"{what} is unreadable: {_kind_of(found)}, expected an object")
    return found


def _kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    words = {type(None): "null", list: "a list", dict: "an object", str: "text", bool: "true or false"}
    return words.get(type(value), "a number")


def _item(name: str, row: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise FormatError(f"tensor name {name!r:.120} has a surrogate, which no UTF-8 has") from None
    if not isinstance(row, dict):
        raise FormatError(f"{name}: {_kind_of(row)}, expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = row.get("dtype"), _numbers(row, name, "shape"), _numbers(row, name, "data_offsets")
    if not isinstance(dtype, str):
        raise FormatError(f"{name}: dtype is {_kind_of(dtype)}, expected text")
    if len(offsets) != 2:
        raise FormatError(f"{name}: data_offsets has {len(offsets)} numbers, expected where the tensor starts and ends")
    return name, dtype, shape, offsets[0], offsets[1]


def _numbers(row: dict[str, Any], name: str, key: str) -> tuple[int, ...]:
    found = row.get(key)
    if not isinstance(found, list) or not all(type(x) is int for x in found):
        raise FormatError(f"{name}: {key} is no list of whole numbers")
    return tuple(found)


def _words(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """Shape in words: sub-byte rows count bytes where a row is whole bytes, else the tensor is one row."""
    if dtype not in SUB_BYTE_BITS or not shape:
        return shape
    bits = shape[-1] * SUB_BYTE_BITS[dtype]
    return (*shape[:-1], bits // 8) if bits % 8 == 0 else (nbytes,)


class Checkpoint:
    """A checkpoint directory (or one file), read box by box through small read-only maps.

    Args:
        path: Directory with ``*.safetensors`` (and the index file where there are several), or one such file.

    Raises:
        FormatError: No such files, a broken header, or one name in two files.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[Path, BinaryIO] = {}
        for file in checkpoint_files(self.path):
            tensors, metadata = read_header(file)
            if twice := tensors.keys() & self.tensors.keys():
                raise FormatError(f"{self.path.name}: {', '.join(sorted(twice)[:5])} in more than one file")
            self.tensors.update(tensors)
            self.metadata.update(metadata)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; views handed out keep their own map alive."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def box(self, name: str, box: Box) -> np.ndarray:
        """Words of a box of a tensor.

        Args:
            name: The tensor.
            box: In words; one axis of extent 1 for a scalar.

        Returns:
            ``<u{w}``, shape ``box.extent``, read-only: read from the file where the box is one run of bytes, else a view of
            its own map, which covers the span of the box only. Memory and address space go with the array.

        Raises:
            KeyError: No such tensor.
        """
        t = self.tensors[name]
        dtype = WORD_DTYPES[DTYPE_NBYTES[t.dtype]]
        if not box.num_words:
            return np.empty(box.extent, dtype)
        shape = t.shape or (1,)
        strides = [dtype.itemsize] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        first = sum(s * x for s, x in zip(strides, box.start, strict=True))
        span = sum(s * (e - 1) for s, e in zip(strides, box.extent, strict=True)) + dtype.itemsize
        if t.file not in self._files:
            self._files[t.file] = t.file.open("rb")
        if span == box.num_words * dtype.itemsize:
            # One run of bytes: a read costs less than the page faults of a map, above all in sparse files.
            words = np.empty(box.extent, dtype)
            _read_into(self._files[t.file], t.offset + first, words, name)
            words.flags.writeable = False
            return words
        skip = (t.offset + first) % mmap.ALLOCATIONGRANULARITY
        window = mmap.mmap(
            self._files[t.file].fileno(), skip + span, access=mmap.ACCESS_READ, offset=t.offset + first - skip
        )
        return np.ndarray(box.extent, dtype, window, skip, strides)

    def tile(self, name: str, grid: TileGrid, tile: int) -> np.ndarray:
        """Words of a tile of a tensor; see ``box``."""
        return self.box(name, grid.box(tile))


def _read_into(file: BinaryIO, offset: int, words: np.ndarray, name: str) -> None:
    view = words.reshape(-1).data.cast("B")
    while len(view):
        num = os.preadv(file.fileno(), [view], offset)
        if not num:
            raise FormatError(f"{name}: its file ends {len(view)} bytes early; it was cut after it was opened")
        view, offset = view[num:], offset + num


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by the index where there is one.

    Raises:
        FormatError: None found, or the index names a file that is missing or outside the directory.
    """
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        found = _json_object(index.read_bytes(), f"{index.name} of {path.name}").get("weight_map")
        if not found or not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise FormatError(f"{index.name} of {path.name} has no weight_map of tensor names to file names")
        names = sorted(set(found.values()))
        for name in names:
            if Path(name).name != name or not (path / name).is_file():
                raise FormatError(f"{index.name} of {path.name} names the file {name!r}, which is not in the directory")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        raise FormatError(f"no safetensors files in {path}: give a checkpoint directory or file")
    return files


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str] | None = None
) -> bytes:
    """Header of a safetensors file, its length prefix included, padded to 8 bytes.

    Args:
        tensors: Name, dtype, shape and bytes of each tensor, in the order of the data.
        metadata: Strings for ``__metadata__``.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def specs_of(checkpoint: Checkpoint, layer_of: Any = None) -> Iterator[TensorSpec]:
    """Specs of a checkpoint's tensors by naming convention alone (layer number and cut axis from the name)."""
    for t in checkpoint.tensors.values():
        yield TensorSpec(t.name, t.dtype, t.shape, layer=layer_of_name(t.name), cut=cut_of_name(t.name))


_LAST = ("o_proj", "down_proj", "w2", "wo", "dense_4h_to_h", "out_proj")


def cut_of_name(name: str) -> Any:
    """``last`` for output projections, whose tensor-parallel cut runs along the last axis, else ``row``."""
    parts = name.split(".")
    return "last" if any(p in _LAST for p in parts[-2:]) else "row"


def layer_of_name(name: str) -> int:
    """The number after ``layers``, ``h`` or ``blocks`` in a dotted name, -1 where there is none."""
    parts = name.split(".")
    for word, number in zip(parts, parts[1:], strict=False):
        if word in ("layers", "h", "blocks") and number.isdigit():
            return int(number)
    return -1
