"""What a publisher refuses: another model for as long as it lives, weights that were swapped, wrong arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import PublishConfig
from megasync.errors import PlanError, RankFailedError, SchemaMismatchError
from megasync.sinks.base import Sink
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import MemorySink
from megasync.trainer.callback import MegasyncCallback
from megasync.versions.publication import PublicationReader
from tests.unit.test_publish_alone import assert_same, copy, rebuild

RUN = PublishConfig(timeout_s=20)


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64))


def nudge(module: torch.nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).view(-1)[:3] += 1


def published(sink: MemorySink) -> tuple[int, dict[str, torch.Tensor]]:
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    return newest.version, rebuild(reader, newest)


def started(sink: Sink, module: torch.nn.Module, **more: Any) -> MegasyncCallback:
    callback = MegasyncCallback(TensorExporter.of_module(module), sink, PublishConfig(timeout_s=20, **more))
    callback.on_train_start()
    return callback


def test_another_model_is_refused_until_the_publisher_is_started_again() -> None:
    sink, first, other = MemorySink(), network(0), network(9)
    started(sink, first).close()
    callback = started(sink, other)
    with pytest.raises(SchemaMismatchError, match="start the publisher again"):
        callback.step_end()
    assert callback.version == 0
    nudge(other)
    for again in (callback.step_end, callback.flush, callback.step_end, callback.on_train_end):
        with pytest.raises(SchemaMismatchError, match="first delta"):
            again()
    version, words = published(sink)
    assert version == 0
    assert_same(words, copy(dict(first.state_dict())))
    # Mended: the trainer loads the version that the engines have.
    other.load_state_dict(first.state_dict())
    callback.on_train_start()
    nudge(other)
    assert callback.step_end() == 1
    callback.on_train_end()
    version, words = published(sink)
    assert version == 1
    assert_same(words, copy(dict(other.state_dict())))


def swap(m: torch.nn.Sequential) -> None:
    m[1].weight = torch.nn.Parameter(m[1].weight.detach().clone())


def add(m: torch.nn.Sequential) -> None:
    m.add_module("late", torch.nn.Linear(3, 3))


def tie(m: torch.nn.Sequential) -> None:
    m[2].bias = m[2].weight


def drop(m: torch.nn.Sequential) -> None:
    del m[2]


def cast(m: torch.nn.Sequential) -> None:
    m.double()


def new_buffer(m: torch.nn.Sequential) -> None:
    m[2].running_mean = m[2].running_mean.clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap, "1.weight was replaced"),
        (add, "late.(weight|bias) was added"),
        (tie, "2.bias was replaced"),
        (drop, "2.[a-z_]+ is gone"),
        (cast, "0.weight"),
        (new_buffer, "2.running_mean was replaced"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_weights_that_the_module_swaps_end_the_publications(
    change: Callable[[torch.nn.Sequential], None], words: str
) -> None:
    sink, module = MemorySink(), network(0)
    callback = started(sink, module)
    change(module)
    nudge(module)
    callback.step_end()
    with pytest.raises(RankFailedError, match=words):
        callback.flush()
    callback.close()
    assert published(sink)[0] == 0


def test_a_parameter_made_anew_over_the_same_memory_is_the_same_weight() -> None:
    module = network(0)
    exporter = TensorExporter.of_module(module)
    module[1].weight = torch.nn.Parameter(module[1].weight.data)
    exporter.check_alive()
    module[1].weight = torch.nn.Parameter(module[1].weight.detach().clone())
    with pytest.raises(PlanError, match=r"1\.weight was replaced.*new exporter"):
        exporter.check_alive()


def test_state_that_is_no_weight_is_left_out() -> None:
    class Counted(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    assert sorted(s.name for s in TensorExporter.of_module(Counted(2, 2)).specs()) == ["bias", "weight"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: TensorExporter(torch.optim.AdamW(m.parameters()).state_dict()), "'state' is of type dict"),
        (lambda m: TensorExporter(list(m.parameters())), "got list, expected a mapping"),
        (lambda m: TensorExporter({"a": torch.zeros(3).numpy()}), "'a' is of type ndarray"),
        (lambda m: TensorExporter({1: torch.zeros(3)}), "takes plain torch tensors by name: 1 is no name"),
        (lambda m: TensorExporter({"a": torch.eye(3).to_sparse()}), "'a' is torch.sparse_coo"),
        (
            lambda m: TensorExporter.of_module(torch.optim.AdamW(m.parameters())),
            "got AdamW, expected a torch.nn.Module",
        ),
        (lambda m: MegasyncCallback(m, MemorySink()), "wrap the weights in one"),
        (lambda m: MegasyncCallback(TensorExporter.of_module(m), "/tmp/x"), r"got str for its sink: use open_sink"),
        (
            lambda m: MegasyncCallback(TensorExporter.of_module(m), MemorySink(), {}),
            "config is {}, expected PublishConfig",
        ),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[torch.nn.Module], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make(network(0))


def test_starts_one_after_the_other_leave_no_thread() -> None:
    module = network(0)
    callback = MegasyncCallback(TensorExporter.of_module(module), MemorySink(), RUN)
    before = threading.active_count()
    for _ in range(5):
        callback.on_train_start()
    assert threading.active_count() == before + 2  # that publishes, and that compares
    callback.on_train_end()
    assert threading.active_count() == before


def test_groups_of_failed_starts_and_of_closed_publishers_are_given_back(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        groups = len(dist.distributed_c10d._world.pg_map)
        sink = FaultySink(MemorySink())
        for _ in range(3):
            callback = started(sink, network(0))
            assert len(dist.distributed_c10d._world.pg_map) == groups + 2
            callback.close()
            assert len(dist.distributed_c10d._world.pg_map) == groups
        sink.add(Fault("read_head", times=3, error=lambda o, k: OSError("out of order")))
        for _ in range(3):
            with pytest.raises(RankFailedError, match="out of order"):
                started(sink, network(0))
            assert len(dist.distributed_c10d._world.pg_map) == groups
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("first", "second", "told"), [(b"k" * 32, b"", "is signed"), (b"", b"k" * 32, "is not signed")]
)
def test_a_run_is_signed_or_not_and_who_is_refused_fences_nobody_off(first: bytes, second: bytes, told: str) -> None:
    sink = MemorySink()
    tensors = {"w": torch.zeros(64)}
    rightful = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(sign_key=first, max_first_density=1.0))
    rightful.on_train_start()
    other = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(sign_key=second, max_first_density=1.0))
    with pytest.raises((ValueError, RankFailedError), match=told):
        other.on_train_start()
    tensors["w"][3] = 7.0
    assert rightful.step_end() == 1
    rightful.on_train_end()
    assert rightful.outcomes[-1].durable
