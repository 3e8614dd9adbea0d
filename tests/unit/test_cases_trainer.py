"""Cases that users of such systems reported, trainer side in one process; distributed/test_cases_ranks.py has the ranks."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import ApplyConfig, GatherKind, PublishConfig
from megasync.errors import MegasyncError, NeedsAnchorError, PlanError, RankFailedError
from megasync.receiver.applier import Applier
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import MemorySink
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.publishing import Outcome
from megasync.versions.publication import PublicationReader
from tests.unit.receiving import plain_engine
from tests.unit.test_publish_alone import Tensors, assert_same, change, copy, model, rebuild

CONFIG = PublishConfig(max_first_density=1, timeout_s=20)


def started(
    tensors: Tensors, sink: MemorySink | FaultySink, config: PublishConfig = CONFIG, **more: object
) -> MegasyncCallback:
    callback = MegasyncCallback(TensorExporter(tensors), sink, config, **more)  # type: ignore[arg-type]
    callback.on_train_start()
    return callback


def newest(sink: MemorySink | FaultySink):  # type: ignore[no-untyped-def]
    reader = PublicationReader(sink, "run")
    found = reader.newest()
    assert found is not None
    return reader, found


def require_published(sink: MemorySink | FaultySink, tensors: Tensors, version: int) -> None:
    reader, found = newest(sink)
    assert found.version == version
    assert_same(rebuild(reader, found), copy(tensors))


def test_case_10_an_anchor_holds_every_parameter_also_those_that_are_zero_or_never_change() -> None:
    sink, tensors = MemorySink(), model() | {"zeros": torch.zeros(70, 30), "still": torch.randn(9)}
    callback = started(tensors, sink)
    change({"model.scalar": tensors["model.scalar"]}, 1.0, 1)
    callback.step_end()
    callback.on_train_end()
    reader, found = newest(sink)
    anchor = reader.chain(found)[0]
    schema = reader.schema(anchor.schema_digest)
    assert (anchor.what, anchor.version) == ("anchor", 0)
    assert {schema.tensors[i].name for i in anchor.touched_ids} == {n for n, t in tensors.items() if t.numel()}
    # An engine whose bytes are all garbage, zeros included, ends with the trainer's.
    g = torch.Generator().manual_seed(5)
    garbage = {
        n: torch.randint(1, 256, (t.nbytes,), generator=g, dtype=torch.uint8).numpy() for n, t in tensors.items()
    }
    words = copy(tensors)
    engine = plain_engine({n: garbage[n].view(w.dtype).reshape(w.shape or (1,)) for n, w in words.items()})
    applier = Applier(engine, sink, ApplyConfig(workers=1))
    applier.join()
    assert applier.update().version == 1
    for n, w in words.items():
        np.testing.assert_array_equal(engine.live[n].reshape(-1).numpy().view(w.dtype), w.reshape(-1), err_msg=n)


class CountingSink(MemorySink):
    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def read(self, key, **more):  # type: ignore[no-untyped-def]
        self.num_reads += 1
        return super().read(key, **more)

    def read_into(self, key, offset, out, **more):  # type: ignore[no-untyped-def]
        self.num_reads += 1
        return super().read_into(key, offset, out, **more)


def test_case_19_a_cold_start_after_a_long_run_without_an_anchor_ends_after_a_bounded_number_of_reads() -> None:
    sink, tensors = CountingSink(), {"layers.0.w": torch.randn(40, 30)}
    callback = started(tensors, sink)
    for step in range(90):
        change(tensors, 0.05, step)
        callback.step_end()
    callback.on_train_end()
    sink.num_reads = 0
    words = copy(tensors)
    engine = plain_engine({n: np.zeros_like(w) for n, w in words.items()})
    applier = Applier(engine, sink, ApplyConfig(workers=1))
    applier.join()
    assert applier.update().version == 90
    np.testing.assert_array_equal(engine.live["layers.0.w"].numpy().view(np.uint32), words["layers.0.w"])
    assert sink.num_reads <= 90 * 6  # linear: not a replay from the anchor at every step
    sink.num_reads = 0
    again = started(tensors, sink)  # a restarted trainer
    again.close()
    assert sink.num_reads <= 90 * 6


def test_case_67_a_version_that_waits_behind_another_is_of_its_own_step() -> None:
    """The publisher's thread is held by version 1 while version 2 is made and the trainer goes on writing."""
    sink, tensors, gate = FaultySink(MemorySink()), model(), threading.Event()
    callback = started(tensors, sink)
    sink.add(Fault("create", key="v000000000001", gate=gate, error=None))
    expected = []
    for step in (1, 2):
        change(tensors, 0.05, step)
        callback.step_end()
        expected.append(copy(tensors))
    change(tensors, 0.05, 3)
    gate.set()
    callback.flush()
    reader, found = newest(sink.inner)
    for manifest, words in zip(reader.chain(found)[1:], expected, strict=True):
        assert_same(rebuild(reader, manifest), words)
    callback.close()


FAULTS = [
    ("read_head", ""),
    ("swap_head", ""),
    ("create", "schema"),
    ("create", "state"),
    ("create", "payload"),
    ("create", "manifest"),
]


@pytest.mark.parametrize(("operation", "key"), FAULTS)
def test_case_68_a_start_that_fails_half_way_leaves_nothing_behind(operation: str, key: str) -> None:
    sink, tensors = FaultySink(MemorySink()), model()
    sink.add(Fault(operation, key=key, times=99, error=lambda o, k: OSError(f"{o} of {k} was refused")))
    callback = MegasyncCallback(TensorExporter(tensors), sink, CONFIG)
    with pytest.raises(RankFailedError, match="was refused"):
        callback.on_train_start()
    assert callback.version == -1
    with pytest.raises(ValueError, match="not running"):
        callback.step_end()
    assert not [t.name for t in threading.enumerate() if t.name == "megasync-publish"]
    assert PublicationReader(sink.inner, "run").newest() is None
    sink.heal()
    callback.on_train_start()
    change(tensors, 0.1, 1)
    assert callback.step_end() == 1
    callback.on_train_end()
    require_published(sink.inner, tensors, 1)


@pytest.mark.parametrize(
    ("operation", "key"), [("read_head", ""), ("read", "schema"), ("read", "state"), ("read_into", "")]
)
def test_case_68_a_join_that_fails_half_way_can_be_made_again(operation: str, key: str) -> None:
    store, tensors = MemorySink(), {"w": torch.randn(70, 30)}
    callback = started(tensors, store)
    callback.on_train_end()
    sink = FaultySink(store)
    sink.add(Fault(operation, key=key, error=lambda o, k: OSError(f"{o} of {k} was refused")))
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(70, 30))
    applier = Applier(TorchModuleEngine(module), sink, ApplyConfig(workers=2))
    with pytest.raises(OSError, match="was refused"):
        applier.join()
    assert not applier.ready
    assert not module.w.any()
    with pytest.raises((ValueError, MegasyncError), match="join"):
        applier.update()
    assert applier.join().version == 0
    assert applier.ready
    assert torch.equal(module.w, tensors["w"])
    applier.close()


def test_case_71_metrics_never_stop_the_sync(caplog: pytest.LogCaptureFixture) -> None:
    """A context without attributes, facts that fail or are no plain numbers, a verdict that nobody can take."""
    sink, tensors = MemorySink(), model()
    facts = iter([{"loss": np.float64(0.5), "step": np.int64(7), "who": Path("x"), "n": None}, {"lr": 1e-6}])

    def telling() -> dict:
        return next(facts)  # the third call fails

    def taking(outcome: Outcome) -> None:
        raise AttributeError("the metrics object has no attribute 'grad_norm'")

    callback = MegasyncCallback(TensorExporter(tensors), sink, CONFIG, facts=telling, on_outcome=taking)
    with caplog.at_level(logging.WARNING):
        callback.on_train_start(SimpleNamespace())
        for step in range(3):
            change(tensors, 0.05, step)
            callback.on_train_step_end(object())
            callback.flush()
        callback.on_train_end(None)
    assert [o.durable for o in callback.outcomes] == [True] * 4
    require_published(sink, tensors, 3)
    reader, found = newest(sink)
    infos = [m.info for m in reader.chain(found)]
    assert infos[0] == {"loss": 0.5, "step": 7, "who": "x", "n": "None"}
    assert infos[1:] == [{"lr": 1e-6}, {}, {}]
    assert "grad_norm" in caplog.text
    assert "StopIteration" in caplog.text


def test_case_72_bad_arguments_are_refused_before_anything_is_claimed() -> None:
    with pytest.raises(ValueError, match=r"every is 0.*in_flight_limit is 0.*max_first_density is 2"):
        PublishConfig(every=0, in_flight_limit=0, max_first_density=2)
    with pytest.raises(ValueError, match="num_writers means nothing with gather=direct"):
        PublishConfig(gather=GatherKind.DIRECT, num_writers=2)
    sink = MemorySink()
    with pytest.raises(ValueError, match="run name"):
        MegasyncCallback(TensorExporter(model()), sink, PublishConfig(run="../up"))
    with pytest.raises(ValueError, match="codec 'gzip'"):
        MegasyncCallback(TensorExporter(model()), sink, PublishConfig(codec="gzip"))
    with pytest.raises(ValueError, match=r"no context\.model"):
        MegasyncCallback(lambda chunks: TensorExporter({}), sink).on_train_start()
    with pytest.raises(ValueError, match="workers is 0, expected a whole number, at least 1"):
        ApplyConfig(workers=0)
    assert list(sink.keys("")) == []
    assert sink.read_head("run") is None


def test_case_83_added_parameters_keep_names_and_order_in_step() -> None:
    sink, tensors = MemorySink(), model()
    callback = started(tensors, sink)
    change(tensors, 0.05, 1)
    callback.step_end()
    callback.on_train_end()
    # The same tensors in another order are the same run.
    shuffled = dict(reversed(list(tensors.items())))
    again = started(shuffled, sink)
    change(shuffled, 0.05, 2)
    again.step_end()
    again.on_train_end()
    require_published(sink, tensors, 2)
    # One tensor more is another model: the old run names it, a new run carries it under its own name.
    more = {"model.layers.1.router.extra_bias": torch.randn(64), **tensors}
    with pytest.raises(RankFailedError, match=r"missing there: model\.layers\.1\.router\.extra_bias"):
        started(more, sink)
    fresh = MemorySink()
    last = started(more, fresh)
    change(more, 0.05, 3)
    last.step_end()
    last.on_train_end()
    require_published(fresh, more, 1)
    old_engine = plain_engine({n: w.reshape(w.shape or (1,)) for n, w in copy(tensors).items()})
    with pytest.raises(PlanError, match=r"model\.layers\.1\.router\.extra_bias"):
        Applier(old_engine, fresh, ApplyConfig(workers=1)).join()


def test_case_7_a_skipped_iteration_is_an_empty_version_that_receivers_take() -> None:
    sink, tensors = MemorySink(), {"w": torch.randn(40, 30)}
    callback = started(tensors, sink)
    words = copy(tensors)
    engine = plain_engine(words)
    applier = Applier(engine, sink, ApplyConfig(workers=1))
    applier.join()
    assert callback.step_end(skipped=True) == 1
    change(tensors, 0.1, 1)
    assert callback.step_end() == 2
    callback.flush()
    reader, found = newest(sink)
    assert [m.num_changed > 0 for m in reader.chain(found)] == [True, False, True]
    assert applier.update().versions == (1, 2)
    assert engine.events == ["pause", ("resume", 2)]
    np.testing.assert_array_equal(engine.live["w"].numpy().view(np.uint32), copy(tensors)["w"])
    callback.close()


def test_expert_bias_moved_in_a_skipped_last_iteration_is_published() -> None:
    """A router's expert bias is not the optimizer's: it moves although the optimizer skipped the step."""
    tensors, sink = {"w": torch.randn(40, 30), "bias": torch.zeros(8)}, MemorySink()
    exporter = TensorExporter(tensors, volatile=["bias"])
    callback = MegasyncCallback(exporter, sink, PublishConfig(every=3, max_first_density=1))
    callback.on_train_start()
    callback.step_end()
    callback.step_end()
    callback.step_end()
    tensors["bias"] += 1e-3
    callback.step_end(skipped=True)
    callback.on_train_end()
    require_published(sink, tensors, 2)


def test_weights_changed_after_the_optimizer_step_are_of_the_same_version() -> None:
    """What qk-clip does: between ``optimizer.step()`` and the step end, outside the optimizer."""
    weight = torch.nn.Parameter(torch.randn(24, 16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    sink = MemorySink()
    callback = started({"layers.0.qkv": weight}, sink, optimizer=optimizer)
    for step in (1, 2):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        with torch.no_grad():
            weight[:8] *= 0.75
        clipped = weight.detach().clone()
        assert callback.step_end() == step
        with torch.no_grad():
            weight += 1  # of the next step already
        callback.flush()
        require_published(sink, {"layers.0.qkv": clipped}, step)
    callback.close()


def test_case_28_a_trainer_may_not_take_a_run_whose_anchor_is_gone() -> None:
    sink, tensors = MemorySink(), model()
    callback = started(tensors, sink)
    change(tensors, 0.05, 1)
    callback.step_end()
    callback.on_train_end()
    for key in list(sink.keys("run/v000000000000")):
        sink.delete(key)
    with pytest.raises((RankFailedError, NeedsAnchorError), match="starts from version 0"):
        started(model(), sink)
