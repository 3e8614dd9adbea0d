"""The sink in one rank's memory, over real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megasync.errors import RankFailedError, RetryError, SinkConflictError
from megasync.sinks import contract, open_sink
from megasync.sinks.contract_place import Place
from megasync.sinks.process_group import ProcessGroupSink
from megasync.sinks.remote import RemoteSink
from tests.contract.s3_server import loopback
from tests.distributed.harness import preload, run_ranks

preload("megasync.sinks.process_group", "megasync.sinks.contract")


def _publish_and_read(rank: int, world_size: int) -> object:
    """Rank 1 keeps, rank 2 publishes, rank 0 receives; only their own order of events ties them together."""
    sink = open_sink("pg://?host_rank=1&num_versions=2")
    assert isinstance(sink, ProcessGroupSink)
    if rank == 2:
        for version in (1, 2, 3):
            sink.create(f"run/v{version}/manifest", [b"manifest %d" % version])
            sink.swap_head("run", None if version == 1 else b"%d" % (version - 1), b"%d" % version)
        with pytest.raises(SinkConflictError):
            sink.swap_head("run", b"2", b"4")
    dist.barrier()
    found = (sink.read_head("run"), list(sink.keys("run")), sink.read("run/v3/manifest"))
    outside = RemoteSink(sink.addresses, sink.secret)
    assert outside.read_head("run") == b"3"
    outside.close()
    dist.barrier()
    if rank == 1:
        sink.close()
    dist.barrier()
    if rank == 0:
        with pytest.raises(RetryError, match="alive and reachable"):
            sink.read_head("run", timeout_s=1.0)
    sink.close()
    return found


def test_case_84_three_ranks_share_one_sink(tmp_path: Path) -> None:
    found = run_ranks(_publish_and_read, 3, tmp_path)
    assert found == [(b"3", ["run/v2/manifest", "run/v3/manifest"], b"manifest 3")] * 3


def _contract(rank: int, world_size: int) -> int:
    checks: list[Callable[[Place], None]] = list(contract.CHECKS)
    for check in checks:
        sink = ProcessGroupSink(num_versions=None)
        if rank == 1:
            check(Place(lambda: sink, large_mib=20))  # noqa: B023
        dist.barrier()
        sink.close()
    return len(checks)


def test_contract_from_a_rank_that_does_not_keep_the_objects(tmp_path: Path) -> None:
    assert run_ranks(_contract, 2, tmp_path) == [len(contract.CHECKS)] * 2


def _wrong_start(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []
    for wrong, kind in (
        ({"host_rank": rank}, ValueError),
        ({"host_rank": 2}, ValueError),
        ({"max_nbytes": 0}, ValueError),
        ({"address": "192.0.2.77"}, RankFailedError),
    ):
        with pytest.raises(kind) as caught:
            ProcessGroupSink(**wrong)
        messages.append(str(caught.value))
    # After all that the group still works, here with one address given.
    reached = ProcessGroupSink(address=loopback(), timeout_s=5.0)
    assert reached.addresses[0][0] == loopback()
    dist.barrier()
    reached.close()
    return messages


def test_a_start_that_fails_fails_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_wrong_start, 2, tmp_path)
    assert first == second
    assert "name different keeping ranks: [0, 1]" in first[0]
    assert "the group has 2 ranks" in first[1]
    assert "max_nbytes" in first[2]
    assert "rank 0: cannot listen on host '192.0.2.77'" in first[3]
