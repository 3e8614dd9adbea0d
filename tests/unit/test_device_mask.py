"""The device mask stage against the CPU path, through the kernels' reference: same frames, same bytes, same snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config import SnapshotPlace
from megasync.digest import XXH3_128, box_lanes
from megasync.schema import make_schema
from megasync.telemetry import Telemetry
from megasync.trainer import device_digest, device_masker
from megasync.trainer.device_digest import device_lanes
from megasync.trainer.device_frames import cut_bounds
from megasync.trainer.device_masker import DeviceMasker
from megasync.trainer.mask import words_of
from megasync.types import Box, TensorSpec
from megasync.versions.changes import TileChange, cut_frames
from tests.gpu import trainer_cases as cases


@pytest.mark.parametrize("place", list(SnapshotPlace))
@pytest.mark.parametrize(("parts", "index"), [(1, 0), (3, 1)])
def test_frames_bytes_sums_and_snapshot_are_those_of_the_cpu_path(parts: int, index: int, place: SnapshotPlace) -> None:
    rank = cases.make_rank(parts=parts, index=index)
    host_snapshot, host, copy = cases.on_host(rank)
    snapshot, masker = cases.on_device(rank, place=place)
    for step, density in enumerate((0.002, 0.0, 0.05, 0.7, 1e-6)):
        rank.change(density, step)
        copy.change(density, step)
        wanted = host.begin().encode("sparse", XXH3_128)
        masked = masker.begin()
        found = masked.encode("sparse", XXH3_128)
        cases.assert_equal_deltas(found, wanted)
        assert masked.changed_nbytes() == sum(r.num_changed * r.word_nbytes for r in wanted.records)
        cases.assert_snapshot_is_live(snapshot)
        cases.assert_same_bytes(cases.copies_of(snapshot), cases.copies_of(host_snapshot))
    masker.close()


@pytest.mark.parametrize("codec", ["auto", "lz4+zstd", "snappy", "zstd"])
def test_other_codecs_give_the_bytes_of_the_cpu_path(codec: str) -> None:
    rank = cases.make_rank()
    _, host, copy = cases.on_host(rank)
    _, masker = cases.on_device(rank, codec=codec)
    for step, density in enumerate((0.01, 0.8)):
        rank.change(density, step)
        copy.change(density, step)
        wanted = host.begin().encode(codec, XXH3_128)
        cases.assert_equal_deltas(masker.begin().encode(codec, XXH3_128), wanted)
    masker.close()


def test_a_pass_denser_than_planned_goes_into_ordinary_memory_and_nothing_is_lost() -> None:
    rank = cases.make_rank()
    _, host, copy = cases.on_host(rank)
    telemetry = Telemetry()
    _, masker = cases.on_device(rank, landing=4096, telemetry=telemetry)
    rank.change(0.3, 1)
    copy.change(0.3, 1)
    found = masker.begin().encode("sparse", XXH3_128)
    masker.close()
    cases.assert_equal_deltas(found, host.begin().encode("sparse", XXH3_128))
    assert telemetry.counts["landing_overflow_nbytes"] > 100_000


def test_passes_undo_newest_first() -> None:
    rank = cases.make_rank(parts=3, index=2)
    for place in SnapshotPlace:
        snapshot, masker = cases.on_device(rank, place=place)
        states = [cases.copies_of(snapshot)]
        passes = []
        for step, density in enumerate((0.01, 0.6, 0.001)):
            rank.change(density, step)
            passes.append(masker.begin())
            passes[-1].encode("sparse", XXH3_128)
            states.append(cases.copies_of(snapshot))
        masker.undo(passes[:0:-1])
        cases.assert_same_bytes(cases.copies_of(snapshot), states[1])
        masker.undo(passes[:1])
        cases.assert_same_bytes(cases.copies_of(snapshot), states[0])
        masker.close()


class Gate:
    """Holds every compaction until it is opened: the device is busy with the next forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        inner = device_masker.compact_jobs_

        def gated(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.reached.set()
            assert self.opened.wait(20)
            yield from inner(*args, **kwargs)

        monkeypatch.setattr(device_masker, "compact_jobs_", gated)


def test_case_67_the_fence_keeps_the_next_step_out_and_without_it_the_step_leaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fenced in (True, False):
        rank = cases.make_rank()
        _, host, copy = cases.on_host(rank)
        _, masker = cases.on_device(rank)
        gate = Gate(monkeypatch)
        rank.change(0.01, 1)
        copy.change(0.01, 1)
        masked = masker.begin()
        if fenced:
            threading.Timer(0.2, gate.opened.set).start()
            masker.fence()
            assert gate.opened.is_set()
        assert gate.reached.wait(20)
        rank.change(0.01, 2)  # the next optimizer step
        gate.opened.set()
        found = masked.encode("sparse", XXH3_128)
        wanted = host.begin().encode("sparse", XXH3_128)
        assert (found.parts == wanted.parts) is fenced
        monkeypatch.undo()
        masker._running = None
        masker.close()


def test_a_volatile_weight_is_of_its_step_end_whatever_writes_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    _, host, copy = cases.on_host(rank)
    _, masker = cases.on_device(rank)
    gate = Gate(monkeypatch)
    rank.change(0.05, 1)
    copy.change(0.05, 1)
    masked = masker.begin()
    rank.change(0.5, 2, cases.VOLATILE)  # finalize_model_grads of the next step, before the fence
    gate.opened.set()
    cases.assert_equal_deltas(masked.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    masker.close()


def test_late_chunks_are_read_when_they_begin_and_frames_do_not_show_it() -> None:
    rank = cases.make_rank()
    cases.check_late_chunks(rank, *cases.on_device(rank))


def test_a_pass_that_breaks_off_is_undone_and_the_next_one_carries_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = cases.make_rank()
    snapshot, masker = cases.on_device(rank)
    before = cases.copies_of(snapshot)
    inner, left = device_masker.compact_jobs_, [3]

    def breaking(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for part in inner(*args, **kwargs, span_nbytes=200_000):
            yield part
            left[0] -= 1
            if not left[0]:
                raise MemoryError("no room for the planes of a span")

    monkeypatch.setattr(device_masker, "compact_jobs_", breaking)
    rank.change(0.02, 1)
    masked = masker.begin()
    with pytest.raises(MemoryError, match="no room for the planes"):
        masked.encode("sparse", XXH3_128)
    with pytest.raises(MemoryError):
        masked.changed_nbytes()
    assert any((a != b).any() for a, b in zip(cases.copies_of(snapshot), before, strict=True))
    masker.undo([masked])
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    monkeypatch.undo()
    masker.begin().encode("sparse", XXH3_128)
    cases.assert_snapshot_is_live(snapshot)
    masker.close()


def test_a_codec_that_fails_leaves_a_pass_that_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    snapshot, masker = cases.on_device(rank)
    before = cases.copies_of(snapshot)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the encoder is out of order")

    monkeypatch.setattr("megasync.trainer.device_masked.encode_raw", failing)
    passes = []
    for step in range(4):  # more than there are landing arenas
        rank.change(0.3, step)
        passes.append(masker.begin())
        with pytest.raises(OSError, match="out of order"):
            passes[-1].encode("sparse", XXH3_128)
    masker.undo(passes[::-1])
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.close()


def test_closing_ends_a_pass_that_waits_for_its_chunks() -> None:
    rank = cases.make_rank()
    _, masker = cases.on_device(rank)
    masked = masker.begin(late=(1,))
    masker.close()
    masker.close()
    with pytest.raises(RuntimeError, match="closed before"):
        masked.encode("sparse", XXH3_128)


def test_a_rank_that_owns_nothing_has_empty_passes() -> None:
    rank = replace(cases.make_rank(), regions=[])
    _, masker = cases.on_device(rank)
    masked = masker.begin(late=(0,))
    masker.start_rest()
    masker.fence()
    delta = masked.encode("sparse", XXH3_128)
    assert (delta.records, delta.parts, delta.touched) == ((), (), {})
    masker.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_frames_end_where_the_rule_of_the_format_says(data: st.DataObject) -> None:
    shapes = [(70_000,), (1 << 20,), (1 << 20, 40), (5,)]
    specs = [
        TensorSpec(f"t{i:02}", data.draw(st.sampled_from(["U8", "F64", "BF16"])), shape, layer=layer)
        for i, (shape, layer) in enumerate(
            data.draw(st.lists(st.tuples(st.sampled_from(shapes), st.integers(0, 2)), min_size=1, max_size=6))
        )
    ]
    schema = make_schema("run", specs)
    tiles: list[TileChange] = []
    for tensor_id, grid in enumerate(schema.grids):
        for tile in range(grid.num_tiles):
            num = data.draw(st.sampled_from([0, 1, 5, 4000, 16_383, 16_384, 20_000]))
            if num:
                empty = np.empty(0, np.uint8)
                tiles.append(TileChange(tensor_id, tile, np.arange(num), empty, empty))
    wanted, at = [0], 0
    for frame in cut_frames(schema, tiles):
        at += len(frame)
        wanted.append(at)
    ids = np.array([t.tensor_id for t in tiles], dtype=np.int64)
    words = np.array([schema.grids[t.tensor_id].tile_words(np.array([t.tile]))[0] for t in tiles], dtype=np.int64)
    w = schema.word_nbytes[ids].astype(np.int64)
    group = (schema.layers[ids].astype(np.int64) << 8) | w
    assert cut_bounds(group, np.array([len(t.positions) for t in tiles], dtype=np.int64), words * w) == wanted


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_digest_sums_where_the_words_are_equal_those_of_the_host(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(start, tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)))
    w = data.draw(st.sampled_from([1, 2, 4, 8]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    raw = torch.from_numpy(rng.integers(0, 256, (*box.extent, w), dtype=np.uint8))
    live = raw.view({1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[w]).squeeze(-1)
    before, device_digest._SLAB_NBYTES = device_digest._SLAB_NBYTES, data.draw(st.sampled_from([64, 1000, 1 << 20]))
    try:
        assert device_lanes(shape, box, live) == box_lanes(shape, box, np.ascontiguousarray(words_of(live)))
    finally:
        device_digest._SLAB_NBYTES = before


def test_digest_sums_of_aligned_rows_take_the_fast_form() -> None:
    live = torch.randn(300, 64).bfloat16()
    box = Box((100, 32), (300, 64))
    assert device_lanes((500, 128), box, live) == box_lanes((500, 128), box, words_of(live))


def test_the_masker_of_cpu_weights_is_the_cpu_path() -> None:
    rank = cases.make_rank()
    snapshot, _, _ = cases.on_host(rank)
    masker = device_masker.make_masker(rank.schema, snapshot, cases.CPU, "sparse", XXH3_128, Telemetry())
    assert not isinstance(masker, DeviceMasker)
    assert not masker.can_defer
