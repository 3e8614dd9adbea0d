"""Writes the runs that the golden files and the example of ``FORMAT.md`` hold, through the format's own modules.

Owners, payloads, epochs and tokens are given, so the same inputs give the same bytes; knows no trainer and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from megasync.codecs.planes import LEVEL, LIBRARY
from megasync.digest import SHA256, XXH3_128, bytes_lanes
from megasync.frames import FrameRecord, make_table
from megasync.manifest import DIGEST_NBYTES, Manifest, payload_key, root_of
from megasync.schema import Schema, make_schema
from megasync.sinks.base import Sink
from megasync.types import Entries, Lanes, TensorSpec
from megasync.versions.anchor import anchor_header, publish_checkpoint
from megasync.versions.changes import MaskedFrame, TileChange, cut_frames, mask_frame, word_sums
from megasync.versions.encode import EncodedDelta, encode
from megasync.versions.head import claim, move_head, settle_fate, write_manifest, write_schema, write_state_table
from megasync.versions.lineage import Lineage, start_lineage
from tests.golden import format1_inputs as inputs


def schema_of(run: str, rows: Sequence[inputs.Row]) -> Schema:
    """The schema of a golden run."""
    specs = []
    for r in rows:
        cut = "last" if r.cut == "last" else "row"
        specs.append(
            TensorSpec(r.name, r.dtype, r.shape, r.layer, cut, r.block, r.frozen, r.aliases, r.formula, r.group)  # type: ignore[arg-type]
        )
    return make_schema(run, specs)


@dataclass
class Run:
    """One golden run while it is written.

    Attributes:
        sink: Where.
        schema: Its tensors.
        rows: The same, as inputs.
        lineage: Newest durable version.
        words: Its words.
        key: To sign with.
        outer: What manifests say of the outer codec.
    """

    sink: Sink
    schema: Schema
    rows: tuple[inputs.Row, ...]
    lineage: Lineage
    words: dict[str, np.ndarray]
    key: bytes | None = None
    outer: str = f"{LIBRARY} level {LEVEL}"

    @classmethod
    def begin(cls, sink: Sink, name: str, rows: tuple[inputs.Row, ...], **more: object) -> Run:
        """Claim the run."""
        schema = schema_of(name, rows)
        head = claim(sink, name, publisher=b"golden-1")
        words = inputs.first_words(rows)
        lanes = [bytes_lanes(words[t.name].view(np.uint8)) for t in schema.tensors]
        sums = np.array([(x.a, x.b) for x in lanes], dtype="<u8")
        return cls(sink, schema, rows, start_lineage(schema, head, sums), words, **more)  # type: ignore[arg-type]

    def restart(self, token: bytes) -> None:
        """Another publisher takes over: the next epoch."""
        self.lineage = replace(self.lineage, head=claim(self.sink, self.schema.run, publisher=token))

    def checkpoint(self) -> None:
        """Version 0 is a checkpoint."""
        self.lineage = publish_checkpoint(self.sink, self.lineage, key=self.key)

    def anchor(self, number: int, new: inputs.Words, payload_of: Sequence[int]) -> None:
        """Full bytes of a version, one owner an element of ``payload_of``."""
        zero = {name: words * 0 for name, words in new.items()}
        start = replace(self.lineage, sums=_frozen_sums(self.schema, self.lineage.sums))
        self._publish(number, zero, new, ["anchor"] * len(payload_of), payload_of, start)

    def delta(
        self,
        number: int,
        new: inputs.Words,
        codecs: Sequence[str],
        payload_of: Sequence[int] = (0,),
        *,
        lost: bool = False,
    ) -> None:
        """The change to a version, one owner an element of ``codecs``; a lost one never gets the head."""
        self._publish(number, self.words, new, codecs, payload_of, self.lineage, lost=lost)

    def _publish(
        self,
        number: int,
        old: inputs.Words,
        new: inputs.Words,
        codecs: Sequence[str],
        payload_of: Sequence[int],
        start: Lineage,
        *,
        lost: bool = False,
    ) -> None:
        anchor = "anchor" in codecs
        algorithm = SHA256 if self.key else XXH3_128
        deltas = [
            encode(self._frames(old, new, k, len(codecs), anchor), codec, algorithm) for k, codec in enumerate(codecs)
        ]
        tables = [make_table(d.records, DIGEST_NBYTES[algorithm]) for d in deltas]
        records: list[FrameRecord] = []
        payload_nbytes = []
        run, epoch = self.schema.run, start.head.fence
        for p in range(max(payload_of) + 1):
            mine = [k for k, of in enumerate(payload_of) if of == p and deltas[k].records]
            if not mine:
                continue
            header = anchor_header(self.schema, [tables[k] for k in mine]) if anchor else b""
            parts, at = [header], len(header)
            for k in mine:
                records += [replace(r, payload=p, offset=at + r.offset) for r in deltas[k].records]
                parts += deltas[k].parts
                at += deltas[k].nbytes
            payload_nbytes.append(self.sink.create(payload_key(run, number, epoch, p), parts))
        change, olds = _sums(self.schema, deltas)
        table = make_table(records, DIGEST_NBYTES[algorithm])
        after = start.after(change)
        touched = np.unique(table.runs["tensor_id"]).astype("<u4")
        root = root_of(after.states)
        manifest = Manifest(
            what="anchor" if anchor else "delta",
            run=run,
            epoch=epoch,
            version=number,
            base_version=-1 if anchor else start.version,
            base_digest=b"" if anchor else start.digest,
            schema_digest=self.schema.digest,
            payload_nbytes=tuple(payload_nbytes),
            frames=table,
            touched_ids=touched,
            new_states=after.states[touched],
            touched_olds=olds.view(np.uint8).reshape(-1, 16)[touched],
            root=root,
            num_changed=sum(r.num_changed for r in records),
            state_table=root if anchor else b"",
            outer=self.outer,
            formulas=tuple(sorted({t.formula for t in self.schema.tensors if t.formula})),
            info={"step": 10 * number, "seconds": 0.25, "note": "golden"},
            digest_algorithm=algorithm,
            key=self.key,
        )
        if anchor:
            write_schema(self.sink, self.schema)
            write_state_table(self.sink, run, root, after.states.tobytes())
        write_manifest(self.sink, manifest)
        if lost:
            durable, head = settle_fate(self.sink, start.head, manifest)
            assert not durable
            self.lineage = replace(self.lineage, head=head)
            return
        head = move_head(self.sink, start.head, manifest)
        self.lineage = replace(after, head=head, version=number, digest=manifest.digest)
        self.words = {name: words.copy() for name, words in new.items()}

    def _frames(
        self, old: inputs.Words, new: inputs.Words, owner: int, owners: int, anchor: bool
    ) -> Iterator[MaskedFrame]:
        """Frames of one owner."""
        tiles = self._tiles(old, new, owner, owners, anchor)
        return (
            map(self._anchor_frame, _by_layer(self.schema, tiles))
            if anchor
            else (mask_frame(self.schema, t) for t in cut_frames(self.schema, tiles))
        )

    def _tiles(
        self, old: inputs.Words, new: inputs.Words, owner: int, owners: int, anchor: bool
    ) -> Iterator[TileChange]:
        index = {r.name: i for i, r in enumerate(self.rows)}
        for tensor_id, (spec, grid) in enumerate(zip(self.schema.tensors, self.schema.grids, strict=True)):
            if spec.frozen:
                continue
            mine = inputs.owner_of_words(self.rows[index[spec.name]], index[spec.name], owners) == owner
            for tile in range(grid.num_tiles):
                num = int(grid.tile_words(np.array([tile]))[0])
                flat = grid.flat_index(np.array([tile]), np.arange(num))
                before, after = old[spec.name][flat], new[spec.name][flat]
                at = np.flatnonzero((before != after) & mine[flat])
                if len(at) or (anchor and mine[flat].any()):
                    yield TileChange(tensor_id, tile, at, before[at], after[at])

    def _anchor_frame(self, tiles: list[TileChange]) -> MaskedFrame:
        ids = np.array([t.tensor_id for t in tiles], dtype=np.uint32)
        numbers = np.array([t.tile for t in tiles], dtype=np.uint32)
        first = self.schema.tensors[tiles[0].tensor_id]
        entries = Entries(
            first.word_nbytes,
            ids,
            numbers,
            self.schema.tile_words(ids, numbers),
            np.array([len(t.positions) for t in tiles], dtype=np.uint32),
            np.concatenate([t.positions for t in tiles]).astype(np.uint32),
            np.concatenate([t.new for t in tiles]),
        )
        sums = word_sums(self.schema, entries, entries.values)
        return MaskedFrame(first.layer, entries, sums, dict.fromkeys(sums, Lanes()))


def _by_layer(schema: Schema, tiles: Iterator[TileChange]) -> Iterator[list[TileChange]]:
    """Tiles of one layer and word size each; the golden anchors are far below 64 MiB a frame."""
    for _, group in groupby(tiles, key=lambda t: (schema.layers[t.tensor_id], schema.word_nbytes[t.tensor_id])):
        yield list(group)


def _frozen_sums(schema: Schema, sums: np.ndarray) -> np.ndarray:
    """Digest sums that an anchor starts from: zero, but for frozen tensors, which it does not carry."""
    frozen = np.array([t.frozen for t in schema.tensors])
    return np.where(frozen[:, None], sums, np.uint64(0))


def _sums(schema: Schema, deltas: Sequence[EncodedDelta]) -> tuple[np.ndarray, np.ndarray]:
    """Digest sums of new minus old, and of the old values at the changed words: u64 ``[num_tensors, 2]`` each."""
    change, olds = np.zeros((2, len(schema.tensors), 2), dtype="<u8")
    for delta in deltas:
        for tensor_id, (new_minus_old, old) in delta.touched.items():
            change[tensor_id] += np.array([new_minus_old.a, new_minus_old.b], dtype="<u8")
            olds[tensor_id] += np.array([old.a, old.b], dtype="<u8")
    return change, olds
