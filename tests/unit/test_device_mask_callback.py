"""The callback over the device mask stage, with tensors on the CPU: fences, hooks, late chunks, fates and withdrawal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import OnError, PublishConfig, SnapshotPlace
from megasync.errors import PlanError, RankFailedError, SchemaMismatchError
from megasync.sinks.base import Sink
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import MemorySink
from megasync.trainer import device_masker, start
from megasync.trainer.device_masker import DeviceMasker
from megasync.trainer.device_snapshot import DeviceSnapshot
from megasync.versions.publication import PublicationReader
from tests.gpu import trainer_cases as cases
from tests.unit.test_device_mask import Gate
from tests.unit.test_publish_alone import assert_same, change, copy, model, rebuild

RETRY = PublishConfig(on_error=OnError.RETRY, in_flight_limit=4, max_first_density=1, timeout_s=20)


@pytest.fixture(autouse=True)
def device_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "make_snapshot", lambda s, r, place, device: DeviceSnapshot(s, r, place, device))


def check_newest(sink: Sink, tensors: dict[str, torch.Tensor], version: int) -> None:
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == version
    assert_same(rebuild(reader, newest), copy(tensors))


class SignSgd:
    """No torch optimizer: has only ``step``, as Megatron's."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.steps = tensors, 0

    def step(self) -> tuple[bool, float, int]:
        self.steps += 1
        change(self.tensors, 0.02, self.steps)
        return True, 1.0, 0


@pytest.mark.parametrize("place", list(SnapshotPlace))
def test_every_version_rebuilds_bit_for_bit(place: SnapshotPlace) -> None:
    sink, tensors = MemorySink(), model()
    optimizer = SignSgd(tensors)
    callback = cases.MaskCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1, snapshot=place))
    callback.optimizer = optimizer
    callback.on_train_start()
    versions = [copy(tensors)]
    for step in range(4):
        assert optimizer.step() == (True, 1.0, 0)
        assert callback.step_end() == step + 1
        versions.append(copy(tensors))
    callback.on_train_end()
    assert "step" not in vars(optimizer)
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    for manifest in reader.chain(newest):
        assert_same(rebuild(reader, manifest), versions[manifest.version])


def test_case_67_the_optimizer_of_the_context_waits_for_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, tensors = MemorySink(), model()
    optimizer = SignSgd(tensors)
    callback = cases.MaskCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1))

    @dataclass
    class Context:
        optimizer: Any
        skipped_iter: bool = False

    callback.on_train_start(Context(optimizer))
    for _ in range(2):  # the first publication is looked at before it goes on
        optimizer.step()
        callback.on_train_step_end(Context(optimizer))
    expected = copy(tensors)
    callback.flush()
    gate = Gate(monkeypatch)
    optimizer.step()
    expected = copy(tensors)
    callback.on_train_step_end(Context(optimizer))
    assert gate.reached.wait(20)
    threading.Timer(0.2, gate.opened.set).start()
    optimizer.step()  # must not run before the gate is open
    assert gate.opened.is_set()
    callback.flush()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 3
    assert_same(rebuild(reader, newest), expected)
    assert callback.telemetry.seconds["fence"] > 0.1
    callback.close()


def test_a_torch_optimizer_is_announced_by_its_own_hook() -> None:
    w = torch.nn.Parameter(torch.randn(70, 90))
    optimizer = torch.optim.SGD([w], lr=0.1)
    sink = MemorySink()
    callback = cases.MaskCallback(
        TensorExporter({"w": w}), sink, PublishConfig(max_first_density=1), optimizer=[optimizer]
    )
    callback.on_train_start()
    for _ in range(3):
        w.grad = torch.randn(70, 90)
        optimizer.step()
        callback.step_end()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    callback.on_train_end()
    assert not optimizer._optimizer_step_pre_hooks
    check_newest(sink, {"w": w.detach()}, 3)


def test_what_has_no_step_is_refused() -> None:
    callback = cases.MaskCallback(
        TensorExporter(model()), MemorySink(), PublishConfig(max_first_density=1), optimizer=3
    )
    with pytest.raises(TypeError, match=r"int has no step\(\)"):
        callback.on_train_start()


def test_without_any_announcement_each_pass_is_fenced_at_its_step_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink, tensors = MemorySink(), model()
    callback = cases.MaskCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1))
    callback.on_train_start()
    callback.step_end()
    change(tensors, 0.02, 1)
    gate = Gate(monkeypatch)
    threading.Timer(0.2, gate.opened.set).start()
    callback.step_end()
    assert gate.opened.is_set()
    assert [r.levelno for r in caplog.records if "announces" in r.message] == [logging.WARNING]
    gate.opened.clear()
    callback.before_optimizer_step()
    change(tensors, 0.02, 2)
    callback.step_end()  # announced: deferred
    assert not gate.opened.is_set()
    threading.Timer(0.2, gate.opened.set).start()
    callback.before_optimizer_step()
    assert gate.opened.is_set()
    change(tensors, 0.02, 3)
    callback.step_end()
    callback.on_train_end()
    check_newest(sink, tensors, 4)


def test_a_failed_version_is_withdrawn_on_the_mask_stream_and_the_next_carries_everything() -> None:
    for place in SnapshotPlace:
        sink, tensors = FaultySink(MemorySink()), model()
        callback = cases.MaskCallback(TensorExporter(tensors), sink, replace(RETRY, snapshot=place))
        callback.on_train_start()
        gate = threading.Event()
        sink.add(Fault("create", key="v000000000001", gate=gate, error=None))
        sink.add(Fault("create", key="v000000000002", error=lambda o, k: OSError("no space left")))
        for step in range(3):
            callback.before_optimizer_step()
            change(tensors, 0.05, step)
            callback.step_end()
        gate.set()
        callback.flush()
        assert [(o.version, o.durable) for o in callback.outcomes][:4] == [(0, True), (1, True), (2, False), (3, False)]
        check_newest(sink.inner, tensors, 4)
        callback.close()


def test_a_slow_sink_keeps_no_pass_from_landing() -> None:
    sink, tensors = FaultySink(MemorySink()), model()
    callback = cases.MaskCallback(TensorExporter(tensors), sink, replace(RETRY, in_flight_limit=6))
    callback.on_train_start()
    callback.step_end()
    gate = threading.Event()
    sink.add(Fault("create", key="v000000000002", gate=gate, error=None))
    for step in range(5):  # more than there are landing arenas
        callback.before_optimizer_step()
        change(tensors, 0.01, step)
        assert callback.step_end() == step + 2
    callback.before_optimizer_step()  # returns although version 2 is still held
    gate.set()
    callback.flush()
    check_newest(sink.inner, tensors, 6)
    callback.close()


def test_a_first_delta_that_is_another_model_is_refused_and_put_back() -> None:
    sink = MemorySink()
    first = cases.MaskCallback(TensorExporter(model()), sink, PublishConfig())
    first.on_train_start()
    first.on_train_end()
    other = cases.MaskCallback(TensorExporter(model(seed=1)), sink, PublishConfig())
    other.on_train_start()
    before = other._state.started.snapshot.arena.clone()  # type: ignore[union-attr]
    with pytest.raises(SchemaMismatchError, match=r"max_first_density is 5\.0%"):
        other.step_end()
    assert torch.equal(other._state.started.snapshot.arena, before)  # type: ignore[union-attr]
    other.close()


def test_an_error_of_a_pass_fails_its_version_and_the_next_one_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, tensors = MemorySink(), model()
    callback = cases.MaskCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1))
    callback.on_train_start()
    callback.step_end()

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("the device is full")

    monkeypatch.setattr(device_masker, "compact_jobs_", failing)
    change(tensors, 0.02, 1)
    callback.step_end()
    with pytest.raises(RankFailedError, match="the device is full"):
        callback.flush()
    monkeypatch.undo()
    callback.flush()
    check_newest(sink, tensors, 3)
    callback.close()


@dataclass
class Overlapped(TensorExporter):
    """Weights of two chunks, each gathered in its first forward after a step, as Megatron does with overlap on."""

    tensors: dict[str, torch.Tensor]
    stale: dict[int, Callable[[], None]] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    hooks: dict[int, Callable[[], None]] = field(default_factory=dict)
    forced: int = 0
    finished: int = 0
    before_step: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.tensors)

    def pieces(self) -> list[Any]:
        return [replace(p, chunk=self.chunk_of(p.name)) for p in super().pieces()]

    @staticmethod
    def chunk_of(name: str) -> int:
        return int("layers.1" in name)

    def late_chunks(self) -> tuple[int, ...]:
        return (0, 1)

    def num_open_gathers(self, chunk: int) -> int:
        return self.open[chunk]

    def after_forward(self, chunk: int, call: Callable[[], None]) -> Callable[[], None]:
        self.hooks[chunk] = call
        return lambda: self.hooks.pop(chunk, None) and None

    def step(self, seed: int) -> None:
        """The optimizer: its new values wait for each chunk's gather."""
        for chunk in (0, 1):
            mine = {n: t for n, t in self.tensors.items() if self.chunk_of(n) == chunk}
            self.stale[chunk] = lambda m=mine: change(m, 0.02, seed)  # type: ignore[misc]
            self.open[chunk] = 1

    def gather(self, chunk: int) -> None:
        self.stale.pop(chunk, lambda: None)()
        self.open[chunk] = 0

    def forward(self, chunk: int, *, gathered: bool = True) -> None:
        if gathered:
            self.gather(chunk)
        self.hooks.get(chunk, lambda: None)()

    def finish_chunk(self, chunk: int) -> None:
        self.finished += 1
        self.gather(chunk)

    def settle_before_step(self) -> float:
        self.before_step += 1
        return self.settle()

    def settle(self) -> float:
        self.forced += bool(self.stale)
        for chunk in (0, 1):
            self.gather(chunk)
        return 0.0


def overlapped() -> tuple[Overlapped, cases.MaskCallback, MemorySink]:
    exporter, sink = Overlapped(model()), MemorySink()
    callback = cases.MaskCallback(exporter, sink, PublishConfig(max_first_density=1))
    callback.on_train_start()
    callback.before_optimizer_step()
    exporter.step(1)
    callback.step_end()  # the first publication always settles
    assert exporter.forced == 1
    for chunk in (0, 1):
        exporter.forward(chunk)
    return exporter, callback, sink


def test_chunks_begin_at_the_end_of_their_first_forward_and_nothing_is_forced() -> None:
    exporter, callback, sink = overlapped()
    for step in range(2, 5):
        callback.before_optimizer_step()
        exporter.step(step)
        callback.step_end()
        for chunk in (0, 1):
            exporter.forward(chunk)
            exporter.forward(chunk)  # the next micro batch
    callback.before_optimizer_step()
    assert exporter.forced == 1
    expected = copy(exporter.tensors)
    callback.flush()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 4
    assert_same(rebuild(reader, newest), expected)
    callback.close()
    assert not exporter.hooks


def test_what_a_forward_pass_does_not_use_is_gathered_at_its_end() -> None:
    exporter, callback, sink = overlapped()
    callback.before_optimizer_step()
    exporter.step(2)
    callback.step_end()
    exporter.forward(0)
    exporter.forward(1, gathered=False)
    assert exporter.finished == 1
    exporter.forward(1)
    callback.before_optimizer_step()
    assert (exporter.forced, exporter.before_step) == (1, 0)
    callback.on_train_end()
    check_newest(sink, exporter.tensors, 2)


@pytest.mark.parametrize("where", ["optimizer", "evaluation", "checkpoint", "end", "second step end"])
def test_gathers_still_open_are_forced(where: str) -> None:
    exporter, callback, sink = overlapped()
    callback.before_optimizer_step()
    exporter.step(2)
    callback.step_end()
    exporter.forward(0)  # chunk 1 does not come
    if where == "optimizer":
        callback.before_optimizer_step()
    elif where == "evaluation":
        callback.on_eval_start()
    elif where == "checkpoint":
        callback.on_checkpoint_save()
    elif where == "second step end":
        callback.step_end(skipped=True)
    callback.flush()
    assert (exporter.forced, exporter.before_step) == (2, int(where == "optimizer"))
    assert callback.telemetry.seconds["settle"] > 0
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == (3 if where == "second step end" else 2)
    assert_same(rebuild(reader, newest), copy(exporter.tensors))
    callback.close()


def test_the_last_step_and_exporters_that_make_bytes_always_settle() -> None:
    exporter, callback, sink = overlapped()
    callback.before_optimizer_step()
    exporter.step(2)
    callback.config = replace(callback.config, every=2)
    callback.step_end()
    callback.on_train_end()
    assert exporter.forced == 2
    check_newest(sink, exporter.tensors, 2)
    exporter, callback, sink = overlapped()
    exporter.settle_always = True
    callback.before_optimizer_step()
    exporter.step(2)
    callback.step_end()
    assert exporter.forced == 2
    callback.on_train_end()
    check_newest(sink, exporter.tensors, 2)


def test_weights_that_moved_fail_the_version_while_late_chunks_still_settle_together() -> None:
    exporter, callback, sink = overlapped()
    callback.before_optimizer_step()
    exporter.step(2)
    exporter.check_alive = lambda: (_ for _ in ()).throw(PlanError("a weight moved"))  # type: ignore[method-assign]
    callback.step_end()
    exporter.forward(0, gathered=False)
    assert exporter.finished == 1  # as on the other ranks
    callback.before_optimizer_step()
    assert exporter.before_step == 1
    with pytest.raises(RankFailedError, match="a weight moved"):
        callback.flush()
    del exporter.check_alive
    callback.flush()
    check_newest(sink, exporter.tensors, 3)
    callback.close()


def test_an_interrupt_as_a_late_chunk_begins_fails_its_version_and_the_next_carries_what_was_read_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter, callback, sink = overlapped()
    callback.config = replace(callback.config, on_error=OnError.RETRY)
    callback.before_optimizer_step()
    exporter.step(2)
    read = threading.Event()
    inner, begin = DeviceMasker._read_chunk, DeviceMasker._begin_chunk

    def reading(self: DeviceMasker, masked: Any, chunk: int, start: Any) -> None:
        inner(self, masked, chunk, start)
        read.set()

    def interrupted(self: DeviceMasker, masked: Any, chunk: int, start: Any) -> None:
        if chunk == 1:
            raise KeyboardInterrupt
        begin(self, masked, chunk, start)

    monkeypatch.setattr(DeviceMasker, "_read_chunk", reading)
    callback.step_end()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceMasker, "_begin_chunk", interrupted)
        exporter.forward(0)
        assert read.wait(20)  # the snapshot has chunk 0 of a version that never comes to be
        with pytest.raises(KeyboardInterrupt):
            exporter.forward(1)
    callback.flush()
    check_newest(sink, exporter.tensors, 3)
    assert [(o.version, o.durable) for o in callback.outcomes][2:] == [(2, False), (3, True)]
    assert "the mask pass was interrupted (KeyboardInterrupt)" in str(callback.outcomes[2].error)
    callback.close()
