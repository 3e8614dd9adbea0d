"""A small publisher for tests: publications made from plain arrays, straight through the format's own modules.

Independent of ``megasync.trainer``: it masks with numpy, sums digests with ``bytes_lanes`` and writes with
``versions.head``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megasync.codecs.base import EncodedFrame
from megasync.codecs.registry import codec_by_name
from megasync.digest import bytes_lanes, content_digest, lanes_to_bytes, state_digest
from megasync.frames import FrameRecord, make_table
from megasync.manifest import Head, Manifest, empty_table, manifest_key, root_of, rows_of
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.types import DTYPE_NBYTES, WORD_DTYPES, Entries, Lanes, TensorSpec
from megasync.versions.head import claim, move_head, write_schema, write_state_table

Words = Mapping[str, np.ndarray]


def spec(name: str, dtype: str, shape: Sequence[int], **more: object) -> TensorSpec:
    """A tensor spec with the layer number read from the name."""
    parts = name.split(".")
    layer = next((int(b) for a, b in zip(parts, parts[1:], strict=False) if a == "layers" and b.isdigit()), -1)
    return replace(TensorSpec(name, dtype, tuple(shape), layer=layer), **more)  # type: ignore[arg-type]


def make_schema(run: str, specs: Sequence[TensorSpec]) -> Schema:
    """A schema in the order that the format wants: layer, word size, name."""
    return Schema(run, tuple(sorted(specs, key=lambda t: (t.layer, t.word_nbytes, t.name))))


def random_words(specs: Sequence[TensorSpec], seed: int = 0) -> dict[str, np.ndarray]:
    """Random canonical words of every tensor; floats stay finite."""
    rng = np.random.default_rng(seed)
    out = {}
    for t in specs:
        w = DTYPE_NBYTES[t.dtype]
        if t.dtype in ("BF16", "F32"):
            values = rng.standard_normal(t.num_words).astype(np.float32)
            words = values.view(np.uint32) if w == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            words = rng.integers(0, 1 << 8 * w, t.num_words, dtype=WORD_DTYPES[w])
        out[t.name] = words.reshape(t.shape or (1,))
    return out


def changed(words: Words, density: float, seed: int = 1, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """A copy with random low bits changed in about ``density`` of the words (at least one a tensor)."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, old in words.items():
        new = old.copy()
        if old.size and (names is None or name in names):
            num = max(1, int(old.size * density))
            at = rng.choice(old.size, num, replace=False)
            new.reshape(-1)[at] ^= rng.integers(1, 8, num).astype(old.dtype)
        out[name] = new
    return out


@dataclass
class Publisher:
    """Publishes versions of one run.

    Attributes:
        sink: Where.
        schema: The run's tensors.
        codec: Codec of deltas.
        frame_changed: Changed words after which a frame closes.
        edit_frame: Called on every encoded frame's stored bytes before digests are made.
        edit_manifest: Called on every manifest before it is written.
    """

    sink: Sink
    schema: Schema
    codec: str = "sparse"
    frame_changed: int = 2_000
    edit_frame: Callable[[bytes], bytes] = lambda b: b
    edit_manifest: Callable[[Manifest], Manifest] = lambda m: m
    words: dict[str, np.ndarray] = field(default_factory=dict)
    newest: Manifest | None = None
    head: Head | None = None

    def _begin(self) -> Head:
        if self.head is None:
            self.head = claim(self.sink, self.schema.run)
            write_schema(self.sink, self.schema)
        return self.head

    def states(self, words: Words) -> np.ndarray:
        """Table of state digests."""
        return rows_of([state_digest(t, lanes_of(words[t.name])) for t in self.schema.tensors])

    def checkpoint(self, words: Words) -> Manifest:
        """Version 0: an existing checkpoint, named by its state digests."""
        return self._root("checkpoint", words, 0, [], [])

    def anchor(self, words: Words, version: int = 0) -> Manifest:
        """A version with full bytes of every tensor that is not frozen."""
        records, parts = self._frames(None, words, "anchor")
        return self._root("anchor", words, version, records, parts)

    def _root(self, what: str, words: Words, version: int, records: list[FrameRecord], parts: list[bytes]) -> Manifest:
        head = self._begin()
        table = self.states(words)
        digest = content_digest(table.tobytes())
        write_state_table(self.sink, self.schema.run, digest, table.tobytes())
        frames = make_table(records) if records else empty_table()
        ids = np.unique(frames.runs["tensor_id"]).astype("<u4")
        manifest = Manifest(
            what,  # type: ignore[arg-type]
            self.schema.run,
            head.fence,
            version,
            -1,
            b"",
            self.schema.digest,
            (sum(map(len, parts)),) if parts else (),
            frames,
            ids,
            table[ids],
            np.zeros((len(ids), 16), np.uint8),
            root_of(table),
            sum(r.num_changed for r in records),
            digest,
        )
        return self._publish(manifest, parts, words)

    def delta(self, new: Words, version: int | None = None, codec: str | None = None) -> Manifest:
        """The next version, relative to the newest."""
        base = self.newest
        assert base is not None
        head = self._begin()
        records, parts = self._frames(self.words, new, codec or self.codec)
        table = self.states(new)
        frames = make_table(records) if records else empty_table()
        ids = np.unique(frames.runs["tensor_id"]).astype("<u4")
        olds = []
        for i in ids:
            name = self.schema.tensors[int(i)].name
            touched = self.words[name] * (self.words[name] != new[name]).astype(self.words[name].dtype)
            olds.append(lanes_to_bytes(lanes_of(touched)))
        manifest = Manifest(
            "delta",
            self.schema.run,
            head.fence,
            base.version + 1 if version is None else version,
            base.version,
            base.digest,
            self.schema.digest,
            (sum(map(len, parts)),) if parts else (),
            frames,
            ids,
            table[ids],
            rows_of(olds) if olds else np.empty((0, 16), np.uint8),
            root_of(table),
            sum(r.num_changed for r in records),
        )
        return self._publish(manifest, parts, new)

    def _publish(self, manifest: Manifest, parts: list[bytes], words: Words) -> Manifest:
        manifest = self.edit_manifest(manifest)
        if parts:
            self.sink.create(manifest.payload_key(0), parts)
        # Not by write_manifest, which refuses what a reader would: here it may be edited.
        self.sink.create(manifest_key(manifest.run, manifest.version, manifest.epoch), [manifest.encoded])
        assert self.head is not None
        self.head = move_head(self.sink, self.head, manifest)
        self.newest, self.words = manifest, {k: v.copy() for k, v in words.items()}
        return manifest

    def _frames(self, old: Words | None, new: Words, codec: str) -> tuple[list[FrameRecord], list[bytes]]:
        """Frames of tiles in id order; a frame holds one layer and word size."""
        records: list[FrameRecord] = []
        parts: list[bytes] = []
        pending: list[tuple[int, int, np.ndarray, np.ndarray, int]] = []

        def close() -> None:
            if not pending:
                return
            layer = self.schema.tensors[pending[0][0]].layer
            entries = Entries(
                self.schema.tensors[pending[0][0]].word_nbytes,
                np.array([p[0] for p in pending], np.uint32),
                np.array([p[1] for p in pending], np.uint32),
                np.array([p[4] for p in pending], np.uint32),
                np.array([len(p[2]) for p in pending], np.uint32),
                np.concatenate([p[2] for p in pending]).astype(np.uint32),
                np.concatenate([p[3] for p in pending]),
            )
            pending.clear()
            if not entries.num_changed:
                return
            frame: EncodedFrame = codec_by_name(codec).encode(entries)
            stored = self.edit_frame(b"".join(frame.planes))
            records.append(
                FrameRecord(
                    0,
                    sum(map(len, parts)),
                    frame.codec,
                    entries.word_nbytes,
                    layer,
                    entries.num_changed,
                    frame.plane_nbytes,
                    content_digest(stored),
                    entries.tensor_ids,
                    entries.tiles,
                )
            )
            parts.append(stored)

        for i, t in enumerate(self.schema.tensors):
            if t.frozen or not t.num_words:
                continue
            if pending:
                first = self.schema.tensors[pending[0][0]]
                if (first.layer, first.word_nbytes) != (t.layer, t.word_nbytes):
                    close()
            base = np.zeros_like(new[t.name]) if old is None else old[t.name]
            mask = base ^ new[t.name]
            grid = self.schema.grids[i]
            for tile in range(grid.num_tiles):
                box = grid.box(tile)
                inside = tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))
                flat = np.ascontiguousarray(mask[inside]).reshape(-1)
                at = np.flatnonzero(flat)
                if len(at) or codec == "anchor":
                    pending.append((i, tile, at, flat[at], box.num_words))
                if sum(len(p[2]) for p in pending) >= self.frame_changed:
                    close()
        close()
        return records, parts


def lanes_of(words: np.ndarray) -> Lanes:
    """Digest sums of a whole tensor."""
    return bytes_lanes(np.ascontiguousarray(words).reshape(-1).view(np.uint8)) if words.size else Lanes()
