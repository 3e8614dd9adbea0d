"""A small run for the engine contract: publications of given words, made without a trainer; and how a check expects.

Used by ``contract``. Must not import a trainer or a test library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

from megasync.codecs.dense import AnchorCodec
from megasync.digest import bytes_lanes, content_digest, lanes_to_bytes, state_digest
from megasync.frames import FrameRecord, make_table
from megasync.manifest import Manifest, empty_table, root_of, rows_of
from megasync.receiver.engine import Engine
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.types import DTYPE_NBYTES, Entries, Lanes
from megasync.versions.changes import TileChange, cut_frames, mask_frame
from megasync.versions.encode import encode_one
from megasync.versions.head import claim, move_head, write_manifest, write_schema, write_state_table

_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF << 52}


class ContractRun:
    """Publishes whole versions of a small model.

    Args:
        sink: Where.
        schema: The run's tensors.
        words: Of version 0.
        root: What version 0 is.
    """

    def __init__(
        self,
        sink: Sink,
        schema: Schema,
        words: Mapping[str, np.ndarray],
        *,
        root: Literal["checkpoint", "anchor"] = "checkpoint",
    ) -> None:
        self.sink, self.schema = sink, schema
        self.head = claim(sink, schema.run)
        write_schema(sink, schema)
        table = self._table(words)
        digest = content_digest(table.tobytes())
        write_state_table(sink, schema.run, digest, table.tobytes())
        records, parts = self._anchor_frames(words) if root == "anchor" else ([], [])
        self.newest = self._publish(root, words, records, parts, {}, table, digest)

    def publish(self, words: Mapping[str, np.ndarray]) -> Manifest:
        """The next version as a delta."""
        records: list[FrameRecord] = []
        parts: list[bytes] = []
        olds: dict[int, Lanes] = {}
        for tiles in cut_frames(self.schema, self._changes(words)):
            frame = mask_frame(self.schema, tiles)
            encoded, record = encode_one(frame, "sparse", sum(map(len, parts)))
            records.append(record)
            parts += encoded.planes
            for i, lanes in frame.touched_old.items():
                olds[i] = olds.get(i, Lanes()) + lanes
        self.newest = self._publish("delta", words, records, parts, olds, self._table(words), b"")
        return self.newest

    def _table(self, words: Mapping[str, np.ndarray]) -> np.ndarray:
        rows = []
        for t in self.schema.tensors:
            raw = np.ascontiguousarray(words[t.name]).reshape(-1).view(np.uint8)
            rows.append(state_digest(t, bytes_lanes(raw)))
        return rows_of(rows)

    def _tiles(self) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
        for i, t in enumerate(self.schema.tensors):
            for tile in range(self.schema.grids[i].num_tiles if not t.frozen else 0):
                box = self.schema.grids[i].box(tile)
                yield i, tile, tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))

    def _changes(self, words: Mapping[str, np.ndarray]) -> Iterator[TileChange]:
        for i, tile, box in self._tiles():
            name = self.schema.tensors[i].name
            old = np.ascontiguousarray(self.words[name][box]).reshape(-1)
            new = np.ascontiguousarray(words[name][box]).reshape(-1)
            at = np.flatnonzero(old != new)
            if len(at):
                yield TileChange(i, tile, at, old[at], new[at])

    def _anchor_frames(self, words: Mapping[str, np.ndarray]) -> tuple[list[FrameRecord], list[bytes]]:
        records: list[FrameRecord] = []
        parts: list[bytes] = []
        for i, tile, box in self._tiles():
            spec = self.schema.tensors[i]
            flat = np.ascontiguousarray(words[spec.name][box]).reshape(-1)
            at = np.flatnonzero(flat)
            ids, tiles = np.array([i], np.uint32), np.array([tile], np.uint32)
            counts = np.array([len(at)], np.uint32)
            entries = Entries(
                spec.word_nbytes, ids, tiles, np.array([flat.size], np.uint32), counts, at.astype(np.uint32), flat[at]
            )
            stored = AnchorCodec().encode(entries)
            if len(at):
                offset = sum(map(len, parts))
                digest = content_digest(stored.planes)
                records.append(
                    FrameRecord(
                        0,
                        offset,
                        stored.codec,
                        spec.word_nbytes,
                        spec.layer,
                        len(at),
                        stored.plane_nbytes,
                        digest,
                        ids,
                        tiles,
                    )
                )
                parts += stored.planes
        return records, parts

    def _publish(
        self,
        what: Literal["delta", "anchor", "checkpoint"],
        words: Mapping[str, np.ndarray],
        records: list[FrameRecord],
        parts: list[bytes],
        olds: Mapping[int, Lanes],
        table: np.ndarray,
        state_table: bytes,
    ) -> Manifest:
        frames = make_table(records) if records else empty_table()
        ids = np.unique(frames.runs["tensor_id"]).astype("<u4")
        delta = what == "delta"
        manifest = Manifest(
            what,
            self.schema.run,
            self.head.fence,
            self.newest.version + 1 if delta else 0,
            self.newest.version if delta else -1,
            self.newest.digest if delta else b"",
            self.schema.digest,
            (sum(map(len, parts)),) if parts else (),
            frames,
            ids,
            table[ids],
            rows_of([lanes_to_bytes(olds.get(int(i), Lanes())) for i in ids]),
            root_of(table),
            sum(r.num_changed for r in records),
            state_table,
        )
        if parts:
            self.sink.create(manifest.payload_key(0), parts)
        write_manifest(self.sink, manifest)
        self.head = move_head(self.sink, self.head, manifest)
        self.words = {k: v.copy() for k, v in words.items()}
        return manifest


def changed_words(
    schema: Schema, words: Mapping[str, np.ndarray], density: float, *, seed: int
) -> dict[str, np.ndarray]:
    """A copy with random bits flipped in about ``density`` of the words of each tensor that is not frozen.

    Exponents of floats are left alone, so that finite weights stay finite and the engine's outputs can be compared.
    """
    rng = np.random.default_rng(seed)
    out = {}
    for t in schema.tensors:
        new = words[t.name].copy()
        if density and not t.frozen and new.size:
            num = max(1, int(new.size * density))
            at = rng.choice(new.size, num, replace=False)
            flips = rng.integers(1, 1 << 8 * DTYPE_NBYTES[t.dtype], num, dtype=new.dtype, endpoint=False)
            keep = new.dtype.type(~_EXPONENTS.get(t.dtype, 0) & ((1 << 8 * new.itemsize) - 1))
            new.reshape(-1)[at] ^= np.maximum(flips & keep, 1)
        out[t.name] = new
    return out


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Bytes of a live tensor, as they lie in its shape."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def expect(holds: bool, what: str) -> None:
    """Raise AssertionError with ``what`` unless it holds; works with ``python -O`` too."""
    if not holds:
        raise AssertionError(what)


def record(engine: Engine) -> list[str]:
    """Have the engine's hooks write down that they were called."""
    events: list[str] = []
    pause, resume, quarantine = engine.pause, engine.resume, engine.quarantine

    def on_resume(version: int) -> None:
        events.append(f"resume {version}")
        resume(version)

    def on_pause() -> None:
        events.append("pause")
        pause()

    def on_quarantine(reason: str) -> None:
        events.append("quarantine")
        quarantine(reason)

    engine.pause, engine.resume, engine.quarantine = on_pause, on_resume, on_quarantine  # type: ignore[method-assign]
    return events


@contextmanager
def raises(kind: type[Exception], words: str) -> Iterator[None]:
    """The block must raise ``kind`` with ``words`` in its message."""
    try:
        yield
    except kind as e:
        expect(words in str(e), f"{kind.__name__} without {words!r}: {e}")
        return
    raise AssertionError(f"no {kind.__name__} was raised")
