"""Ranks that part ways: other settings, a step end that one leaves out, one that never comes; each is named, soon."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import PublishConfig
from megasync.errors import RankFailedError
from megasync.sinks.local import LocalSink
from megasync.trainer.agree import agree
from megasync.trainer.callback import MegasyncCallback
from tests.distributed.harness import collect_ranks, preload, run_ranks

preload("megasync.trainer.callback", "megasync.adapters.torch_trainer", "megasync.sinks.local")


def _callback(folder: str, **more: Any) -> tuple[MegasyncCallback, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(64, 64), "layers.0.w": torch.randn(40, 33)}
    config = PublishConfig(**({"timeout_s": 10, "max_first_density": 1} | more))
    return MegasyncCallback(TensorExporter(tensors), LocalSink(Path(folder)), config), tensors


def _other_settings(rank: int, world_size: int, folder: str, more: dict[str, Any]) -> str:
    callback, _ = _callback(folder, **(more if rank else {}))
    with pytest.raises(RankFailedError) as caught:
        callback.on_train_start()
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"run": "b"}, "rank 1: run is b, rank 0 has run: give every rank the same settings"),
        ({"every": 2, "sign_key": b"k"}, "rank 1: every is 2, rank 0 has 1; another sign_key: give every rank"),
    ],
)
def test_other_settings_are_named_at_the_start(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    told = run_ranks(_other_settings, 2, tmp_path, str(tmp_path / "sink"), more)
    assert told[0] == told[1]
    assert words in told[0]


def _leave_out(rank: int, world_size: int, folder: str, skipped: bool) -> str:
    callback, tensors = _callback(folder)
    callback.on_train_start()

    def train() -> None:
        for step in range(3):
            tensors["a"][step] += 1
            if rank == 0 or skipped or step != 1:
                callback.step_end(skipped=skipped and rank == 1 and step == 1)
        callback.flush()

    with pytest.raises(RankFailedError) as caught:
        train()
    callback.close()
    return str(caught.value)


def test_a_rank_that_leaves_out_a_step_end_is_named(tmp_path: Path) -> None:
    told = run_ranks(_leave_out, 2, tmp_path, str(tmp_path / "sink"), False)
    assert told[0] == told[1]
    assert "rank 1: has counted 2 steps (0 of them skipped), newest version 2, rank 0 counted 3 steps" in told[0]
    assert "every rank must call step_end() after every step" in told[0]


def test_a_step_that_only_one_rank_calls_skipped_is_named(tmp_path: Path) -> None:
    told = run_ranks(_leave_out, 2, tmp_path, str(tmp_path / "sink"), True)
    assert told[0] == told[1]
    assert "rank 1: has counted 2 steps (1 of them skipped), newest version 1, rank 0 counted 2 steps (0" in told[0]


def _never_comes(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    if rank == 1:
        return "", 0.0
    callback, _ = _callback(folder, timeout_s=1.5)
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        callback.on_train_start()
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_ends_before_the_start_is_named_within_the_timeout(tmp_path: Path) -> None:
    outcomes = collect_ranks(_never_comes, 3, tmp_path, str(tmp_path / "sink"))
    assert [o.error for o in outcomes] == ["", "", ""]
    for outcome in (outcomes[0], outcomes[2]):
        text, took_s = outcome.value
        assert "starting a publisher failed on 1 rank(s): rank 1: did not come to the start within 1.5 s" in text
        assert took_s < 10


def _comes_late(rank: int, world_size: int, folder: str, how: str) -> tuple[str, float, int]:
    """Rank 1 comes when rank 0 has given up, or fails before the start once; whoever failed tries again."""
    callback, tensors = _callback(folder, timeout_s=1.5)
    world, text = dist.group.WORLD, ""
    assert world is not None
    store = world.get_group_store()
    if rank == 0:
        with pytest.raises(RankFailedError) as caught:
            callback.on_train_start()
        text = str(caught.value)
        store.set("given up", "yes")
    elif how == "late":
        store.wait(["given up"], timedelta(seconds=20))
    if how == "missed":
        dist.barrier()
    callback.config = replace(callback.config, timeout_s=20)
    begin = time.monotonic()
    callback.on_train_start()
    took_s = time.monotonic() - begin
    tensors["a"][0] += 1
    callback.step_end()
    callback.on_train_end()
    return text, took_s, callback.version


@pytest.mark.parametrize("how", ["late", "missed"])
def test_a_rank_that_was_not_at_a_start_meets_the_others_at_the_next(tmp_path: Path, how: str) -> None:
    found = run_ranks(_comes_late, 2, tmp_path, str(tmp_path / "sink"), how)
    assert "starting a publisher failed on 1 rank(s): rank 1: did not come to the start within 1.5 s" in found[0][0]
    for _, took_s, version in found:
        assert took_s < 15
        assert version == 1


def _gives_up(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 comes in the moment in which rank 0 has written its verdict and told nobody yet."""
    callback, _ = _callback(folder, timeout_s=1.5)
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    if rank == 0:
        compare_set = type(store).compare_set

        def slowly(self: Any, key: str, expected: str, value: str) -> Any:
            found = compare_set(self, key, expected, value)
            store.set("written", "yes")
            store.wait(["came"], timedelta(seconds=20))
            return found

        type(store).compare_set = slowly
    else:
        store.wait(["written"], timedelta(seconds=20))

        def came(self: Any, key: str, expected: str, value: str) -> Any:
            found = compare_set_of(self, key, expected, value)
            store.set("came", "yes")
            return found

        compare_set_of = type(store).compare_set
        type(store).compare_set = came
    with pytest.raises(RankFailedError) as caught:
        callback.on_train_start()
    return str(caught.value)


def test_a_start_has_one_verdict(tmp_path: Path) -> None:
    why = "starting a publisher failed on 1 rank(s): rank 1: did not come to the start within 1.5 s"
    for text in run_ranks(_gives_up, 2, tmp_path, str(tmp_path / "sink")):
        assert why in text


def _old_store(rank: int, world_size: int, folder: str) -> float:
    """A TCPStore without libuv wakes nobody where a value is put by comparison."""
    meeting = dist.FileStore(f"{folder}/meeting", world_size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False, use_libuv=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), world_size, False, use_libuv=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    callback, _ = _callback(f"{folder}/sink", timeout_s=20)
    if rank == 1:
        time.sleep(0.3)  # rank 0 waits by then
    begin = time.monotonic()
    callback.on_train_start()
    took_s = time.monotonic() - begin
    callback.close()
    dist.barrier()
    return took_s


def test_a_start_is_quick_at_a_store_without_libuv(tmp_path: Path) -> None:
    assert max(run_ranks(_old_store, 2, tmp_path, str(tmp_path), backend="")) < 15


def _unmade(rank: int, world_size: int, folder: str) -> str:
    """One rank cannot make its exporter: the others must not wait for it."""

    def make(model: list[Any]) -> TensorExporter:
        if rank == 1:
            raise MemoryError("no room for buffers")
        return TensorExporter({"a": torch.zeros(3)})

    class Context:
        model = torch.nn.Linear(1, 1)

    callback = MegasyncCallback(make, LocalSink(Path(folder)), PublishConfig(timeout_s=10))
    with pytest.raises(RankFailedError) as caught:
        callback.on_train_start(Context())
    return str(caught.value)


def test_an_exporter_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    told = run_ranks(_unmade, 2, tmp_path, str(tmp_path / "sink"))
    assert told[0] == told[1]
    assert "making the exporter failed on 1 rank(s): rank 1: MemoryError: no room for buffers" in told[0]


def _many_starts(rank: int, world_size: int, folder: str) -> tuple[int, int, int]:
    """Threads of the process before, after starts that were closed and starts that failed, and versions."""
    callback, tensors = _callback(folder)
    callback.on_train_start()
    callback.close()
    before = sum(1 for _ in Path("/proc/self/task").iterdir())
    for step in range(3):
        callback.on_train_start()
        tensors["a"][step] += 1
        callback.step_end()
        callback.on_train_end()
        other, _ = _callback(folder, run="b" if rank else "a")
        with pytest.raises(RankFailedError, match="run is b"):
            other.on_train_start()
    after = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return before, after, callback.outcomes[-1].version


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads in /proc")
def test_case_68_starts_give_back_their_groups_and_threads(tmp_path: Path) -> None:
    for before, after, version in run_ranks(_many_starts, 2, tmp_path, str(tmp_path / "sink")):
        assert after <= before
        assert version == 3


def _store_dies(rank: int, world_size: int, folder: str) -> str:
    """Rank 0 holds the store and is killed between two step ends."""
    meeting = dist.FileStore(f"{folder}/meeting", world_size)
    store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), world_size, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    callback, tensors = _callback(f"{folder}/sink", timeout_s=5)
    callback.on_train_start()
    callback.flush()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for step in range(20):
            tensors["a"][step] += 1
            callback.step_end()
        callback.flush()

    with pytest.raises(RankFailedError) as caught:
        train()
    assert caught.value.causes == {}
    callback.close()
    return str(caught.value)


def test_where_the_store_is_gone_no_rank_is_named_but_the_store(tmp_path: Path) -> None:
    dead, *others = collect_ranks(_store_dies, 3, tmp_path, str(tmp_path), backend="")
    assert "exit code -9" in dead.error
    for outcome in others:
        assert outcome.error == ""
        assert "failed: the store of torch.distributed does not answer" in outcome.value
        assert "usually that of rank 0" in outcome.value
        assert "on 1 rank(s)" not in outcome.value


def test_an_error_that_names_no_rank_is_passed_on_all_the_same() -> None:
    with pytest.raises(
        RankFailedError, match=r"an outer step failed on 1 rank.*the inner one failed: the store is gone"
    ):
        agree(None, RankFailedError("the inner one", {}, "the store is gone"), "an outer step")
