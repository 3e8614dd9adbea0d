"""Versions in flight over a sink that fails: fates, withdrawal, fences. One process; distributed/ has the ranks."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import OnError, PublishConfig, WhenFull
from megasync.errors import RankFailedError, RetryError, SinkConflictError
from megasync.manifest import decode_head
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import MemorySink
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.publishing import Outcome
from megasync.versions.head import claim
from megasync.versions.publication import PublicationReader
from tests.unit.test_publish_alone import assert_same, change, copy, rebuild

RETRY = PublishConfig(on_error=OnError.RETRY, in_flight_limit=4, max_first_density=1, timeout_s=20)


class Trainer:
    """A few tensors, a callback over a faulty sink, and the bytes of every version."""

    def __init__(self, config: PublishConfig = RETRY, inner: MemorySink | None = None) -> None:
        self.sink = FaultySink(inner or MemorySink())
        self.tensors = {"a": torch.randn(300, 64), "layers.0.w": torch.randn(80, 33).bfloat16()}
        self.verdicts: list[Outcome] = []
        self._told = threading.Condition()
        self.callback = MegasyncCallback(TensorExporter(self.tensors), self.sink, config, on_outcome=self._tell)
        self.callback.on_train_start()
        self.steps = 0

    def _tell(self, outcome: Outcome) -> None:
        with self._told:
            self.verdicts.append(outcome)
            self._told.notify_all()

    def wait_for_verdicts(self, num: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: len(self.verdicts) >= num, timeout=20)

    def step(self) -> int | None:
        self.steps += 1
        change(self.tensors, 0.05, self.steps)
        return self.callback.step_end()

    def check_newest(self, version: int, base_version: int) -> None:
        reader = PublicationReader(self.sink.inner, "run")
        newest = reader.newest()
        assert newest is not None
        assert (newest.version, newest.base_version) == (version, base_version)
        assert_same(rebuild(reader, newest), copy(self.tensors))

    def check_snapshot(self) -> None:
        state = self.callback._state
        assert state is not None
        for i, region in enumerate(state.started.snapshot.regions):
            live = region.data.contiguous().view(torch.uint8).numpy().reshape(-1)
            np.testing.assert_array_equal(state.started.snapshot.words(i).view(np.uint8), live)


def broken(operation: str, key: str) -> Exception:
    return OSError(28, f"no space left for {operation} {key}")


def test_three_in_flight_and_the_middle_one_fails() -> None:
    t = Trainer()
    gate = threading.Event()
    t.sink.add(Fault("create", key="v000000000001", gate=gate, error=None))
    t.sink.add(Fault("create", key="v000000000002", error=broken))
    assert [t.step(), t.step(), t.step()] == [1, 2, 3]
    gate.set()
    t.wait_for_verdicts(4)
    assert [(o.version, o.durable) for o in t.verdicts] == [(0, True), (1, True), (2, False), (3, False)]
    assert "no space left" in t.verdicts[2].error[0]
    # 2 and 3 are withdrawn; their numbers are never used again and version 4 carries everything since 1.
    assert t.step() == 4
    t.callback.flush()
    t.check_newest(4, base_version=1)
    t.check_snapshot()
    t.callback.close()


def test_case_11_and_01_a_failed_publication_raises_and_the_next_delta_starts_from_the_last_durable_version() -> None:
    t = Trainer(replace(RETRY, on_error=OnError.RAISE))
    t.sink.add(Fault("create", key="v000000000001/e000001/payload", error=broken))
    t.step()
    with pytest.raises(RankFailedError, match=r"version 1.*no space left"):
        t.callback.flush()
    t.callback.flush()
    t.check_newest(2, base_version=0)
    t.callback.close()


def test_a_head_write_that_took_effect_but_whose_answer_was_lost_is_durable() -> None:
    t = Trainer()
    t.sink.add(Fault("swap_head", when="after"))
    t.step()
    t.callback.flush()
    assert [o.durable for o in t.verdicts] == [True, True]
    t.step()
    t.callback.flush()
    t.check_newest(2, base_version=1)
    t.callback.close()


def test_a_head_write_that_was_lost_is_fenced_off_and_withdrawn() -> None:
    t = Trainer()
    t.sink.add(Fault("swap_head", when="before"))
    t.step()
    t.callback.flush()
    assert [(o.version, o.durable) for o in t.verdicts] == [(0, True), (1, False), (2, True)]
    t.check_newest(2, base_version=0)
    t.callback.close()


def test_a_delayed_head_write_must_fail_after_the_fence() -> None:
    t = Trainer()
    t.sink.add(Fault("swap_head", when="late"))
    t.step()
    t.callback.flush()
    (late,) = t.sink.release_late()
    assert isinstance(late, SinkConflictError)
    t.check_newest(2, base_version=0)
    t.callback.close()


def test_the_fence_itself_may_lose_its_answer() -> None:
    t = Trainer()
    t.sink.add(Fault("swap_head", nth=1, when="after"))
    t.sink.add(Fault("swap_head", nth=2, when="after"))
    t.step()
    t.callback.flush()
    t.check_newest(1, base_version=0)
    t.callback.close()


def test_an_orphan_manifest_of_a_dead_epoch_is_never_read() -> None:
    store = MemorySink()
    dead = Trainer(inner=store)
    dead.sink.add(Fault("swap_head", error=lambda o, k: OSError("killed"), times=99))
    dead.step()
    dead.wait_for_verdicts(2)
    dead.callback.close()
    assert any("v000000000001/e000001/manifest" in k for k in store.keys("run"))
    t = Trainer(inner=store)
    assert t.step() == 1
    t.step()
    t.callback.flush()
    t.check_newest(2, base_version=1)
    reader = PublicationReader(store, "run")
    newest = reader.newest()
    assert newest is not None
    assert reader.base_of(newest).epoch == 2
    t.callback.close()


def test_a_slow_sink_leaves_steps_alone_until_the_limit_then_waits() -> None:
    t = Trainer(replace(RETRY, in_flight_limit=2))
    gate = threading.Event()
    t.sink.add(Fault("create", key="v000000000001", gate=gate, error=None))
    assert [t.step(), t.step()] == [1, 2]  # returned although the sink holds version 1
    assert len(t.verdicts) == 1
    threading.Timer(0.3, gate.set).start()
    start = time.monotonic()
    assert t.step() == 3
    assert time.monotonic() - start > 0.2
    t.callback.flush()
    t.check_newest(3, base_version=2)
    t.callback.close()


def test_a_slow_sink_skips_steps_where_configured() -> None:
    t = Trainer(replace(RETRY, in_flight_limit=2, when_full=WhenFull.SKIP))
    gate = threading.Event()
    t.sink.add(Fault("create", key="v000000000001", gate=gate, error=None))
    assert [t.step(), t.step(), t.step(), t.step()] == [1, 2, None, None]
    gate.set()
    t.wait_for_verdicts(3)
    assert t.step() == 3
    t.callback.flush()
    t.check_newest(3, base_version=2)
    t.callback.close()


def test_an_unreachable_sink_is_retried_and_nothing_is_withdrawn() -> None:
    t = Trainer()
    t.sink.add(Fault("create", key="v000000000001", times=3))
    t.step()
    t.callback.flush()
    assert [o.durable for o in t.verdicts] == [True, True]
    t.check_newest(1, base_version=0)
    t.callback.close()


def test_a_fate_that_stays_unknown_ends_in_an_error_with_the_versions_and_the_last_answer() -> None:
    t = Trainer(replace(RETRY, give_up_s=0.3))
    t.sink.add(Fault("swap_head", times=10_000))
    t.step()
    told = r"versions \[1\].*neither durable nor failed \(give_up_s 0.3\): RetryError: swap_head.*no answer"
    with pytest.raises(RetryError, match=told):
        t.callback.flush()
    t.sink.heal()
    t.wait_for_verdicts(2)
    t.callback.flush()  # fenced off, so that what was lost cannot land later, and published anew
    assert [(o.version, o.durable) for o in t.verdicts] == [(0, True), (1, False), (2, True)]
    t.check_newest(2, base_version=0)
    t.callback.close()


def full(operation: str, key: str) -> Exception:
    return RetryError(f"{operation} of {key}: no space left on device")


@pytest.mark.parametrize("key", ["payload", "manifest"])
def test_a_sink_that_stays_full_is_given_up_with_its_answer_and_retry_goes_on(key: str) -> None:
    t = Trainer(replace(RETRY, give_up_s=0.2))
    t.sink.add(Fault("create", key=key, times=10_000, error=full))
    t.step()
    t.wait_for_verdicts(2)
    assert t.step() == 2  # nothing of version 1 can be read: it is withdrawn, and version 2 carries its changes
    t.sink.heal()
    t.callback.flush()
    assert [(o.version, o.durable) for o in t.verdicts[:2]] == [(0, True), (1, False)]
    assert "given up (give_up_s=0.2 s passed), nothing of it was published" in t.verdicts[1].error[0]
    assert "no space left on device" in t.verdicts[1].error[0]
    t.check_newest(t.callback.version, base_version=0)
    t.check_snapshot()
    t.callback.close()


def test_a_sink_that_stays_full_raises_its_answer_where_configured() -> None:
    t = Trainer(replace(RETRY, give_up_s=0.2, on_error=OnError.RAISE))
    t.sink.add(Fault("create", key="payload", times=10_000, error=full))
    t.step()
    with pytest.raises(RankFailedError, match=r"publishing version 1 .*no space left on device"):
        t.callback.flush()
    t.callback.close()


def test_a_publisher_that_was_taken_over_stops() -> None:
    t = Trainer()
    claim(t.sink.inner, "run")
    assert t.step() == t.callback.version == 1
    with pytest.raises(SinkConflictError, match="version 1"):
        t.callback.flush()
    assert t.callback.version == 0, "version 1 is neither on its way nor durable"
    calls = len(t.sink.calls)
    with pytest.raises(SinkConflictError, match="stop this publisher"):
        t.callback.step_end()
    assert t.sink.calls[calls:] == []
    t.callback.close()
    assert t.callback.version == 0
    raw = t.sink.inner.read_head("run")
    assert raw is not None
    assert decode_head(raw, "run").version == 0


def test_failures_in_a_row_are_bounded() -> None:
    t = Trainer(replace(RETRY, max_failures=1))
    t.sink.add(Fault("create", key="payload", times=99, error=broken))
    t.step()
    with pytest.raises(RankFailedError, match="no space left"):
        t.callback.flush()
    t.sink.heal()
    t.callback.flush()
    t.check_newest(t.callback.version, base_version=0)
    t.callback.close()
