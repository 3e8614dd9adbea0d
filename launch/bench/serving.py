"""An engine rank that decodes while it follows a run, with versions ready for it: the world of the engine benchmarks.

``pause`` and ``resume`` of the engine are the decode loop's. Versions lead there and back, so that any number of them are one
set of payloads; their digest sums are learnt by staging them once. Before it: decoder, receiver_world. After it:
bench_engine, bench_end_to_end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import torch

from launch.bench import receiver_world
from launch.bench.decoder import DecodeLoop
from launch.bench.receiver_world import OWNERS, RUN, RankEngine, World, build_world
from launch.bench.workload import Shape
from megasync.config import ApplyConfig
from megasync.frames import FrameRecord
from megasync.layout.modes import Layout
from megasync.manifest import Manifest, root_of
from megasync.receiver import applier as applier_module
from megasync.receiver.applier import Applier
from megasync.receiver.audit import audit
from megasync.receiver.bind import bind
from megasync.receiver.ledger import as_lanes
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.stage import stage
from megasync.receiver.sums import Sums
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.sinks.local import LocalSink
from megasync.telemetry import Telemetry
from megasync.versions.publication import PublicationReader

T = TypeVar("T")

DENSITY = 0.00085


class DecodingEngine(RankEngine):
    """A rank whose hooks stop and start a decode loop.

    Attributes:
        loop: The loop; None while nothing decodes.
        standing_at: When the last ``pause`` returned, ns.
        resumed_at: When the last ``resume`` was called, ns.
    """

    def __init__(
        self, live: dict[str, torch.Tensor], places: Mapping[str, Layout], schema: Schema, num_ranks: int
    ) -> None:
        super().__init__(live, places, schema, num_ranks)
        self.loop: DecodeLoop | None = None
        self.standing_at = self.resumed_at = 0

    def pause(self) -> None:
        """See ``Engine.pause``."""
        if self.loop is not None:
            self.loop.pause()
        self.standing_at = time.monotonic_ns()

    def resume(self, version: int) -> None:
        """See ``Engine.resume``."""
        self.resumed_at = time.monotonic_ns()
        if self.loop is not None:
            self.loop.resume()

    def quarantine(self, reason: str) -> None:
        """See ``Engine.quarantine``."""
        raise RuntimeError(f"the benchmark's engine is tainted: {reason}")


@dataclass
class ShareWorld(World):
    """A world of which some tiles are published by somebody else.

    Attributes:
        taken: Tiles that the owners leave out, by tensor id; the same in all layers of a kind.
    """

    taken: Mapping[int, np.ndarray] = field(default_factory=dict)

    def _layer(self, kind: int, density: float, codec: str, seed: int) -> list[list[tuple[FrameRecord, bytes]]]:
        """Frames of one layer by owner."""
        key = (kind, density, codec, seed, len(self.taken))
        if key not in self._frames:
            rng = np.random.default_rng([seed, kind + 1])
            self._frames[key] = [
                [
                    receiver_world._encoded(e, kind, codec)
                    for e in receiver_world._entries(self.schema, self._left(owned), density, rng)
                ]
                for owned in receiver_world._owned(self, kind)
            ]
        return self._frames[key]

    def _left(self, owned: list[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
        left = [(i, np.setdiff1d(tiles, self.taken[i]) if i in self.taken else tiles) for i, tiles in owned]
        return [(i, tiles) for i, tiles in left if len(tiles)]


class ServingRank:
    """One engine rank at version 0, bound once, with what its versions lead to.

    Args:
        shape: Sizes of the model.
        directory: Of the sink of its own versions.
        device: Where the weights live.
        tp: Ranks of the engine.
        workers: Threads of the receiver, and worker processes on a GPU.
        quiet: Stage on idle cores only, and read the live words in turns with the decoder.

    Attributes:
        marks: Seconds of each step of the making.
        table: State digests of what is live, as long as nobody writes it but bench_engine.
    """

    def __init__(
        self, shape: Shape, directory: Path, device: str, *, tp: int = 4, workers: int = 16, quiet: bool = False
    ) -> None:
        self.shape, self.directory, self.tp, self.workers, self.quiet = shape, directory, tp, workers, quiet
        self.marks: dict[str, float] = {}
        made = self._timed("world_s", lambda: build_world(shape, LocalSink(directory), device, tp=tp))
        self.engine = DecodingEngine(made.engine.live, made.engine.places, made.schema, tp)
        self.world = ShareWorld(**{f.name: getattr(made, f.name) for f in fields(World)} | {"engine": self.engine})
        # Binding 116,058 tensors takes a while and is no part of any figure: it is done once for all appliers.
        self.binding = self._timed("bind_s", lambda: bind(self.engine, self.world.schema, shadow_limit_nbytes=1 << 30))
        self.table = self._timed("audit_s", self.audit)
        processes = workers if device == "cuda" else 0
        self.backend = self._timed("workers_s", lambda: ScatterBackend(self.binding, processes=processes, quiet=quiet))
        self._timed("checkpoint_s", lambda: self.world.checkpoint(self.table))

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        out = work()
        self.marks[name] = time.perf_counter() - started
        print(f"{name} {self.marks[name]:.2f}", flush=True)
        return out

    def audit(self) -> np.ndarray:
        """State digests of what is live, uint8 ``[num_tensors, 16]``; words of other ranks count 0."""
        table = np.zeros((len(self.world.schema.tensors), 16), np.uint8)
        table[self.binding.group_ids] = audit(self.binding, None)
        return table

    def addresses(self) -> dict[str, int]:
        """Where every live storage is."""
        return {name: t.data_ptr() for name, t in self.engine.live.items()}

    def learn(self, draft: Manifest) -> tuple[np.ndarray, np.ndarray]:
        """Digest sums of the touched words, before and after a draft, uint64 ``[K, 2]`` in the order of its touched ids."""
        reader = PublicationReader(self.world.sink, RUN)
        with ThreadPoolExecutor(self.workers) as pool:
            staged = stage(
                self.binding,
                self.backend,
                reader,
                draft,
                pool if self.workers > 1 else None,
                limit_nbytes=1 << 40,
                read_live=True,
                in_flight=2 * self.workers,
            )
        assert staged.sums is not None
        ids = draft.touched_ids.astype(np.int64)
        before, after = (Sums.join(x[k] for x in staged.sums).over(ids) for k in (0, 1))
        return before, after

    def publish(self, num: int, density: float = DENSITY) -> list[Manifest]:
        """Publish versions 1 to ``num``, there and back in turn; their payloads are one set of files."""
        draft = self._timed("draft_s", lambda: self.world.draft(density))
        sums = self._timed("learn_s", lambda: self.learn(draft))
        ids = draft.touched_ids.astype(np.int64)
        lanes = as_lanes(self.table).copy()
        lanes[ids] += sums[1] - sums[0]
        tables = self.table, lanes.astype("<u8").view(np.uint8).reshape(-1, 16)
        made: list[Manifest] = []
        for version in range(1, num + 1):
            there = version % 2
            base = self.world.newest
            assert base is not None
            step = replace(draft, version=version, base_version=base.version, base_digest=base.digest)
            for owner in range(OWNERS if version > 1 else 0):
                link_object(self.directory, draft.payload_key(owner), self.directory, step.payload_key(owner))
            olds = np.ascontiguousarray(sums[1 - there]).astype("<u8").view(np.uint8).reshape(-1, 16)
            made.append(self.world.publish(step, tables[there][ids], olds, root_of(tables[there])))
        return made

    def applier(self, sink: Sink | None = None, telemetry: Telemetry | None = None, poll_s: float = 0.05) -> Applier:
        """An applier that has joined; by default it follows this rank's own versions."""
        config = ApplyConfig(run=RUN, workers=self.workers, staged_limit_nbytes=1 << 40, poll_s=poll_s)
        with patch.object(applier_module, "bind", lambda *a, **k: self.binding):
            made = Applier(
                self.engine, sink or self.world.sink, config, backend=lambda b: self.backend, telemetry=telemetry
            )
            made.join()
        return made

    def close(self) -> None:
        """End the decode loop and the worker processes. Idempotent."""
        if self.engine.loop is not None:
            self.engine.loop.close()
            self.engine.loop = None
        if self.backend.workers is not None:
            self.backend.workers.close()


def link_object(from_directory: Path, from_key: str, to_directory: Path, to_key: str) -> None:
    """Give an object of a local sink a second key: the same file, so that many versions take the room of one."""
    target = to_directory / to_key
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(from_directory / from_key, target)
