"""The peers at toy size on the CPU: every way that needs no GPU makes the new weights bit for bit, and the table names them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.bench import gpu_rank
from launch.bench.bench_peers import PeersBench, index_put, measure, run
from launch.bench.peers_nvlink import run_nvlink
from launch.bench.peers_weights import Change, Timer, Way
from launch.bench.report_peers import HEADER, peer_lines
from launch.bench.report_rows import Results
from launch.bench.rows import RowWriter, read_rows
from launch.bench.workload import Shape

TINY = Shape(2, 1, 4, hidden=128, inner=128, dense_inner=128, heads=1, q_rank=64, kv_rank=64, vocabulary=512)


@pytest.fixture(scope="module")
def change() -> Change:
    """Every way leaves old and new as they are, and resets what is live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_rank, "DEVICE", "cpu")
        torch.manual_seed(0)
        return Change(TINY, "cpu", tp=1, density=0.005)


def test_every_way_makes_the_new_weights(change: Change, tmp_path: Path) -> None:
    changed = int((change.old != change.new).sum())
    assert changed == pytest.approx(0.005 * change.nbytes, rel=0.1)
    change.reset()
    with RowWriter(tmp_path / "peers-gpu.jsonl", "peers") as writer:
        found = run(PeersBench(copied_nbytes=1 << 20, samples=2, threads=2), change, writer)
    rows = read_rows(tmp_path / "peers-gpu.jsonl")
    assert len(found) == 7
    assert len(rows) == 14
    by_way = {r["way"]: r for r in rows}
    put = next(r for way, r in by_way.items() if "32 bit" in way and "HBM" in way)
    words = int((change.old.view(torch.int16) != change.new.view(torch.int16)).sum())
    assert put["moved_nbytes"] == 6 * words
    copy = next(r for way, r in by_way.items() if way.startswith("full copy"))
    assert copy["moved_nbytes"] == copy["weights_nbytes"] == 1 << 20
    lines = peer_lines(Results(tmp_path))
    assert {line[0] for line in lines} == set(found)
    assert all(len(line) == len(HEADER) and line[3] == "every bit" for line in lines)
    assert [float(line[1].split(" ")[0]) for line in lines] == pytest.approx(sorted(found.values()), rel=0.01)
    assert peer_lines(Results(tmp_path / "nothing")) == []


def test_a_way_that_misses_a_bit_is_an_error(change: Change, tmp_path: Path) -> None:
    good = index_put(change, torch.int64, in_hbm=True)

    def missing() -> None:
        good.work()
        change.arena[int(torch.nonzero(change.old != change.new)[-1])] ^= 1

    with RowWriter(tmp_path / "x.jsonl", "peers") as writer:
        for way in (Way("wrong", missing, 1), Way("nothing", lambda: None, 1)):
            with pytest.raises(RuntimeError, match="these are not the new weights"):
                measure(change, way, Timer(change.arena.device), writer, 1)
    assert not writer.rows


def test_a_copy_between_gpus_needs_two(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        with pytest.raises(RuntimeError, match="needs two of them"):
            run_nvlink(tmp_path / "x.jsonl", 1 << 20)
    else:
        run_nvlink(tmp_path / "x.jsonl", 1 << 20)
        assert read_rows(tmp_path / "x.jsonl")[0]["checked"] == "every bit"
