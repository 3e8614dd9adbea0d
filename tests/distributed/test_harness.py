"""The multi-rank runner itself: results by rank, failures with every traceback, deaths and hangs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RanksError, collect_ranks, run_ranks


def _sum_ranks(rank: int, world_size: int, start: torch.Tensor) -> tuple[int, torch.Tensor, int]:
    total = start + rank
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads()


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("only rank one")
    dist.barrier()


def _die(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _hang_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        threading.Event().wait()
    return rank


def test_results_come_by_rank_and_tensors_by_value(tmp_path: Path) -> None:
    for _ in range(2):  # one folder serves several runs
        results = run_ranks(_sum_ranks, 3, tmp_path, torch.tensor([10, 20]))
        assert [r[0] for r in results] == [0, 1, 2]
        assert all(r[1].tolist() == [33, 63] for r in results)
        assert all(r[2] == 1 for r in results)


def test_every_traceback_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(_fail_on_one, 2, tmp_path)
    text = str(caught.value)
    assert "KeyError: 'only rank one'" in text
    assert "--- rank 0 of 2 ---" in text
    assert "dist.barrier()" in text


def test_a_killed_rank_is_reported(tmp_path: Path) -> None:
    outcomes = collect_ranks(_die, 2, tmp_path, backend="")
    assert outcomes[0].value == 0
    assert not outcomes[0].error
    assert "exit code -9" in outcomes[1].error


def test_a_hanging_rank_shows_its_stack(tmp_path: Path) -> None:
    outcomes = collect_ranks(_hang_on_one, 2, tmp_path, timeout_s=2.0, backend="")
    assert outcomes[0].value == 0
    assert "still running at the deadline" in outcomes[1].error
    assert "_hang_on_one" in outcomes[1].error
