"""The end-to-end benchmark at toy size on the CPU: the real callback and the real applier, and the checks between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.bench import bench_end_to_end
from launch.bench.bench_end_to_end import STAGES, exclusive
from launch.bench.receiver_world import OWNERS
from launch.bench.rows import RowWriter, read_rows
from launch.bench.serving import ServingRank
from launch.bench.trainer_process import Here, Remote, Role, prepare
from launch.bench.trainer_share import _box_of, read_block, schema_of, share_of, taken_tiles
from launch.bench.workload import Shape, engine_rank

TINY = Shape(2, 1, 64, hidden=128, inner=128, dense_inner=256, heads=4, q_rank=64, kv_rank=64, vocabulary=2048)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[ServingRank]:
    made = ServingRank(TINY, tmp_path / "own", "cpu", tp=1, workers=1)
    yield made
    made.close()


def test_a_trainer_and_an_engine_from_callback_to_token(rank: ServingRank, tmp_path: Path) -> None:
    trainer = Here()
    prepare(trainer, TINY, 1, "cpu")
    try:
        with RowWriter(tmp_path / "rows.jsonl", "end to end") as writer:
            bench_end_to_end.run(rank, trainer, tmp_path, writer, syncs=2, density=0.003, rows=64)
    finally:
        trainer.close()
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 2
    for r in rows:
        assert "target_id" not in r  # not the size that the target names
        assert sum(r[f"{name}_s"] for name in STAGES) == pytest.approx(r["value"], abs=1e-4)
        assert r["first_token_s"] > 0
        assert r["num_changed"] > 1000
        assert r["manifest_nbytes"] > 1000
        assert r["nbytes_out"] == rank.world.live_nbytes


def test_an_engine_with_other_bytes_is_an_error(
    rank: ServingRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench_end_to_end.read_block
    calls = []

    def other(live: dict[str, torch.Tensor], parts: list) -> torch.Tensor:
        found = real(live, parts)
        calls.append(found)
        if len(calls) > 3:  # the first three are what the trainer begins with
            found[parts[-1].offset] ^= 1
        return found

    monkeypatch.setattr(bench_end_to_end, "read_block", other)
    trainer = Here()
    prepare(trainer, TINY, 1, "cpu")
    try:
        with (
            RowWriter(tmp_path / "rows.jsonl", "end to end") as writer,
            pytest.raises(RuntimeError, match="the engine has other bytes than the trainer"),
        ):
            bench_end_to_end.run(rank, trainer, tmp_path, writer, syncs=1, density=0.003, rows=64)
    finally:
        trainer.close()


def test_stages_are_exclusive() -> None:
    ends = {name: 100 * (i + 1) for i, name in enumerate(STAGES)}
    ends["notice"] = ends["head"] - 50  # a head is seen before the trainer's call returns
    found = exclusive(20, ends)
    assert found["mask"] == pytest.approx(80e-9)
    assert found["notice"] == 0
    assert sum(found.values()) == pytest.approx((ends["first_token"] - 20) / 1e9)


def test_a_share_is_a_64th_inside_the_slices_of_a_rank() -> None:
    shape = Shape(num_layers=4)
    share = share_of(shape, 4)
    assert sorted(share) == [-1, 0, 3]
    layer = sum(p.nbytes for p in share[3])
    placed = {p.spec.name: p for p in engine_rank(shape, 4, 0)[0]}
    whole = sum(p.spec.nbytes for p in placed.values() if p.spec.layer == 3)
    assert layer == pytest.approx(whole / OWNERS, rel=0.05)
    taken = taken_tiles(schema_of(shape), share)
    assert sum(map(len, taken.values())) == sum(len(p.tiles) for parts in share.values() for p in parts)
    for part in share[3]:
        inside = placed[part.placed.spec.name]
        for a, n, low, high in zip(part.box.start, part.box.extent, inside.start, inside.stop, strict=True):
            assert low <= a < a + n <= high
        assert part.box == _box_of(part.placed, part.tiles)


def test_a_block_is_read_through_the_layout() -> None:
    """Against the layout's own arithmetic, on swizzled scales and interleaved halves."""
    share = share_of(TINY, 1)[1]
    _, sizes = engine_rank(TINY, 1, 0)
    live = {name: torch.randint(0, 256, (n,), dtype=torch.uint8) for name, n in sizes.items()}
    block = read_block(live, share).numpy()
    kinds = set()
    for part in share:
        record = part.placed.record
        index = np.indices(part.box.extent).reshape(len(part.box.extent), -1)
        at = record.local_offsets([x + a for x, a in zip(index, part.box.start, strict=True)])
        w = part.placed.spec.word_nbytes
        want = live[record.storage].numpy().view(f"<u{w}")[at]
        assert np.array_equal(block[part.offset : part.offset + part.nbytes].view(f"<u{w}"), want)
        kinds.add(len(record.digits))
    assert len(kinds) > 1


def test_a_remote_trainer_answers_and_its_end_is_an_error() -> None:
    trainer = Remote()
    try:
        prepare(trainer, TINY, 1, "cpu")
        assert trainer.receive()["schema"] == schema_of(TINY).digest.hex()
        trainer.send({"do": "nothing"})
        with pytest.raises(RuntimeError, match="the trainer ended with status 1"):
            trainer.receive()
    finally:
        trainer.close()
    with pytest.raises(AssertionError, match="prepare comes first"):
        Role().handle({"do": "step"})
