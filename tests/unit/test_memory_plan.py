"""The memory plan: numbers by stage, room as the system tells it, and a refusal before anything is taken."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import GatherKind, PublishConfig, SnapshotPlace
from megasync.errors import MemoryPlanError
from megasync.sinks.memory import MemorySink
from megasync.trainer import memory_plan
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.carrier import MESSAGE_NBYTES
from megasync.trainer.memory_plan import MemoryPlan, MemoryRow, check_memory, plan_memory
from megasync.trainer.memory_room import device_room, host_name, host_room
from tests.gpu import trainer_cases as cases

GB = 10**9


def mount(root: Path, available_kib: int, groups: dict[str, tuple[str, int, int]], *, version: int = 2) -> Path:
    """A proc and sys of a process in ``/a/b``: group to limit, usage and page cache."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\nSwapFree: 0 kB\n")
    line = "0::/a/b\n" if version == 2 else "11:cpu,cpuacct:/x\n5:memory:/a/b\n"
    (root / "proc/self/cgroup").write_text(line)
    base = root / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    cached = "inactive_file" if version == 2 else "total_inactive_file"
    for group, (limit, used, cache) in groups.items():
        (base / group).mkdir(parents=True, exist_ok=True)
        (base / group / names[0]).write_text(limit + "\n")
        (base / group / names[1]).write_text(f"{used}\n")
        (base / group / "memory.stat").write_text(f"anon 5\n{cached} {cache}\n")
    return root


def test_room_is_the_least_of_what_the_host_and_every_group_above_leave(tmp_path: Path) -> None:
    assert host_room(mount(tmp_path / "free", 1000, {})) == 1000 << 10
    groups = {"a": ("9000000", 8_000_000, 500_000), "a/b": ("max", 8_000_000, 0)}
    assert host_room(mount(tmp_path / "v2", 10_000_000, groups)) == 1_500_000
    assert (
        host_room(mount(tmp_path / "v1", 10_000_000, groups | {"a/b": ("9223372036854771712", 1, 0)}, version=1))
        == 1_500_000
    )
    # Inside a container the mount itself is the group.
    assert host_room(mount(tmp_path / "inner", 10_000_000, {"": ("4000", 3000, 0)})) == 1000
    assert host_room(mount(tmp_path / "over", 10_000_000, {"": ("4000", 5000, 0)})) == 0
    assert host_room(tmp_path / "nothing") is None
    assert host_name(tmp_path / "nothing").endswith("/")


def test_room_of_this_machine() -> None:
    room = host_room()
    assert room is not None
    assert 0 < room < 1 << 50
    assert device_room(torch.device("cpu")) is None


def test_the_peak_adds_what_overlaps() -> None:
    plan = MemoryPlan(
        (
            MemoryRow("snapshot", "a", 100, 7, "always"),
            MemoryRow("seed", "b", 50, 0, "start"),
            MemoryRow("version 0", "c", 30, 1, "start"),
            MemoryRow("version 0", "d", 30, 0, "start"),
            MemoryRow("mask", "e", 20, 2, "running"),
            MemoryRow("gather", "f", 25, 3, "running"),
        )
    )
    assert (plan.host_nbytes, plan.device_nbytes) == (160, 12)
    assert "version 0 (start): c: host 0.00 MB" in plan.report()


@pytest.mark.parametrize("place", list(SnapshotPlace))
def test_rows_hold_what_is_owned(place: SnapshotPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    rank = cases.make_rank(parts=3, index=1)
    owned = sum(r.data.nbytes for r in rank.regions)
    config = PublishConfig(snapshot=place)

    def by_stage(device: str, *, anchor: bool) -> dict[str, tuple[int, int]]:
        plan = plan_memory(rank.schema, rank.regions, config, torch.device(device), anchor=anchor)
        return {r.stage: (r.host_nbytes, r.device_nbytes) for r in plan.rows}

    host = by_stage("cpu", anchor=True)
    assert host["snapshot"] == (owned, 0)
    assert host["version 0"][0] > owned
    assert all(device == 0 for _, device in host.values())
    gpu = by_stage("cuda", anchor=False)
    assert gpu["snapshot"] == ((owned, 0) if place is SnapshotPlace.HOST else (0, owned))
    assert "version 0" not in gpu
    assert gpu["mask"][0] > 2 * owned // 16
    assert gpu["mask"][1] > 0
    assert (host["gather"][0], gpu["gather"][1]) == (3 * MESSAGE_NBYTES, 0)
    kept = plan_memory(rank.schema, rank.regions, config, torch.device("cpu"), anchor=True, kept_ratio=0.5)
    extra = {(r.stage, r.when): r.host_nbytes for r in kept.rows if "this sink keeps" in r.what}
    total = sum(t.nbytes for t in rank.schema.tensors)
    words = sum(t.num_words for t in rank.schema.tensors)
    assert extra == {("version 0", "start"): total // 2, ("gather", "running"): int((2 * words + total) * 0.01 / 2)}
    config = replace(config, gather=GatherKind.NCCL)
    assert by_stage("cuda", anchor=False)["gather"] == (3 * MESSAGE_NBYTES, MESSAGE_NBYTES)


def test_case_63_a_plan_that_does_not_fit_is_refused_at_the_start_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megasync")
    tensors = {"w": torch.randn(500, 400)}
    monkeypatch.setattr(memory_plan, "host_room", lambda: 1_700_000)
    sink = MemorySink()
    config = PublishConfig(max_first_density=1)
    with pytest.raises(MemoryPlanError, match=r"has 1\.70 MB left, its 1 ranks plan \d+\.\d\d [MG]B"):
        MegasyncCallback(TensorExporter(tensors), sink, config).on_train_start()
    assert sink.read_head("run") is None
    told = [r.message for r in caplog.records if "memory plan of rank 0" in r.message]
    assert "snapshot (always): owned bytes, host: host 0.80 MB" in told[0]
    # Said all the same where the refusal is off.
    callback = MegasyncCallback(TensorExporter(tensors), sink, replace(config, check_memory=False))
    callback.on_train_start()
    callback.on_train_end()
    assert any("does not fit" in r.message and r.levelno == logging.WARNING for r in caplog.records)


def test_ranks_of_one_device_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [
        memory_plan._Needs("a/1", "gpu-0", 3 * GB, 2 * GB, 5 * GB, 3 * GB),
        memory_plan._Needs("a/1", "gpu-0", 3 * GB, 2 * GB, 6 * GB, 3 * GB),
        memory_plan._Needs("b/1", "gpu-0", 3 * GB, 2 * GB, 6 * GB, 3 * GB),
        memory_plan._Needs("c/1", "", 3 * GB, 0, -1, -1),
    ]
    faults = memory_plan._faults(needs)
    assert faults == [
        "host a has 5.00 GB left, its 2 ranks plan 6.00 GB",
        "the device of rank 0, 1 on a has 3.00 GB left, 4.00 GB are planned",
    ]
    plan = MemoryPlan((MemoryRow("snapshot", "x", 1, 0, "always"),))
    monkeypatch.setattr(memory_plan, "host_room", lambda: None)
    check_memory(plan, PublishConfig(), torch.device("cpu"), None)
