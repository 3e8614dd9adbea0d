"""The scatter backend with CPU tensors: what is staged, arenas, undo wherever a write stopped, faults of the device."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import FormatError, TaintedError, UndoneError
from megasync.layout.compose import arrange, with_copies
from megasync.layout.experts import Place, stacked, swizzled, w2_rows, w13_interleaved
from megasync.layout.modes import Layout
from megasync.layout.named import marlin_nibbles
from megasync.receiver.applier import Applier
from megasync.receiver.audit import live_sums
from megasync.receiver.bind import Binding, bind
from megasync.receiver.scatter import ScatterBackend, device_of
from megasync.receiver.scatter_arena import ArenaPool
from megasync.receiver.scatter_audit import device_sums
from megasync.receiver.scatter_passes import Passes
from megasync.receiver.scatter_placed import ScatterPlaced
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.scatter_store import Store, StoreShape
from megasync.receiver.sums import Sums
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import Mailbox, PlainEngine, RankEngine, identity, load, on_ranks, plain_engine, words_of

SPECS = [spec("a", "BF16", (300, 64)), spec("layers.0.b", "U8", (64, 200)), spec("layers.1.c", "F32", (40, 10))]
CPU = torch.device("cpu")


class World:
    """One engine at version 0 of a run, written by the scatter backend."""

    def __init__(self, path: Path | None = None, backend: type[ScatterBackend] = ScatterBackend, codec: str = "sparse"):
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS), frame_changed=300, codec=codec)
        self.words = random_words(SPECS)
        self.publisher.checkpoint(self.words)
        self.engine = plain_engine(self.words)
        self.path = path
        self.applier = Applier(
            self.engine, self.publisher.sink, ApplyConfig(workers=2), status_path=path, backend=backend
        )
        self.applier.join()

    def step(self, density: float = 0.05) -> dict[str, np.ndarray]:
        new = changed(self.publisher.words, density, seed=self.publisher.newest.version + 1)  # type: ignore[union-attr]
        self.publisher.delta(new)
        return new

    def holds(self, words: dict[str, np.ndarray]) -> bool:
        live = {n: words_of(t) for n, t in self.engine.live.items()}
        return all(np.array_equal(live[n], w.reshape(live[n].shape)) for n, w in words.items())

    @property
    def backend(self) -> ScatterBackend:
        assert self.applier._session is not None
        found = self.applier._session.backend
        assert isinstance(found, ScatterBackend)
        return found

    def on_disk(self) -> str:
        assert self.path is not None
        return str(json.loads(self.path.read_text())["state"])


@pytest.mark.parametrize(
    ("codec", "density"),
    [("sparse", 0.02), ("zstd", 0.02), ("lz4", 0.02), ("snappy+zstd", 0.02), ("stored", 0.9), ("sparse", 0.9)],
)
def test_every_codec_goes_through_the_scatter(codec: str, density: float) -> None:
    """Dense codecs are compacted; a segment stays a mask exactly where entries would not be smaller."""
    world = World(codec=codec)
    for _ in range(2 if density < 0.5 else 1):
        new = world.step(density)
        result = world.applier.update()
        assert (result.backend, result.num_written) == ("scatter", result.num_changed)
        assert world.holds(new)
    (placed,) = world.applier._session.last.staged.placed  # type: ignore[union-attr]
    assert isinstance(placed, ScatterPlaced)
    masks = sum(u.places.plan.num_dense for u in placed._units)
    assert (masks > 0) == (density > 0.5)


def test_several_versions_undo_and_rollback_in_the_same_arenas() -> None:
    world = World()
    history = [world.words]
    sizes = []
    for _ in range(6):
        history.append(world.step())
        world.applier.update()
        assert world.holds(history[-1])
        gc.collect()
        sizes.append((world.backend.memory(), len(world.backend.arenas._free)))
    # Two sets of arenas, one a word size each: the version held (for rollback) and the next one.
    assert len(set(sizes[1:])) == 1, sizes
    assert (sizes[-1][1], len(world.backend.arenas._taken)) == (3, 3)
    assert sizes[-1][0].device_nbytes == sizes[-1][0].records_nbytes
    world.applier.rollback()
    assert world.holds(history[-2])
    assert world.applier.audit().version == len(history) - 2
    world.applier.update()
    assert world.holds(history[-1])


def test_staged_ahead_is_proven_just_before_its_own_apply() -> None:
    world = World()
    first, second = world.step(), world.step()
    assert world.applier.stage().version == 1  # type: ignore[union-attr]
    assert world.applier.stage().ahead  # type: ignore[union-attr]
    assert world.applier.update().versions == (1, 2)
    assert world.holds(second)
    del first


def test_staging_that_fails_gives_its_arenas_back() -> None:
    world = World()
    world.publisher.edit_frame = lambda b: b[:-1] + bytes([b[-1] ^ 1])
    world.step()
    with pytest.raises(FormatError, match=r"version 1, frame at \d+ of run/"):
        world.applier.update()
    gc.collect()
    assert world.backend.arenas._taken == []
    assert world.holds(world.words)


@pytest.mark.parametrize("stop", [0, 1, 2])
@pytest.mark.parametrize("launched", [False, True])
def test_case_31_host_exception_is_undone_wherever_it_came(
    stop: int, launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the launch itself: nobody knows then whether it began."""
    world = World(tmp_path / "s")
    new = world.step()
    true_step, calls = Passes._step, [0]

    def step(self: Passes, *a: object, **k: object) -> None:
        calls[0] += 1
        if calls[0] - 1 != stop:
            return true_step(self, *a, **k)  # type: ignore[arg-type]
        if launched:
            true_step(self, *a, **k)  # type: ignore[arg-type]
        raise OSError("the host gave up")

    monkeypatch.setattr(Passes, "_step", step)
    with pytest.raises(UndoneError, match="the host gave up"):
        world.applier.update()
    assert world.holds(world.words)
    assert (world.on_disk(), world.engine.events) == ("serving", ["pause", ("resume", 0)])
    assert world.applier.audit().version == 0
    world.applier.update()
    assert world.holds(new)


def test_undo_before_the_write_and_twice_does_no_harm() -> None:
    world = World()
    new = world.step()
    from megasync.receiver.session import make_ready

    staged = make_ready(world.applier._session, world.publisher.newest, ahead=False)  # type: ignore[arg-type]
    (placed,) = staged.placed
    placed.undo_()
    assert world.holds(world.words)
    placed.xor_()
    assert world.holds(new)
    placed.undo_()
    placed.undo_()
    assert world.holds(world.words)


def test_device_fault_taints_durably_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "s")
    world.step()
    seen: list[str] = []
    world.engine.quarantine = lambda reason: seen.append(f"{world.on_disk()}: {reason}")  # type: ignore[method-assign]

    def fail(self: Passes, *a: object, **k: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def lost(self: WorkQueue) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def never(self: ScatterPlaced) -> None:
        raise AssertionError("nothing is undone on a device that failed")

    monkeypatch.setattr(Passes, "_step", fail)
    monkeypatch.setattr(WorkQueue, "synchronize", lost)
    monkeypatch.setattr(ScatterPlaced, "undo_", never)
    with pytest.raises(TaintedError, match="device-side assert"):
        world.applier.update()
    assert len(seen) == 1
    assert seen[0].startswith("tainted: cpu failed while weights were written")
    assert world.engine.events == ["pause"]
    with pytest.raises(TaintedError, match="replace the replica"):
        world.applier.update()


def test_device_fault_of_one_rank_taints_all(monkeypatch: pytest.MonkeyPatch) -> None:
    t = spec("w", "BF16", (64, 64))
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    words = random_words([t])
    publisher.checkpoint(words)
    mailbox = Mailbox(2)
    engines, appliers = [], []
    for rank in range(2):
        layout = arrange(t.shape, word_nbytes=2, start=(32 * rank, 0), stop=(32 * rank + 32, 64)).to("w")
        live = load({"w": layout}, {"w": torch.zeros(32 * 64, dtype=torch.int16)}, words)
        engines.append(RankEngine(mailbox, rank, live=live, places={"w": layout}))
        appliers.append(
            Applier(engines[-1], publisher.sink, ApplyConfig(workers=1), backend=Faulty if rank else ScatterBackend)
        )
    assert [r.version for r in on_ranks([a.join for a in appliers])] == [0, 0]  # type: ignore[attr-defined]
    publisher.delta(changed(words, 0.05))
    found = on_ranks([a.update for a in appliers])
    assert all(isinstance(e, TaintedError) for e in found), found
    assert [a.status.state for a in appliers] == ["tainted", "tainted"]
    assert [e.events[-1] for e in engines] == ["quarantine", "quarantine"]


class Faulty(ScatterBackend):
    """Its device fails in the write."""

    def write_(self, placed, pool):  # type: ignore[no-untyped-def]
        raise TaintedError("the device failed")


def binding_of(specs: list[TensorSpec], places: dict[str, Layout] | None = None, storages=None) -> Binding:  # type: ignore[no-untyped-def]
    words = random_words(specs)
    engine = plain_engine(words) if places is None else PlainEngine(load(places, storages, words), places)
    return bind(engine, make_schema("run", specs), shadow_limit_nbytes=1 << 20)


def test_device_audit_equals_the_host_audit_through_odd_layouts() -> None:
    specs = [
        spec("layers.0.plain", "BF16", (33, 17)),
        spec("layers.0.scale", "F8_E4M3", (130, 12)),
        spec("layers.0.tied", "F32", (20, 6)),
        spec("layers.0.q", "U8", (64, 32)),
        spec("layers.0.one", "I64", ()),
    ]
    tied = specs[2]
    places = {
        "layers.0.plain": identity(specs[0], "plain"),
        "layers.0.scale": swizzled(arrange(specs[1].shape, word_nbytes=1)).to("scale"),
        "layers.0.tied": with_copies(identity(tied, "tied"), identity(tied, "again")),
        "layers.0.q": marlin_nibbles(specs[3].shape, storage="q"),
        "layers.0.one": identity(specs[4], "one"),
    }
    storages = {
        "plain": torch.zeros(33 * 17, dtype=torch.int16),
        "scale": torch.zeros(256 * 12, dtype=torch.uint8),
        "tied": torch.zeros(120, dtype=torch.int32),
        "again": torch.zeros(120, dtype=torch.int32),
        "q": torch.zeros(64 * 32, dtype=torch.uint8),
        "one": torch.zeros(1, dtype=torch.int64),
    }
    binding = binding_of(specs, places, storages)
    ids = sorted(binding.held)
    for some in (ids, ids[1:3]):
        want = Sums.join(live_sums(binding, i) for i in some).over(np.array(some))
        np.testing.assert_array_equal(Sums.join(device_sums(binding, some, CPU)).over(np.array(some)), want)


def test_rank_of_tp4_stages_only_what_its_slices_touch() -> None:
    """w13 cut by rows, w2 by columns, every frame full of all ranks' tiles: a quarter of the entries is staged."""
    inter, hidden, num, tp = 512, 1024, 2, 4
    specs, places = [], {}
    for e in range(num):
        for part, name in (("gate", "gate_proj"), ("up", "up_proj")):
            t = spec(f"layers.0.experts.{e}.{name}.weight", "U8", (inter, hidden))
            specs.append(t)
            places[t.name] = w13_interleaved(part, t.shape, Place(e, num, 1, tp), "w13", word_nbytes=1)  # type: ignore[arg-type]
        t = spec(f"layers.0.experts.{e}.down_proj.weight", "U8", (hidden, inter), cut="last")
        specs.append(t)
        places[t.name] = stacked(w2_rows(t.shape, Place(e, num, 1, tp), word_nbytes=1), Place(e, num, 1, tp), "w2")
    schema = make_schema("run", specs)
    publisher = Publisher(MemorySink(), schema, frame_changed=16_384)
    words = random_words(specs)
    publisher.checkpoint(words)
    manifest = publisher.delta(changed(words, 0.002))
    own = {"w13": torch.zeros(num * 2 * inter // tp * hidden, dtype=torch.uint8)}
    own["w2"] = torch.zeros(num * hidden * inter // tp, dtype=torch.uint8)
    binding = _bound(PlainEngine(load(places, own, words), places), publisher)
    backend = ScatterBackend(binding)
    from megasync.receiver.stage import stage
    from megasync.versions.publication import PublicationReader

    staged = stage(
        binding,
        backend,
        PublicationReader(publisher.sink, "run"),
        manifest,
        None,
        limit_nbytes=1 << 30,
        read_live=True,
    )
    (placed,) = staged.placed
    entries = sum(u.places.plan.num_entries for u in placed._units)  # type: ignore[attr-defined]
    assert staged.fetched.num_frames == len(manifest.frames)
    assert 0.22 * manifest.num_changed < entries <= 0.28 * manifest.num_changed
    assert placed.num_changed == entries


def test_words_of_tiles_that_are_held_in_part_are_counted_one_by_one() -> None:
    t = spec("w", "U8", (300, 700))
    layout = arrange(t.shape, word_nbytes=1, start=(100, 0), stop=(200, 700)).to("w")
    words = random_words([t])
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.checkpoint(words)
    for density in (0.01, 0.8):
        new = changed(publisher.words, density, seed=int(density * 100))
        want = int((new["w"][100:200] != publisher.words["w"][100:200]).sum())
        manifest = publisher.delta(new)
        engine = PlainEngine(load({"w": layout}, {"w": torch.zeros(70_000, dtype=torch.uint8)}, words), {"w": layout})
        binding = _bound(engine, publisher)
        from megasync.receiver.backend import FetchedFrame

        payload = memoryview(publisher.sink.read(manifest.payload_key(0)))
        records = [manifest.frames.record(i) for i in range(len(manifest.frames))]
        (placed,) = ScatterBackend(binding).place(
            [FetchedFrame(publisher.schema, manifest, r, payload[r.offset : r.offset + r.nbytes]) for r in records]
        )
        assert placed.num_changed == want


def _bound(engine: PlainEngine, publisher: Publisher) -> Binding:
    """One rank of several, alone: nobody checks that the others hold the rest."""
    import megasync.receiver.bind as bind_module

    true = bind_module.check_coverage
    bind_module.check_coverage = lambda *a: None
    try:
        return bind(engine, publisher.schema, shadow_limit_nbytes=0)
    finally:
        bind_module.check_coverage = true


def test_arena_that_is_too_small_is_replaced_not_kept() -> None:
    def shape(w: int, *room: int) -> StoreShape:
        return StoreShape(w, 2, 4, (1,), room)

    pool = ArenaPool(CPU)
    small = pool.take(shape(1, 1000, 0, 10, 20, 10, 20))
    nbytes = pool.host_nbytes
    taken = [small]
    pool.give(taken)
    pool.give(taken)
    assert pool.take(shape(1, 1000, 0, 9, 20, 10, 1)) is small
    pool.give([small])
    large = pool.take(shape(1, 10_000_000, 0, 5, 20, 10, 20))
    assert large is not small
    assert large.shape.room[2:] == (10, 20, 10, 20)  # no room is less than that of the one it replaces
    assert pool.host_nbytes == large.host_nbytes > nbytes
    assert pool.numbers == {large.number}
    two = shape(2, 10, 10, 1, 1, 1, 1)
    assert pool.take(two) is not pool.take(two)


def test_arrays_of_an_arena_share_no_byte() -> None:
    shape = StoreShape(2, 3, 4, (2, 1), (100, 50, 7, 9, 3, 4, 0, 0, 7, 9))
    memory = np.zeros(shape.nbytes, np.uint8)
    store = Store.over(memory, shape)
    groups = [x for pack in store.groups for g in pack for x in (g.tiles, g.segments, g.first_entry, g.first_dense)]
    arrays = [store.entries, store.dense, store.rows, store.starts, store.extents, store.counts, *groups]
    assert [x.shape for x in arrays[:6]] == [(4, 100), (2, 50), (7,), (7, 3), (7, 3), (9,)]
    assert [x.shape for x in groups[:4]] == [(3, 10), (4, 4), (5,), (5,)]
    for x in arrays:
        x.view(np.uint8)[...] += 1
    assert memory.max() == 1
    assert int(memory.sum()) == sum(x.nbytes for x in arrays)


def test_weights_in_host_memory_are_the_cpu_backends_by_rule_and_scatter_by_name() -> None:
    binding = binding_of(SPECS)
    from megasync.receiver.backends import make_backend

    assert make_backend(binding, "auto").name == "cpu"
    assert make_backend(binding, "scatter").name == "scatter"
    assert device_of(binding) == CPU
    with pytest.raises(ValueError, match="pinned"):
        ScatterBackend(binding, entries_in="pinned")
    for name in ("sm", "de"):
        with pytest.raises(ValueError, match="streams into one GPU"):
            make_backend(binding, name)
