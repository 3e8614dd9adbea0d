"""Agreement of ranks over real gloo groups: errors, byte strings, ranks that never come or are at another step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megasync.errors import PlanError, RankFailedError
from megasync.trainer import agree as agreement
from megasync.trainer import agree_wait
from megasync.trainer.agree import agree, all_gather_bytes, broadcast_bytes, gather_bytes
from tests.distributed.harness import collect_ranks, preload, run_ranks

preload("megasync.trainer.agree")


def _failing(rank: int, world_size: int, bad: list[int]) -> tuple[dict[int, str], str, str]:
    group = dist.group.WORLD
    agree(group, None, "warm-up", 20.0)
    error: PlanError | None = None
    if rank in bad:
        try:
            raise PlanError(f"no table maps weight {rank}")
        except PlanError as e:
            error = e
    try:
        agree(group, error, "export", 20.0)
    except RankFailedError as e:
        outer = e
    else:
        raise AssertionError("no rank raised")
    assert outer.__cause__ is error
    # An agreed error passes through an outer agreement with its first causes.
    with pytest.raises(RankFailedError) as again:
        agree(group, outer if rank == bad[0] else None, "plan", 20.0)
    assert again.value.causes == outer.causes
    agree(group, None, "still in step", 20.0)
    return outer.causes, str(outer), type(outer.__cause__).__name__


@pytest.mark.parametrize(("world_size", "bad"), [(2, [1]), (4, [0, 3])])
def test_an_error_on_some_ranks_is_raised_on_all(world_size: int, bad: list[int], tmp_path: Path) -> None:
    results = run_ranks(_failing, world_size, tmp_path, bad)
    for rank, (causes, text, cause) in enumerate(results):
        assert causes == {r: f"PlanError: no table maps weight {r}" for r in bad}
        assert text.startswith(f"export failed on {len(bad)} rank(s): rank {bad[0]}: PlanError")
        assert cause == ("PlanError" if rank in bad else "NoneType")


def _exchanging(rank: int, world_size: int, chunk: int) -> None:
    agreement._CHUNK_NBYTES = chunk  # small, so that several messages and a full window occur
    group = dist.group.WORLD
    wanted = [bytes([r]) * (r * 37 % 101) for r in range(world_size)]
    wanted[1] = b""
    assert all_gather_bytes(group, wanted[rank], "all", 20.0) == wanted
    assert all_gather_bytes(group, memoryview(bytearray(wanted[rank])), "all", 20.0) == wanted
    for dst in (0, world_size - 1):
        found = gather_bytes(group, wanted[rank], "one", 20.0, dst=dst)
        assert found == (wanted if rank == dst else None)
    for src in range(world_size):
        assert broadcast_bytes(group, wanted[src] if rank == src else None, "out", 20.0, src=src) == wanted[src]
    assert all(len(v) == 0 for v in all_gather_bytes(group, b"", "nothing", 20.0))


@pytest.mark.parametrize(("world_size", "chunk"), [(2, 1 << 20), (4, 10)])
def test_byte_strings_of_uneven_size(world_size: int, chunk: int, tmp_path: Path) -> None:
    run_ranks(_exchanging, world_size, tmp_path, chunk)


def _absent(rank: int, world_size: int, absent: int, gone: str) -> tuple[dict[int, str], float]:
    agree_wait.SLOW_S = 0.2
    group = dist.group.WORLD
    agree(group, None, "warm-up", 20.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == absent:
        if gone == "dead":
            return {}, 0.0
        store.wait([f"done {r}" for r in range(world_size) if r != absent])
        return {}, 0.0
    if rank == world_size - 1:
        threading.Event().wait(0.4)  # comes late: the others must not take it for the missing one
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        agree(group, None, "publish", 0.6)
    store.set(f"done {rank}", "")
    return caught.value.causes, time.monotonic() - start


@pytest.mark.parametrize("absent", [0, 1])
def test_case_88_a_rank_that_never_comes_is_named_on_every_rank(absent: int, tmp_path: Path) -> None:
    results = run_ranks(_absent, 4, tmp_path, absent, "hangs")
    for rank, (causes, seconds) in enumerate(results):
        if rank != absent:
            assert list(causes) == [absent]
            assert "did not answer within 0.6 s" in causes[absent]
            assert seconds < 8.0


def test_case_88_a_rank_that_died_is_named(tmp_path: Path) -> None:
    for o in collect_ranks(_absent, 3, tmp_path, 1, "dead"):
        assert not o.error
        assert list(o.value[0]) == ([] if o.rank == 1 else [1])


def _out_of_step(rank: int, world_size: int) -> dict[int, str]:
    group = dist.group.WORLD
    with pytest.raises(RankFailedError) as caught:
        all_gather_bytes(group, b"x", "gather" if rank == 1 else "plan", 10.0)
    return caught.value.causes


def test_ranks_at_different_steps_are_named(tmp_path: Path) -> None:
    for causes in run_ranks(_out_of_step, 3, tmp_path):
        assert causes == {1: "is at another step than rank 0"}


def _none_in_a_world(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="pass a group"):
        agree(None, None, "x")


def test_no_group_in_a_world_of_several_is_refused(tmp_path: Path) -> None:
    run_ranks(_none_in_a_world, 2, tmp_path)


def test_alone_without_torch_distributed() -> None:
    agree(None, None, "x")
    with pytest.raises(RankFailedError, match="rank 0: PlanError: no") as caught:
        agree(None, PlanError("no"), "x")
    assert isinstance(caught.value.__cause__, PlanError)
    parts: list[Any] = [all_gather_bytes(None, b"ab", "x"), gather_bytes(None, b"ab", "x")]
    assert parts == [[b"ab"], [b"ab"]]
    assert broadcast_bytes(None, b"ab", "x") == b"ab"
