"""The callback whose calls are interrupted anywhere: the next ones publish every word, as if nothing had been."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import OnError, PublishConfig, SnapshotPlace
from megasync.errors import RankFailedError
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import MemorySink
from megasync.trainer import start
from megasync.trainer.copied_masker import CopiedMasker
from megasync.trainer.device_masked import DeviceMasked
from megasync.trainer.device_masker import DeviceMasker
from megasync.trainer.device_snapshot import DeviceSnapshot
from megasync.trainer.masker import HostMasker, Masker
from megasync.versions.publication import PublicationReader
from tests.gpu import trainer_cases as cases
from tests.unit.test_device_mask_callback import check_newest
from tests.unit.test_publish_alone import assert_same, change, copy
from tests.unit.test_side_masker import interrupt_at

KINDS = pytest.mark.parametrize("kind", [HostMasker, DeviceMasker, CopiedMasker])
TRACED = (
    *(
        "callback.py",
        "hooks.py",
        "inflight.py",
        "masker.py",
        "trainer/mask.py",
        "device_stream.py",
    ),  # also copied_masker.py ...
    *("concurrent/futures/_base.py", "concurrent/futures/thread.py", "threading.py", "queue.py"),
)
CONFIG = PublishConfig(max_first_density=1, snapshot=SnapshotPlace.HOST, in_flight_limit=3, timeout_s=20)


@pytest.fixture(autouse=True)
def device_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "make_snapshot", lambda s, r, place, device: DeviceSnapshot(s, r, place, device))


class Follower:
    """Rebuilds the newest version from the one before and compares it with the weights.

    Args:
        sink: Where it is read from.
    """

    def __init__(self, sink: FaultySink) -> None:
        self.reader, self.version = PublicationReader(sink.inner, "run"), -1
        self.words: dict[str, np.ndarray] = {}

    def check(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Up to a version, which must be the newest and must be the weights."""
        newest = self.reader.newest()
        assert newest is not None
        assert newest.version == version
        schema = self.reader.schema(newest.schema_digest)
        self.words = self.words or {t.name: np.zeros(t.num_words, f"<u{t.word_nbytes}") for t in schema.tensors}
        for manifest in self.reader.chain(newest, self.version):
            for _, e in self.reader.entries(manifest):
                stops = np.cumsum(e.counts, dtype=np.int64)
                for tensor_id, tile, stop, count in zip(e.tensor_ids, e.tiles, stops, e.counts, strict=True):
                    at = slice(int(stop) - int(count), int(stop))
                    flat = schema.grids[tensor_id].flat_index(np.array([tile]), e.positions[at])
                    self.words[schema.tensors[tensor_id].name][flat] ^= e.values[at]
        self.version = version
        assert_same(self.words, copy(tensors))


def weights() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(40, 70),
        "b": torch.randn(300).bfloat16(),
        "layers.0.c": torch.randint(0, 256, (9, 33), dtype=torch.uint8),
    }


def started(
    kind: type[Masker], sink: FaultySink, config: PublishConfig
) -> tuple[cases.MaskCallback, dict[str, torch.Tensor]]:
    tensors = weights()
    callback = cases.MaskCallback(TensorExporter(tensors), sink, config, kind=kind)
    callback.on_train_start()
    return callback, tensors


@KINDS
def test_an_interrupt_anywhere_in_a_step_end_loses_no_word(kind: type[Masker]) -> None:
    sink = FaultySink(MemorySink())
    callback, tensors = started(kind, sink, CONFIG)
    follower = Follower(sink)
    callback.before_optimizer_step()
    change(tensors, 0.05, 0)
    callback.step_end()
    callback.flush()
    number, interrupted = 1, 0
    while True:
        callback.before_optimizer_step()
        change(tensors, 0.05, number)
        with interrupt_at(number, TRACED) as seen:
            try:
                callback.step_end()
                callback.before_optimizer_step()
            except KeyboardInterrupt:
                interrupted += 1
        callback.before_optimizer_step()
        change(tensors, 0.01, 10_000 + number)  # the trainer goes on
        callback.step_end()
        callback.flush()
        follower.check(tensors, callback.version)
        if seen[0] < number:
            break
        number += 1
    assert all(o.durable for o in callback.outcomes)
    assert interrupted > (30 if kind is HostMasker else 50)
    callback.close()


@KINDS
def test_an_interrupt_anywhere_in_a_withdrawal_takes_every_word_back_once(kind: type[Masker]) -> None:
    sink = FaultySink(MemorySink())
    callback, tensors = started(kind, sink, replace(CONFIG, on_error=OnError.RETRY, max_failures=100_000))
    follower = Follower(sink)
    callback.step_end()
    callback.flush()
    number, interrupted = 1, 0
    while True:
        gate = threading.Event()  # so that both are in flight when the first fails
        sink.add(Fault("create", gate=gate, error=lambda o, k: OSError("no space left")))
        for step in range(2):
            callback.before_optimizer_step()
            change(tensors, 0.05, 2 * number + step)
            callback.step_end()
        gate.set()
        with interrupt_at(number, TRACED) as seen:
            try:
                callback.flush()
            except KeyboardInterrupt:
                interrupted += 1
        callback.flush()
        follower.check(tensors, callback.version)
        if seen[0] < number:
            break
        number += 1
    assert interrupted > 40
    callback.close()


@KINDS
def test_a_pass_that_never_got_on_its_way_is_taken_back_before_the_next(
    kind: type[Masker], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FaultySink(MemorySink())
    callback, tensors = started(kind, sink, CONFIG)
    callback.step_end()
    change(tensors, 0.05, 1)
    state = callback._state
    assert state is not None

    def interrupted(flight: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state.flights, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            callback.step_end()
    callback.flush()
    check_newest(sink, tensors, 2)
    callback.close()


def test_words_that_were_lost_refuse_every_later_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the snapshot: a delta from it would leave them out."""
    sink = FaultySink(MemorySink())
    callback, tensors = started(DeviceMasker, sink, replace(CONFIG, on_error=OnError.RETRY))
    callback.step_end()
    callback.flush()

    def failing(self: DeviceMasked) -> None:
        raise MemoryError("no room for the planes")

    change(tensors, 0.05, 1)
    with monkeypatch.context() as patch:
        patch.setattr("megasync.trainer.device_masked.Landed.bring_down", lambda *a: failing(a[0]))
        callback.step_end()
        for _ in range(2):
            with pytest.raises(RankFailedError, match=r"cannot be put back.*no room for the planes.*start anew"):
                callback.flush()
    with pytest.raises(RankFailedError, match="cannot be put back"):
        callback.step_end()
    callback.on_train_start()
    callback.step_end()
    callback.on_train_end()
    check_newest(sink, tensors, callback.version)
