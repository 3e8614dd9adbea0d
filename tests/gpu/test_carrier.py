"""The NCCL carrier between two GPUs, beside a trainer that uses NCCL itself: a payload and a step never wait for each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import GatherKind, PublishConfig, SnapshotPlace
from megasync.errors import RankFailedError
from megasync.sinks.local import LocalSink
from megasync.trainer import carrier as carriers
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.carrier import MESSAGE_NBYTES, NcclCarrier
from megasync.trainer.gather import place, receive, send
from megasync.trainer.groups import Groups, make_groups
from megasync.versions.publication import PublicationReader
from tests.distributed.harness import run_ranks
from tests.unit.test_publish_alone import assert_same, copy, rebuild

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CONFIG = PublishConfig(run="carried", gather=GatherKind.NCCL, snapshot=SnapshotPlace.DEVICE, timeout_s=30)
BACKEND = "cpu:gloo,cuda:nccl"


def started(rank: int, config: PublishConfig, connections: str = "") -> tuple[Groups, torch.Tensor]:
    """The groups of a rank, and a tensor for the trainer's own collectives, whose communicator is there."""
    if connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    torch.cuda.set_device(rank)
    gradient = torch.ones(1 << 20, device=f"cuda:{rank}")
    dist.all_reduce(gradient)
    torch.cuda.synchronize()
    groups = make_groups(config, None)
    assert groups is not None
    return groups, gradient


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start work on a thread, as the publisher does; the result, or what was raised, when called."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as e:
            found.append(e)

    thread = Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(90)
        assert found, "the payload never came"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return result


def payload_of(rank: int, nbytes: int) -> bytes:
    return np.random.default_rng(rank).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def crossed_rank(rank: int, world: int, connections: str) -> list[bool]:
    """The writer waits for a payload when its trainer queues a collective; the owner has queued that collective before it sends."""
    groups, gradient = started(rank, CONFIG, connections)
    assert isinstance(groups.carrier, NcclCarrier)
    carrier = groups.carrier
    equal = []
    for nbytes in (1, 3 * MESSAGE_NBYTES + 12_345, MESSAGE_NBYTES, 1_000_003):
        sizes = np.array([7, nbytes], dtype=np.int64)
        placement = place(sizes, 1)
        dist.barrier(groups.control)
        own = [payload_of(rank, int(sizes[rank]))]
        if rank == 0:
            got = beside(lambda p=placement, s=sizes, o=own: b"".join(map(bytes, receive(carrier, p, 0, s, o))))
            time.sleep(0.3)  # until it waits
        for _ in range(50):
            gradient.mul_(0.5)
            dist.all_reduce(gradient)
        if rank == 1:
            time.sleep(0.6)  # the queued steps stand by now
            got = beside(lambda p=placement, o=own: send(carrier, p, o))
        found = got()
        torch.cuda.synchronize()
        equal.append(rank == 1 or found == payload_of(0, 7) + payload_of(1, nbytes))
    assert float(gradient.min()) == float(gradient.max()) == 2.0
    groups.close()
    return equal


@pytest.mark.parametrize("connections", ["", "1"])
def test_a_payload_and_the_trainers_collectives_do_not_wait_for_each_other(tmp_path: Path, connections: str) -> None:
    assert run_ranks(crossed_rank, 2, tmp_path, connections, backend=BACKEND, timeout_s=120) == [[True] * 4] * 2


def silent_rank(rank: int, world: int, tell: bool) -> str:
    """The owner never sends, or it says that it is there and launches nothing."""
    groups, gradient = started(rank, replace(CONFIG, timeout_s=5))
    assert isinstance(groups.carrier, NcclCarrier)
    assert groups.rounds is not None
    sizes = np.array([0, 1000], dtype=np.int64)
    error = ""
    if rank == 0:
        got = beside(lambda: list(receive(groups.carrier, place(sizes, 1), 0, sizes, [])))
    elif tell:
        token = torch.zeros(1, dtype=torch.uint8)
        carriers.receive_from(groups.rounds, token, 0, "a test", 5)
        carriers.send_to(groups.rounds, token, 0, "a test", 5)
    if rank == 0:
        try:
            got()
        except RankFailedError as e:
            error = str(e)
    dist.barrier(groups.control)
    for _ in range(20):  # the trainer of the rank that waited goes on
        gradient.mul_(0.5)
        dist.all_reduce(gradient)
    torch.cuda.synchronize()
    assert float(gradient.min()) == float(gradient.max()) == 2.0
    return error


@pytest.mark.parametrize("tell", [False, True])
def test_an_owner_that_does_not_send_is_named_and_the_trainer_goes_on(tmp_path: Path, tell: bool) -> None:
    error, _ = run_ranks(silent_rank, 2, tmp_path, tell, backend=BACKEND, timeout_s=120)
    why = "NCCL did not end a message within 5 s" if tell else "did not answer within 5 s"
    assert f"receiving the payload of rank 1 failed on 1 rank(s): rank 1: {why}" in error


def alone_rank(rank: int, world: int) -> tuple[float, float, str]:
    """One rank closes long before the other; then one cannot connect and the other waits for it: seconds of either."""
    groups, _ = started(rank, replace(CONFIG, timeout_s=5))
    dist.barrier(groups.control)
    time.sleep(3 * rank)
    begin = time.monotonic()
    groups.close()
    closed_s = time.monotonic() - begin
    if rank:
        NcclCarrier.__init__ = _cannot  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(RankFailedError) as raised:
        make_groups(replace(CONFIG, timeout_s=5), None)
    failed_s = time.monotonic() - begin
    return closed_s, failed_s, str(raised.value)


def _cannot(self: NcclCarrier, *given: object) -> None:
    raise torch.OutOfMemoryError("planned")


def test_ranks_close_alone_and_none_waits_for_one_that_cannot_connect(tmp_path: Path) -> None:
    for closed_s, failed_s, error in run_ranks(alone_rank, 2, tmp_path, backend=BACKEND, timeout_s=120):
        assert closed_s < 2
        assert failed_s < 15
        assert "rank 1: OutOfMemoryError: planned" in error


def publish_rank(rank: int, world: int, folder: str) -> list[bool]:
    torch.cuda.set_device(rank)
    weights = {f"layers.{i}.w": torch.zeros(512, 1024, dtype=torch.bfloat16, device="cuda") for i in range(4)}
    gradient = torch.ones(1 << 20, device="cuda")
    callback = MegasyncCallback(TensorExporter(weights), LocalSink(Path(folder)), replace(CONFIG, max_first_density=1))
    callback.on_train_start()
    for step in range(1, 9):
        for w in weights.values():
            w.view(-1)[step::97] += step
        for _ in range(10):
            gradient.mul_(0.5)
            dist.all_reduce(gradient)
        callback.step_end()
    callback.on_train_end()
    if rank == 0:
        reader = PublicationReader(LocalSink(Path(folder)), "carried")
        newest = reader.newest()
        assert newest is not None
        assert newest.version == 8
        assert_same(rebuild(reader, newest), copy({name: w.cpu() for name, w in weights.items()}))
    return [o.durable for o in callback.outcomes]


def test_a_trainer_publishes_over_nccl(tmp_path: Path) -> None:
    (tmp_path / "sink").mkdir()
    run = run_ranks(publish_rank, 2, tmp_path, str(tmp_path / "sink"), backend=BACKEND, timeout_s=120)
    assert run == [[True] * 9] * 2
