"""A tensor-parallel engine rank of the model-like list and publications for it, at any scale, on a GPU or on the CPU.

Publications are made by 64 owners whose cut is not the engine's: every owner has whole experts and every 64th tile of the
rest, so a rank has to fetch all frames and keeps a quarter of the entries. All layers of a kind carry the same changed words
and hold the same random bytes, which makes 111 GB of weights and 0.9 GB of payload a matter of seconds. Before it:
``workload``. After it: bench_receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch

from launch.bench.workload import Shape, engine_rank, model_specs, owner_share
from megasync.codecs.registry import codec_by_name
from megasync.digest import content_digest
from megasync.frames import FrameRecord, make_table
from megasync.layout.modes import Layout
from megasync.manifest import Head, Manifest, empty_table, root_of
from megasync.receiver.engine import Engine
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.types import Entries
from megasync.versions.changes import CLOSE_ENTRIES
from megasync.versions.head import claim, move_head, write_manifest, write_schema, write_state_table

RUN = "bench"
OWNERS = 64


class RankEngine(Engine):
    """One rank of an engine of several; the others hold the rest of the weights and have nothing to say of the sums.

    Attributes:
        live: Storages by name.
        places: Layouts by canonical name.
    """

    def __init__(
        self, live: dict[str, torch.Tensor], places: Mapping[str, Layout], schema: Schema, num_ranks: int
    ) -> None:
        self.name, self.rank, self.num_ranks = "bench engine", 0, num_ranks
        self.live, self.places = live, places
        self._nothing: dict[tuple[str, int], bytes] = {}
        self._total = np.array([t.num_words for t in schema.tensors], dtype=np.int64)

    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        """See ``Engine.layouts``."""
        return self.places

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """See ``Engine.tensors``."""
        return self.live

    def gather(self, data: bytes) -> list[bytes]:
        """This rank's ballot, and what others would say: the words that are missing here, and sums of 0."""
        kind, error, body = msgspec.msgpack.decode(data, type=_Ballot)
        if error is not None:
            return [data] * self.num_ranks
        sums = _sums(body)
        if sums is not None:
            # Sums of 0 take other ranks no time of this one.
            key = kind, len(sums)
            if key not in self._nothing:
                none = msgspec.msgpack.encode([bytes(len(sums)), b"", b""])
                self._nothing[key] = msgspec.msgpack.encode([kind, None, none])
            return [data, *[self._nothing[key]] * (self.num_ranks - 1)]
        claims = _claims(body)
        out = [data]
        for rank in range(1, self.num_ranks):
            other = body
            if claims is not None:
                mine = np.frombuffer(claims, "<i8")
                left = (self._total - mine if rank == 1 else np.zeros_like(mine)).astype("<i8").tobytes()
                other = msgspec.msgpack.encode([left, []])
            out.append(msgspec.msgpack.encode([kind, None, other]))
        return out


_Ballot = tuple[str, str | None, memoryview]
"""As in ``receiver.votes``; looked at where it is: a copy of megabytes would hold up the engine that decodes here."""


def _sums(body: memoryview) -> memoryview | None:
    """The sums of a tally, None for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=tuple[memoryview, memoryview, memoryview])[0]
    except msgspec.DecodeError:
        return None


def _claims(body: memoryview) -> bytes | None:
    """The words that a rank claims at binding, None for anything else."""
    try:
        found = msgspec.msgpack.decode(body)
    except msgspec.DecodeError:
        return None
    return found[0] if isinstance(found, list) and len(found) == 2 and isinstance(found[0], bytes) else None


@dataclass
class World:
    """A run, one engine rank of it, and what is published.

    Attributes:
        shape: Sizes of the model.
        schema: The run's tensors.
        engine: The rank.
        sink: Where.
        layer_kind: Layer whose changed words each layer carries.
    """

    shape: Shape
    schema: Schema
    engine: RankEngine
    sink: Sink
    layer_kind: dict[int, int]
    newest: Manifest | None = None
    head: Head | None = None
    _frames: dict[tuple, list[list[tuple[FrameRecord, bytes]]]] = field(default_factory=dict)

    @property
    def live_nbytes(self) -> int:
        """Bytes of the live weights."""
        return sum(t.numel() for t in self.engine.live.values())

    def checkpoint(self, table: np.ndarray) -> Manifest:
        """Version 0, named by the state digests of what is live."""
        self.head = claim(self.sink, RUN)
        write_schema(self.sink, self.schema)
        digest = content_digest(table.tobytes())
        write_state_table(self.sink, RUN, digest, table.tobytes())
        none = np.empty((0, 16), np.uint8)
        manifest = Manifest(
            "checkpoint",
            RUN,
            self.head.fence,
            0,
            -1,
            b"",
            self.schema.digest,
            (),
            empty_table(),
            np.empty(0, "<u4"),
            none,
            none,
            root_of(table),
            0,
            digest,
        )
        return self._move(manifest)

    def draft(self, density: float, codec: str = "sparse", seed: int = 1) -> Manifest:
        """The next version with its payloads written, but with sums of 0: stage it to learn them."""
        assert self.newest is not None
        assert self.head is not None
        records: list[FrameRecord] = []
        parts: list[list[bytes]] = [[] for _ in range(OWNERS)]
        offset = [0] * OWNERS
        first = {layer: int(np.searchsorted(self.schema.layers, layer)) for layer in self.layer_kind}
        for layer, kind in sorted(self.layer_kind.items()):
            shift = first[layer] - first[kind]
            for owner, frames in enumerate(self._layer(kind, density, codec, seed)):
                for record, stored in frames:
                    ids = record.tensor_ids + np.uint32(shift)
                    records.append(replace(record, payload=owner, offset=offset[owner], layer=layer, tensor_ids=ids))
                    parts[owner].append(stored)
                    offset[owner] += len(stored)
        frames = make_table(records)
        ids = np.unique(frames.runs["tensor_id"]).astype("<u4")
        zero = np.zeros((len(ids), 16), np.uint8)
        version = self.newest.version + 1
        manifest = Manifest(
            "delta",
            RUN,
            self.head.fence,
            version,
            self.newest.version,
            self.newest.digest,
            self.schema.digest,
            tuple(offset),
            frames,
            ids,
            zero,
            zero,
            bytes(16),
            sum(r.num_changed for r in records),
        )
        for owner in range(OWNERS):
            self.sink.create(manifest.payload_key(owner), parts[owner])
        return manifest

    def publish(self, draft: Manifest, new_states: np.ndarray, touched_olds: np.ndarray, root: bytes) -> Manifest:
        """Publish a draft with its sums."""
        return self._move(replace(draft, new_states=new_states, touched_olds=touched_olds, root=root))

    def _move(self, manifest: Manifest) -> Manifest:
        assert self.head is not None
        write_manifest(self.sink, manifest)
        self.head = move_head(self.sink, self.head, manifest)
        self.newest = manifest
        return manifest

    def _layer(self, kind: int, density: float, codec: str, seed: int) -> list[list[tuple[FrameRecord, bytes]]]:
        """Frames of one layer by owner."""
        key = (kind, density, codec, seed)
        if key not in self._frames:
            rng = np.random.default_rng([seed, kind + 1])
            self._frames[key] = [
                [_encoded(e, kind, codec) for e in _entries(self.schema, owned, density, rng)]
                for owned in _owned(self, kind)
            ]
        return self._frames[key]


def _owned(world: World, layer: int) -> list[list[tuple[int, np.ndarray]]]:
    """Tensor ids and tiles of a layer that each owner has, in id order."""
    out = []
    few = replace(world.shape, num_layers=min(world.shape.num_layers, world.shape.num_dense + 1))
    for owner in range(OWNERS):
        share = owner_share(few, OWNERS, owner)
        mine = [(world.schema.ids[s.name], tiles) for s, tiles in share if s.layer == layer]
        out.append(sorted(mine, key=lambda x: x[0]))
    return out


def _entries(
    schema: Schema, owned: list[tuple[int, np.ndarray]], density: float, rng: np.random.Generator
) -> Iterator[Entries]:
    """Random changed words of some tiles, cut into frames as a trainer cuts them."""
    for w in (1, 2):
        mine = [(i, t) for i, t in owned if schema.tensors[i].word_nbytes == w]
        if not mine:
            continue
        ids = np.repeat([i for i, _ in mine], [len(t) for _, t in mine]).astype(np.uint32)
        tiles = np.concatenate([t for _, t in mine]).astype(np.uint32)
        words = schema.tile_words(ids, tiles)
        ends = np.cumsum(words, dtype=np.int64)
        at = np.unique(rng.integers(0, ends[-1], rng.poisson(density * float(ends[-1]))))
        values = rng.integers(1, 256, len(at)).astype(f"<u{w}")
        if w == 2:
            values <<= 8 * rng.integers(0, 2, len(at)).astype("<u2")
        tile = np.searchsorted(ends, at, side="right")
        counts = np.bincount(tile, minlength=len(tiles))
        number = np.concatenate(([0], np.cumsum(counts)[:-1])) // CLOSE_ENTRIES
        edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(tiles)]
        stop = np.concatenate(([0], np.cumsum(counts)))
        positions = (at - (ends - words)[tile]).astype(np.uint32)
        for a, b in zip(edges[:-1], edges[1:], strict=True):
            has = np.flatnonzero(counts[a:b]) + a
            if len(has):
                span = slice(stop[a], stop[b])
                yield Entries(
                    w,
                    ids[has],
                    tiles[has],
                    words[has],
                    counts[has].astype(np.uint32),
                    positions[span],
                    values[span],
                )


def _encoded(entries: Entries, layer: int, codec: str) -> tuple[FrameRecord, bytes]:
    frame = codec_by_name(codec).encode(entries)
    stored = b"".join(frame.planes)
    record = FrameRecord(
        0,
        0,
        frame.codec,
        entries.word_nbytes,
        layer,
        entries.num_changed,
        frame.plane_nbytes,
        content_digest(stored),
        entries.tensor_ids,
        entries.tiles,
    )
    return record, stored


def build_world(shape: Shape, sink: Sink, device: str, *, tp: int = 4) -> World:
    """The engine rank with random live weights, and an empty run."""
    placed, sizes = engine_rank(shape, tp, 0)
    specs = sorted(model_specs(shape), key=lambda t: (t.layer, t.word_nbytes, t.name))
    schema = Schema(RUN, tuple(specs))
    places = {p.spec.name: Layout(p.spec.shape, p.spec.word_nbytes, p.start, p.stop, (p.record,)) for p in placed}
    kinds = {layer: min(layer, 0 if layer < shape.num_dense else shape.num_dense) for layer in range(shape.num_layers)}
    kinds[-1] = -1
    live: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    for name, nbytes in sizes.items():
        layer = _layer_of(name)
        twin = None if layer < 0 else live.get(name.replace(f"layers.{layer}.", f"layers.{kinds[layer]}."))
        if twin is not None:
            live[name] = twin.clone()
        else:
            live[name] = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
    return World(shape, schema, RankEngine(live, places, schema, tp), sink, kinds)


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return next((int(b) for a, b in zip(parts, parts[1:], strict=False) if a == "layers" and b.isdigit()), -1)
