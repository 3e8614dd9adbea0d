"""The NCCL carrier's order between real ranks on the CPU: gloo carries what NCCL would, begun on threads of its own.

What a GPU adds (streams, collectives beside it) is in tests/gpu/test_carrier.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megasync.config import GatherKind, OnError, PublishConfig
from megasync.errors import RankFailedError, RetryError
from megasync.sinks.local import LocalSink
from megasync.trainer import callback as callbacks
from megasync.trainer import carrier as carriers
from megasync.trainer import gather
from megasync.trainer import groups as group_makers
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.carrier import GlooCarrier, MessageBuffers, NcclCarrier
from megasync.trainer.gather import place, receive, send, writers_of
from megasync.trainer.groups import Groups
from megasync.versions.publication import PublicationReader
from tests.distributed.harness import run_ranks
from tests.distributed.test_publish import ShardedExporter, full_model
from tests.unit.test_publish_alone import rebuild

MESSAGE = 1 << 16


class Launched:
    """A message under way, on a thread; like NCCL's work it can be looked at, and never ends while ``lost``."""

    def __init__(self, begin: Any, *, lost: bool) -> None:
        self._error: RuntimeError | None = None
        self._thread = None if lost else Thread(target=self._run, args=(begin,), daemon=True)
        if self._thread is not None:
            self._thread.start()

    def _run(self, begin: Any) -> None:
        try:
            begin().wait()
        except RuntimeError as e:
            self._error = e

    def is_completed(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class Nccl:
    """torch.distributed as a carrier sees it, with a gloo group in the place of the NCCL one."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.log: list[tuple[Any, ...]] = []
        self.lose = self.aborted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, tensor: torch.Tensor, *, group: Any, group_dst: int) -> Any:
        return self._begin("send", dist.isend, tensor, group, group_dst=group_dst)

    def irecv(self, tensor: torch.Tensor, *, group: Any, group_src: int) -> Any:
        return self._begin("receive", dist.irecv, tensor, group, group_src=group_src)

    def P2POp(self, call: Any, tensor: torch.Tensor, *, group: Any, group_peer: int) -> Any:
        peer = "group_dst" if call == self.isend else "group_src"
        return lambda: call(tensor, group=group, **{peer: group_peer})

    def batch_isend_irecv(self, ends: list[Any]) -> list[Any]:
        return [end() for end in ends]

    def _begin(self, what: str, call: Any, tensor: torch.Tensor, group: Any, **peer: int) -> Any:
        if group is not self.group:
            return call(tensor, group=group, **peer)
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        self.log.append((what, *peer.values()))
        return Launched(lambda: call(tensor, group=group, **peer), lost=self.lose)


def make_carrier(num_writers: int, timeout_s: float) -> tuple[Groups, NcclCarrier, Nccl]:
    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def synchronize(self) -> None:
            pass

    vars(torch.cuda).update(Stream=Stream, stream=nullcontext, device=nullcontext)
    for module in (gather, carriers):
        vars(module).update(MESSAGE_NBYTES=MESSAGE)
    control, rounds, nccl = dist.new_group(backend="gloo"), dist.new_group(backend="gloo"), Nccl()
    vars(carriers).update(dist=nccl)
    writers = writers_of(dist.get_world_size(), num_writers)
    carrier = NcclCarrier(nccl.group, rounds, torch.device("cpu"), timeout_s)
    carrier.connect(writers)
    return Groups(control, rounds, carrier), carrier, nccl


def bytes_of(rank: int, nbytes: int) -> bytes:
    return np.random.default_rng(rank).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def payload_rank(rank: int, world: int, sizes: list[int], num_writers: int) -> bool:
    _, carrier, _ = make_carrier(num_writers, 20)
    placement = place(np.array(sizes), num_writers)
    own = [bytes_of(rank, sizes[rank])]
    send(carrier, placement, own)
    equal = True
    for i, writer in enumerate(placement.writer_of):
        if writer == rank:
            got = b"".join(map(bytes, receive(carrier, placement, i, np.array(sizes), own)))
            equal &= got == b"".join(bytes_of(r, sizes[r]) for r in placement.owners(i))
    return equal


@pytest.mark.parametrize("sizes", [[9, 3 * MESSAGE + 7, MESSAGE], [0, 1, MESSAGE - 1], [50, 0, 5 * MESSAGE]])
@pytest.mark.parametrize("num_writers", [1, 2, 3])
def test_payloads_arrive_in_order(tmp_path: Path, sizes: list[int], num_writers: int) -> None:
    assert run_ranks(payload_rank, 3, tmp_path, sizes, num_writers) == [True] * 3


def kept_rank(rank: int, world: int) -> bool:
    vars(gather).update(MESSAGE_NBYTES=MESSAGE)
    group = dist.group.WORLD
    assert group is not None
    sizes = [9, 3 * MESSAGE + 7, MESSAGE]
    carrier, placement, own = GlooCarrier(group, 20), place(np.array(sizes), 1), [bytes_of(rank, sizes[rank])]
    send(carrier, placement, own)
    if rank:
        return True
    kept = list(receive(carrier, placement, 0, np.array(sizes), own))  # as an object store's sink does
    return b"".join(kept) == b"".join(bytes_of(r, sizes[r]) for r in range(world))


def test_parts_stay_as_they_are_until_the_sink_is_done(tmp_path: Path) -> None:
    assert run_ranks(kept_rank, 3, tmp_path) == [True] * 3


def test_messages_that_are_kept_take_no_more_than_they_must() -> None:
    buffers = MessageBuffers()
    first = buffers.take(100)
    assert buffers.take(7) is first  # nobody has a view of it
    kept = [memoryview(first)[:100], *(memoryview(buffers.take(100)) for _ in range(20))]
    assert sum(len(view.obj) for view in kept) == 3 * carriers.MESSAGE_NBYTES + 18 * 100  # type: ignore[arg-type]
    assert len({id(view.obj) for view in kept}) == 21
    del kept
    assert buffers.take(100) is first


def early_rank(rank: int, world: int, first: int) -> bool:
    groups, carrier, nccl = make_carrier(1, 20)
    sizes = np.array([0, 100])
    placement = place(sizes, 1)

    def work() -> None:
        if rank:
            send(carrier, placement, [bytes_of(1, 100)])
        else:
            assert b"".join(map(bytes, receive(carrier, placement, 0, sizes, []))) == bytes_of(1, 100)

    thread = Thread(target=work)
    nccl.log.clear()
    if rank == first:
        thread.start()
        thread.join(0.2)
    launched = len(nccl.log)
    dist.barrier(groups.control)  # the other comes only now
    if rank != first:
        thread.start()
    thread.join(20)
    return launched == 0 and len(nccl.log) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_neither_launches_before_the_other_is_there(tmp_path: Path, first: int) -> None:
    assert run_ranks(early_rank, 2, tmp_path, first) == [True, True]


class BreakingSink(LocalSink):
    """Payloads fail after some parts, at their first attempts."""

    def __init__(self, folder: Path, error: type[Exception], times: int, parts: int) -> None:
        super().__init__(folder)
        self.error, self.times, self.parts = error, times, parts

    def create(self, key: str, parts: Any, *, timeout_s: float = 60.0) -> int:
        if "v000000000001/" in key and "payload" in key and self.times:
            self.times -= 1
            some = iter(parts)
            for _ in range(self.parts):
                next(some, None)
            raise self.error("the place broke in the middle")
        return super().create(key, parts, timeout_s=timeout_s)


def publish_rank(rank: int, world: int, folder: str, error: type[Exception], times: int, parts: int) -> list[bool]:
    vars(callbacks).update(make_groups=lambda config, ranks: make_carrier(config.num_writers, config.timeout_s)[0])
    config = PublishConfig(num_writers=2, timeout_s=20, on_error=OnError.RETRY, max_first_density=1)
    exporter = ShardedExporter(world, rank)
    sink = BreakingSink(Path(folder), error, times if rank == 0 else 0, parts)
    callback = MegasyncCallback(exporter, sink, config)
    callback.on_train_start()
    for step in (1, 2, 3):
        exporter.load(step)
        callback.step_end()
    callback.on_train_end()
    return [o.durable for o in callback.outcomes]


@pytest.mark.parametrize(("error", "times"), [(RetryError, 1), (RetryError, 3), (ValueError, 1)])
@pytest.mark.parametrize("parts", [0, 3])
def test_a_sink_that_breaks_in_the_middle_leaves_ranks_in_step(
    tmp_path: Path, error: type[Exception], times: int, parts: int
) -> None:
    (tmp_path / "sink").mkdir()
    found = run_ranks(publish_rank, 3, tmp_path, str(tmp_path / "sink"), error, times, parts)
    assert found[0] == found[1] == found[2]
    assert all(found[0]) == (error is RetryError)
    reader = PublicationReader(LocalSink(tmp_path / "sink"), "run")
    newest = reader.newest()
    assert newest is not None
    want = full_model(3)
    got = rebuild(reader, newest)
    assert {n: bytes(np.ascontiguousarray(a).view(np.uint8)) for n, a in got.items()} == {
        n: bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) for n, t in want.items()
    }


def caught(work: Callable[[], object]) -> str:
    try:
        work()
    except RankFailedError as e:
        return str(e)
    except Exception as e:
        return f"{type(e).__name__}, no RankFailedError: {e}"
    return ""


def lost_rank(rank: int, world: int) -> tuple[str, str]:
    groups, carrier, nccl = make_carrier(1, 1.5)
    nccl.lose = True
    sizes = np.array([0, 100])
    placement = place(sizes, 1)

    def once() -> None:
        if rank:
            send(carrier, placement, [bytes_of(1, 100)])
        else:
            list(receive(carrier, placement, 0, sizes, []))

    first = caught(once)
    nccl.aborted = True  # gloo's own abort tells nothing
    dist.barrier(groups.control)
    return first, caught(once)


def test_a_message_that_does_not_end_names_the_other_rank_also_the_next_time(tmp_path: Path) -> None:
    for rank, (first, second) in enumerate(run_ranks(lost_rank, 2, tmp_path)):
        assert f"rank {1 - rank}: NCCL did not end a message within 1.5 s" in first
        assert f"rank {1 - rank}: " in second
        assert "no RankFailedError" not in second


def gone_rank(rank: int, world: int) -> str:
    """The writer closes its iterator in the middle: the owner is not kept for ever."""
    groups, carrier, _ = make_carrier(1, 0.5)
    sizes = np.array([0, 3 * MESSAGE])
    placement = place(sizes, 1)
    error = ""
    if rank:
        error = caught(lambda: send(carrier, placement, [bytes_of(1, 3 * MESSAGE)]))
    else:
        got = receive(carrier, placement, 0, sizes, [])
        assert bytes(next(got)) == bytes_of(1, 3 * MESSAGE)[:MESSAGE]
        got.close()  # type: ignore[attr-defined]
    dist.barrier(groups.control)
    return error


def test_a_writer_that_stops_reading_is_named(tmp_path: Path) -> None:
    error = run_ranks(gone_rank, 2, tmp_path)[1]
    assert "sending a payload to rank 0 failed on 1 rank(s): rank 0: did not answer within" in error


def poor_rank(rank: int, world: int) -> tuple[str, int]:
    """``make_groups`` for NCCL, which gloo plays, where rank 1 has no memory for its messages."""
    _, _, nccl = make_carrier(1, 20)
    made = len(dist.distributed_c10d._world.pg_map)

    class Torch:
        ProcessGroupNCCL = SimpleNamespace(Options=lambda **given: SimpleNamespace())

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def is_nccl_available(self) -> bool:
            return True

        def new_group(self, ranks: Any = None, *, backend: str, **given: Any) -> Any:
            found = dist.new_group(ranks, backend="gloo")
            if backend == "nccl":
                nccl.group = found
            return found

    zeros = torch.zeros

    def take(*sizes: int, device: Any = None, **given: Any) -> torch.Tensor:
        if device is not None and rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 16.00 MiB")
        return zeros(*sizes, **given)

    vars(group_makers).update(dist=Torch())
    vars(torch.cuda).update(is_available=lambda: True, current_device=lambda: 0)
    vars(torch).update(zeros=take)
    error = caught(lambda: group_makers.make_groups(PublishConfig(gather=GatherKind.NCCL, timeout_s=20), None))
    return error, len(dist.distributed_c10d._world.pg_map) - made


def test_a_rank_without_device_memory_is_named_on_all_and_no_group_is_left(tmp_path: Path) -> None:
    why = "taking device memory for gather=nccl failed on 1 rank(s): rank 1: OutOfMemoryError: CUDA out of memory"
    for error, left in run_ranks(poor_rank, 3, tmp_path):
        assert why in error
        assert left == 0
