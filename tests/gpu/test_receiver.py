"""The receiver on a GPU: applier, backends, undo, rollback, captured graphs, faults; every live byte compared each time.

The oracle is a cold load of the version's canonical words through the layouts, made on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, MissingPackageError, TaintedError, UndoneError
from megasync.layout.compose import arrange, with_copies
from megasync.layout.experts import Place, stacked, swizzled, w2_rows, w13_interleaved
from megasync.layout.modes import Layout
from megasync.layout.named import marlin_nibbles
from megasync.receiver.applier import Applier
from megasync.receiver.audit import live_sums
from megasync.receiver.backend import Backend
from megasync.receiver.bind import Binding
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.scatter_audit import device_sums
from megasync.receiver.scatter_passes import Pace, Passes
from megasync.receiver.stream import StreamBackend
from megasync.receiver.stream_decode import EngineDecoder, SmDecoder, why_not
from megasync.receiver.sums import Sums
from megasync.sinks.memory import MemorySink
from megasync.types import SEGMENT_WORDS, TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, Storages, identity, load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def scatter(binding: Binding) -> Backend:
    """Entries in HBM."""
    return ScatterBackend(binding)


def processes(binding: Binding) -> Backend:
    """Staged by worker processes."""
    return ScatterBackend(binding, processes=2)


def quiet(binding: Binding) -> Backend:
    """Staged beside an engine that decodes: live words read in launches of one segment's worth."""
    made = ScatterBackend(binding, processes=1, quiet=True)
    for passes in made._passes.values():
        passes.pace = Pace(num_entries=SEGMENT_WORDS, pause_s=0.0)
    return made


def pinned(binding: Binding) -> Backend:
    """Entries read from pinned memory."""
    return ScatterBackend(binding, entries_in="pinned")


def sm(binding: Binding) -> Backend:
    """nvCOMP; slots so small that layers take several steps."""
    try:
        decoder = SmDecoder(torch.device("cuda", 0))
    except MissingPackageError as error:
        pytest.skip(str(error))
    return StreamBackend(binding, decoder, torch.device("cuda", 0), slot_limit_nbytes=100_000)


def sm_reading(binding: Binding) -> Backend:
    """nvCOMP, everything read before the write."""
    made = sm(binding)
    assert isinstance(made, StreamBackend)
    made.prove_by_reading = True
    return made


BACKENDS = pytest.mark.parametrize("backend", [scatter, processes, quiet, pinned, sm, sm_reading])


def model() -> tuple[list[TensorSpec], dict[str, Layout], Storages]:
    """Experts as engines keep them (interleaved, swizzled, padded, stacked), a copy, nibbles, plain tensors of all sizes."""
    inter, hidden, num = 128, 256, 2
    specs: list[TensorSpec] = []
    places: dict[str, Layout] = {}
    for e in range(num):
        for part, name in (("gate", "gate_proj"), ("up", "up_proj")):
            weight = spec(f"layers.0.experts.{e}.{name}.weight", "U8", (inter, hidden))
            scale = spec(f"layers.0.experts.{e}.{name}.weight_scale", "F8_E4M3", (inter, hidden // 8))
            specs += [weight, scale]
            places[weight.name] = w13_interleaved(part, weight.shape, Place(e, num), "w13", word_nbytes=1)  # type: ignore[arg-type]
            places[scale.name] = w13_interleaved(part, scale.shape, Place(e, num), "w13s", word_nbytes=1, scales=True)  # type: ignore[arg-type]
        down = spec(f"layers.0.experts.{e}.down_proj.weight", "U8", (hidden, inter), cut="last")
        specs.append(down)
        places[down.name] = stacked(w2_rows(down.shape, Place(e, num), word_nbytes=1), Place(e, num), "w2")
    for t, place in (
        (spec("embed", "BF16", (700, 96)), lambda t: with_copies(identity(t, "embed"), identity(t, "head"))),
        (spec("layers.0.norm", "F32", (256,)), lambda t: identity(t, "norm")),
        (spec("layers.0.scale", "F8_E4M3", (130, 12)), lambda t: swizzled(arrange(t.shape, word_nbytes=1)).to("scale")),
        (spec("layers.1.q", "U8", (128, 64)), lambda t: marlin_nibbles(t.shape, storage="q")),
        (spec("layers.1.steps", "I64", (9,)), lambda t: identity(t, "steps")),
    ):
        specs.append(t)
        places[t.name] = place(t)
    storages = {
        "w13": torch.zeros(num * 2 * inter * hidden, dtype=torch.uint8),
        "w13s": torch.zeros(num * 2 * inter * (hidden // 8), dtype=torch.uint8),
        "w2": torch.zeros(num * hidden * inter, dtype=torch.uint8),
        "embed": torch.zeros(700 * 96, dtype=torch.int16),
        "head": torch.zeros(700 * 96, dtype=torch.int16),
        "norm": torch.zeros(256, dtype=torch.int32),
        "scale": torch.zeros(256 * 12, dtype=torch.uint8),
        "q": torch.zeros(128 * 64, dtype=torch.uint8),
        "steps": torch.zeros(9, dtype=torch.int64),
    }
    return specs, places, storages


class World:
    """The model on the GPU at version 0 of a run."""

    def __init__(
        self, backend: Callable[[Binding], Backend] | str, path: Path | None = None, codec: str = "sparse"
    ) -> None:
        self.specs, self.places, self.storages = model()
        self.publisher = Publisher(MemorySink(num_versions=4), make_schema("run", self.specs), codec=codec)
        words = random_words(self.specs)
        self.publisher.checkpoint(words)
        self.engine = PlainEngine({n: t.cuda() for n, t in self.cold(words).items()}, self.places)
        self.addresses = {n: t.data_ptr() for n, t in self.engine.live.items()}
        self.applier = Applier(
            self.engine, self.publisher.sink, ApplyConfig(workers=4), status_path=path, backend=backend
        )
        self.applier.join()

    def cold(self, words: Mapping[str, np.ndarray]) -> Storages:
        return load(self.places, self.storages, words)

    def step(self, density: float = 0.02) -> dict[str, np.ndarray]:
        assert self.publisher.newest is not None
        new = changed(self.publisher.words, density, seed=self.publisher.newest.version + 1)
        self.publisher.delta(new)
        return new

    def require(self, words: Mapping[str, np.ndarray]) -> None:
        for n, t in self.cold(words).items():
            assert torch.equal(self.engine.live[n].cpu(), t), n
            assert self.engine.live[n].data_ptr() == self.addresses[n]

    @property
    def backend(self) -> Backend:
        assert self.applier._session is not None
        return self.applier._session.backend


@BACKENDS
def test_versions_undo_rollback_and_audit(
    backend: Callable[[Binding], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(backend)
    history = [world.publisher.words]
    for density in (0.02, 0.0005, 0.6):
        history.append(world.step(density))
        world.applier.update()
        world.require(history[-1])
        assert world.applier.audit().version == len(history) - 1
    world.applier.rollback()
    world.require(history[-2])
    world.applier.update()
    world.require(history[-1])
    bad = world.step()
    monkeypatch.setattr(world.engine, "on_resume", lambda v: None)
    true = type(world.backend).write_

    def fails(self, placed, pool):  # type: ignore[no-untyped-def]
        true(self, placed, pool)
        raise OSError("the host gave up")

    monkeypatch.setattr(type(world.backend), "write_", fails)
    with pytest.raises(UndoneError, match="the host gave up"):
        world.applier.update()
    world.require(history[-1])
    monkeypatch.setattr(type(world.backend), "write_", true)
    world.applier.update()
    world.require(bad)


@pytest.mark.parametrize("codec", ["lz4", "snappy+zstd", "zstd", "stored"])
def test_dense_codecs_by_the_rule_of_auto(codec: str) -> None:
    world = World("auto", codec=codec)
    streams = why_not("sm", torch.device("cuda", 0)) is None and codec in ("lz4", "snappy+zstd")
    for density in (0.02, 0.9):
        new = world.step(density)
        assert world.applier.update().backend == ("sm" if streams else "scatter")
        world.require(new)
    assert world.applier.audit().version == 2


def test_wrong_base_is_refused_before_any_write() -> None:
    world = World("auto")
    old = dict(world.publisher.words)
    new = world.step()
    at = int(np.flatnonzero((new["layers.0.norm"] != old["layers.0.norm"]).reshape(-1))[0])
    world.engine.live["norm"][at] ^= 1
    before = {n: t.clone() for n, t in world.engine.live.items()}
    with pytest.raises(BaseMismatchError, match=r"live words of layers\.0\.norm are not those of version 0"):
        world.applier.update()
    assert all(torch.equal(before[n], t) for n, t in world.engine.live.items())
    assert world.engine.events == []
    with pytest.raises(BaseMismatchError, match=r"layers\.0\.norm"):
        world.applier.audit()


def test_copy_that_differs_is_found_by_check_and_audit() -> None:
    world = World("auto")
    old = dict(world.publisher.words)
    new = world.step()
    at = int(np.flatnonzero((new["embed"] != old["embed"]).reshape(-1))[0])
    world.engine.live["head"][at] ^= 1
    with pytest.raises(BaseMismatchError, match="embed: words"):
        world.applier.update()
    with pytest.raises(BaseMismatchError, match="embed"):
        world.applier.audit()


def test_device_audit_equals_the_host_audit() -> None:
    world = World("auto")
    assert world.applier._session is not None
    binding = world.applier._session.binding
    ids = sorted(binding.held)
    want = Sums.join(live_sums(binding, i) for i in ids).over(np.array(ids))
    found = Sums.join(device_sums(binding, ids, torch.device("cuda", 0))).over(np.array(ids))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("stop", [0, 2])
@pytest.mark.parametrize("launched", [False, True])
def test_host_exception_between_launches_is_undone(stop: int, launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(scatter)
    old = dict(world.publisher.words)
    new = world.step()
    true, calls = Passes._step, [0]

    def step(self, *given, write, rehearse=False, **more):  # type: ignore[no-untyped-def]
        written = write and not rehearse
        calls[0] += written
        if not written or calls[0] - 1 != stop:
            return true(self, *given, write=write, rehearse=rehearse, **more)
        if launched:
            true(self, *given, write=write, rehearse=rehearse, **more)
        raise OSError("the host gave up")

    monkeypatch.setattr(Passes, "_step", step)
    with pytest.raises(UndoneError, match="the host gave up"):
        world.applier.update()
    world.require(old)
    world.applier.update()
    world.require(new)


class Layers(torch.nn.Module):
    """bf16, packed uint8 and fp32 weights; a bf16 tensor that is kept in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(64, 48, dtype=torch.bfloat16))
        self.gain = torch.nn.Parameter(torch.zeros(64, dtype=torch.float32))
        self.wide = torch.nn.Parameter(torch.zeros(64, dtype=torch.float32))
        self.packed: torch.Tensor
        self.register_buffer("packed", torch.zeros(32, 48, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = (self.packed & 15).float() - 8, (self.packed >> 4).float() - 8
        y = torch.nn.functional.linear(x, self.up).float() * self.gain + self.wide
        return y @ torch.cat((low, high))


def test_torch_module_with_a_captured_graph() -> None:
    """Replays show the new weights without capturing again, since no pointer moves."""
    specs = [
        spec("up", "BF16", (64, 48)),
        spec("gain", "F32", (64,)),
        spec("wide", "BF16", (64,)),
        spec("packed", "U8", (32, 48)),
    ]
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    words = random_words(specs)
    publisher.anchor(words)
    module, reference = Layers().cuda(), Layers().cuda()
    engine = TorchModuleEngine(module)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=2))
    assert applier.join().versions == (0,)  # the anchor over zeros
    x = torch.randn(4, 48, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        module(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = module(x)
    pointers = {n: t.data_ptr() for n, t in engine.tensors().items()}
    for density in (0.05, 0.3, 1.0):
        words = changed(words, density, seed=int(density * 100))
        publisher.delta(words)
        result = applier.update()
        assert result.backend == "scatter"
        assert result.derived == ("cast of wide",)
        graph.replay()
        with torch.no_grad():
            reference.up.view(torch.int16).copy_(torch.from_numpy(words["up"].view(np.int16)))
            reference.gain.view(torch.int32).copy_(torch.from_numpy(words["gain"].view(np.int32)))
            reference.wide.copy_(torch.from_numpy(words["wide"].view(np.int16)).view(torch.bfloat16))
            reference.packed.copy_(torch.from_numpy(words["packed"]))
            torch.testing.assert_close(y, reference(x))
        assert pointers == {n: t.data_ptr() for n, t in engine.tensors().items()}
    applier.rollback()
    graph.replay()
    with torch.no_grad():
        assert (y - reference(x)).abs().max() > 1e-3 * y.abs().max()
    assert applier.audit().version == 2


@pytest.mark.parametrize("backend", [scatter, sm])
def test_memory_is_flat_over_200_updates(backend: Callable[[Binding], Backend]) -> None:
    world = World(backend)
    sizes = []
    for v in range(200):
        world.step(0.005)
        world.applier.update()
        if v % 20 == 19:
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            host = torch.cuda.host_memory_stats()
            sizes.append((stats["reserved_bytes.all.current"], host.get("allocated_bytes.current", 0)))
    world.require(world.publisher.words)
    assert len(set(sizes[2:])) == 1, sizes


def test_engine_is_refused_where_there_is_none() -> None:
    reason = why_not("de", torch.device("cuda", 0))
    if reason is None:
        assert EngineDecoder(torch.device("cuda", 0)).kinds[0] == "lz4"
    else:
        assert "engine" in reason.lower()


def test_device_fault_after_the_first_write_taints(tmp_path: Path) -> None:
    """In a process of its own: after an assert on the device no CUDA call of that process works any more."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "status")], capture_output=True, text=True, timeout=100, check=False
    )
    assert "TAINTED" in done.stdout, done.stdout + done.stderr
    status = json.loads((tmp_path / "status").read_text())
    assert status["state"] == "tainted"
    assert "failed while weights were written" in status["reason"]


def _fault(path: Path) -> None:
    class Faulty(ScatterBackend):
        def write_(self, placed, pool):  # type: ignore[no-untyped-def]
            for p in placed:
                p.xor_()
            torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")] += 1  # asserts on the device
            return super().write_(placed, pool)

    world = World(Faulty, path)
    world.step()
    seen: list[str] = []
    world.engine.quarantine = lambda reason: seen.append(json.loads(path.read_text())["state"])  # type: ignore[method-assign]
    try:
        world.applier.update()
    except TaintedError as error:
        assert seen == ["tainted"], seen
        assert world.engine.events == ["pause"]
        print("TAINTED", error)


if __name__ == "__main__":
    _fault(Path(sys.argv[1]))
