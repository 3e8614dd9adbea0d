"""The streaming backend with CPU tensors: every codec, several steps a layer, what is proven when nothing is read before, undo
by decoding again, and the Decompression Engine against a driver library that decodes on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megasync.codecs.engine_driver import CudaDriver
from megasync.codecs.registry import codec_by_name
from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, FormatError, PlanError, TaintedError, UndoneError
from megasync.receiver import stream_auto
from megasync.receiver.applier import Applier
from megasync.receiver.backend import FetchedFrame
from megasync.receiver.bind import Binding
from megasync.receiver.fetch import fetch
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.stream import StreamBackend
from megasync.receiver.stream_auto import AutoBackend
from megasync.receiver.stream_decode import CpuDecoder, EngineDecoder, why_not
from megasync.receiver.stream_placed import StreamPlaced
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, plain_engine, words_of
from tests.unit.stream_on_cpu import reading_stream_on_cpu, stream_on_cpu
from tests.unit.test_engine import SoftwareEngine

SPECS = [
    spec("a", "BF16", (40, 24)),
    spec("layers.0.b", "U8", (16, 200)),
    spec("layers.0.d", "BF16", (20, 16)),
    spec("layers.1.c", "F32", (40, 10)),
]
CPU = torch.device("cpu")
Make = Callable[[Binding], StreamBackend]


class World:
    """One engine at version 0 of a run, written by a streaming backend."""

    def __init__(self, backend: Make = stream_on_cpu, codec: str = "lz4", frame_changed: int = 100) -> None:
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS), codec=codec, frame_changed=frame_changed)
        self.words = random_words(SPECS)
        self.publisher.checkpoint(self.words)
        self.engine: PlainEngine = plain_engine(self.words)
        self.applier = Applier(self.engine, self.publisher.sink, ApplyConfig(workers=2), backend=backend)
        self.applier.join()

    def step(self, density: float = 0.03) -> dict[str, np.ndarray]:
        new = changed(self.publisher.words, density, seed=self.publisher.newest.version + 1)  # type: ignore[union-attr]
        self.publisher.delta(new)
        return new

    def holds(self, words: dict[str, np.ndarray]) -> bool:
        live = {n: words_of(t) for n, t in self.engine.live.items()}
        return all(np.array_equal(live[n], w.reshape(live[n].shape)) for n, w in words.items())

    @property
    def placed(self) -> StreamPlaced:
        (found,) = self.applier._session.last.staged.placed  # type: ignore[union-attr]
        assert isinstance(found, StreamPlaced)
        return found


@pytest.mark.parametrize("codec", ["lz4", "snappy", "lz4+zstd", "snappy+zstd", "zstd", "stored", "sparse"])
def test_every_codec_streams_and_rolls_back(codec: str) -> None:
    world = World(codec=codec)
    first = world.step()
    result = world.applier.update()
    assert "touched-old digests" not in result.proofs
    assert "tracked state digests" in result.proofs
    assert result.num_written == result.num_changed
    assert world.holds(first)
    assert world.applier.audit().version == 1
    second = world.step(0.9)
    world.applier.update()
    assert world.holds(second)
    assert len(world.placed.steps) > len({s.layer for s in world.placed.steps}), "slots were to be smaller than a layer"
    world.applier.rollback()
    assert world.holds(first)


def test_proof_by_reading_refuses_a_wrong_base_before_any_write() -> None:
    world = World(reading_stream_on_cpu)
    new = world.step()
    at = int(np.flatnonzero((new["a"] != world.words["a"]).reshape(-1))[0])
    world.engine.live["a"].view(torch.int16).reshape(-1)[at] ^= 1
    with pytest.raises(BaseMismatchError, match="live words of a are not those of version 0"):
        world.applier.update()
    assert world.engine.events == []


def test_blind_write_over_a_wrong_base_is_taken_back_and_the_replica_out_of_service() -> None:
    """The bytes are as they were, but they were no version: nobody may serve them."""
    world = World()
    new = world.step()
    at = int(np.flatnonzero((new["a"] != world.words["a"]).reshape(-1))[0])
    world.engine.live["a"].view(torch.int16).reshape(-1)[at] ^= 1
    before = {n: t.clone() for n, t in world.engine.live.items()}
    with pytest.raises(TaintedError, match="read back after the write are not what was written"):
        world.applier.update()
    assert all(torch.equal(before[n].view(torch.uint8), t.view(torch.uint8)) for n, t in world.engine.live.items())


@pytest.mark.parametrize(("stop", "paused"), [(0, False), (1, False), (2, True), (3, True)])
def test_step_that_does_not_decode_is_undone(stop: int, paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two steps are decoded before the engine pauses; what fails there touches nothing."""
    world = World()
    new = world.step()
    calls, true_finish = [0], CpuDecoder.finish

    def finish(self: CpuDecoder, place: int) -> None:
        calls[0] += 1
        if calls[0] - 1 == stop:
            raise FormatError("a block has another length")
        true_finish(self, place)

    monkeypatch.setattr(CpuDecoder, "finish", finish)
    with pytest.raises(UndoneError if paused else FormatError, match="a block has another length"):
        world.applier.update()
    assert world.holds(world.words)
    assert world.engine.events == (["pause", ("resume", 0)] if paused else [])
    assert world.applier.status.state == "serving"
    world.applier.update()
    assert world.holds(new)


def test_tile_in_several_frames_goes_through_as_many_launches() -> None:
    """A trainer's odd cut: disjoint words of one tile come in two frames, and neighbours share 8-byte pieces."""
    world = World(reading_stream_on_cpu)
    new = world.step(0.2)
    manifest, session = world.publisher.newest, world.applier._session
    assert manifest is not None
    assert session is not None
    ranges = fetch(session.reader, session.binding.schema, manifest, np.arange(len(manifest.frames)), list, None)
    frames = [f for found in ranges for f in found]
    whole = next(f for f in frames if f.record.layer == 1)
    others = [f for f in frames if f is not whole]
    entries = whole.entries()
    tile = np.repeat(np.arange(len(entries.counts)), entries.counts)
    for half in (0, 1):
        mine = (np.arange(entries.num_changed) & 1) == half
        counts = np.bincount(tile[mine], minlength=len(entries.counts)).astype(np.uint32)
        part = replace(entries, counts=counts, positions=entries.positions[mine], values=entries.values[mine])
        frame = codec_by_name("lz4").encode(part)
        record = replace(whole.record, num_changed=part.num_changed, plane_nbytes=frame.plane_nbytes, codec=frame.codec)
        others.append(FetchedFrame(whole.schema, manifest, record, memoryview(b"".join(frame.planes))))
    (placed,) = session.backend.place(others)
    assert isinstance(placed, StreamPlaced)
    assert any(len({x.word_nbytes for x in s.launches}) < len(s.launches) for s in placed.steps)
    placed.write_()
    assert world.holds(new)
    placed.undo_()
    placed.undo_()
    assert world.holds(world.words)


def test_host_memory_is_used_again() -> None:
    world = World()
    sizes = []
    for _ in range(5):
        world.step()
        world.applier.update()
        backend = world.applier._session.backend  # type: ignore[union-attr]
        assert isinstance(backend, StreamBackend)
        sizes.append(backend.memory())
    assert len(set(sizes[1:])) == 1
    assert len(backend.planner._kept) >= len(world.placed.steps)


class AnyStreamEngine(SoftwareEngine):
    """The library of the engine's own tests, on whatever stream."""

    def cuMemBatchDecompressAsync(self, params: Any, count: Any, flags: Any, index: Any, stream: Any) -> int:
        return super().cuMemBatchDecompressAsync(params, count, flags, index, ctypes.c_void_p(0x51))


@pytest.mark.parametrize("codec", ["lz4", "snappy", "sparse"])
def test_decompression_engine_through_the_applier(codec: str) -> None:
    library = AnyStreamEngine()

    def backend(binding: Binding) -> StreamBackend:
        made = StreamBackend(binding, EngineDecoder(torch.device("cuda", 3), CudaDriver(library)), CPU)
        for slot in made.slots.masks:  # cudaMalloc's memory is engine-capable
            library.capable[slot.data_ptr()] = slot.numel()
        return made

    world = World(backend, codec)
    for _ in range(2):
        new = world.step()
        assert world.applier.update().backend == "de"
        assert world.holds(new)
    assert library.calls.count("cuMemBatchDecompressAsync") >= 2 * len(world.placed.steps)
    world.applier.rollback()


def test_engine_that_is_not_there_is_refused_with_its_reason() -> None:
    with pytest.raises(PlanError, match="no Decompression Engine"):
        EngineDecoder(torch.device("cuda", 3), CudaDriver(AnyStreamEngine(_136=0)))
    assert why_not("de", CPU) == "weights are on cpu"


@pytest.mark.parametrize(
    ("codec", "there", "ran"),
    [
        ("sparse", ("de", "sm"), "scatter"),
        ("zstd", ("de", "sm"), "scatter"),
        ("lz4", ("de", "sm"), "de"),
        ("snappy+zstd", ("sm",), "sm"),
        ("lz4", (), "scatter"),
    ],
)
def test_rule_of_auto_on_a_gpu(codec: str, there: tuple[str, ...], ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str, device: torch.device) -> CpuDecoder:
        decoder = CpuDecoder()
        decoder.name = name
        return decoder

    monkeypatch.setattr(stream_auto, "why_not", lambda name, device: None if name in there else "it is not here")
    monkeypatch.setattr(stream_auto, "make_decoder", made)
    world = World(AutoBackend, codec)  # type: ignore[arg-type]
    new = world.step()
    assert world.applier.update().backend == ran
    assert world.holds(new)
    world.applier.rollback()
    assert world.holds(world.words)


def test_scatter_and_stream_leave_the_same_bytes() -> None:
    worlds = [World(b, "sparse") for b in (ScatterBackend, stream_on_cpu)]  # type: ignore[list-item]
    for _ in range(2):
        for world in worlds:
            world.step(0.1)
            world.applier.update()
        one, two = (w.engine.live for w in worlds)
        assert all(torch.equal(one[n].view(torch.uint8), two[n].view(torch.uint8)) for n in one)
