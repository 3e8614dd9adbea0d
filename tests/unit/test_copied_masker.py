"""The mask stage by copies, for streams that share one queue, against the CPU path: same frames, same bytes, same snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megasync.config import PublishConfig, SnapshotPlace
from megasync.digest import XXH3_128
from megasync.telemetry import Telemetry
from megasync.trainer import copied_masker, device_masker
from megasync.trainer.copied_masker import CopiedMasker
from megasync.trainer.device_plan import landing_spans
from megasync.trainer.device_snapshot import DeviceSnapshot
from megasync.trainer.device_stream import Mark
from megasync.trainer.memory_plan import plan_memory
from tests.gpu import trainer_cases as cases

HOST = SnapshotPlace.HOST


@pytest.fixture(autouse=True)
def one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def made(rank: cases.Rank, codec: str = "sparse") -> tuple[DeviceSnapshot, CopiedMasker]:
    snapshot, masker = cases.on_device(rank, place=HOST, codec=codec)
    assert isinstance(masker, CopiedMasker)
    return snapshot, masker


@pytest.mark.parametrize(("parts", "index"), [(1, 0), (3, 1)])
def test_frames_bytes_sums_and_snapshot_are_those_of_the_cpu_path(parts: int, index: int) -> None:
    rank = cases.make_rank(parts=parts, index=index)
    host_snapshot, host, copy = cases.on_host(rank)
    snapshot, masker = made(rank)
    for step, density in enumerate((0.002, 0.0, 0.05, 0.7, 1.0, 1e-6)):
        rank.change(density, step)
        copy.change(density, step)
        wanted = host.begin().encode("sparse", XXH3_128)
        masked = masker.begin()
        cases.assert_equal_deltas(masked.encode("sparse", XXH3_128), wanted)
        assert masked.changed_nbytes() == sum(r.num_changed * r.word_nbytes for r in wanted.records)
        cases.assert_snapshot_is_live(snapshot)
        cases.assert_same_bytes(cases.copies_of(snapshot), cases.copies_of(host_snapshot))
    masker.close()


def test_weights_come_down_as_they_lie_bands_of_columns_together() -> None:
    rank = cases.make_rank()
    names = [rank.schema.tensors[r.tensor_id].name for r in rank.regions]
    assert names.count("layers.0.o") > 1
    assert not any(r.data.is_contiguous() for r, n in zip(rank.regions, names, strict=True) if n == "layers.0.o")
    spans = landing_spans(rank.regions, cases.CPU)
    for name in ("layers.0.o", "embed", "layers.1.w"):
        (span,) = [s for s in spans if names[s.regions[0]] == name]
        assert len(span.regions) == names.count(name)
        assert (span.begin, span.packed) == (0, False)
    assert sorted(i for s in spans for i in s.regions) == [i for i, r in enumerate(rank.regions) if r.data.numel()]
    assert [names[s.regions[0]] for s in spans if s.packed] == ["layers.0.bias"]  # volatile
    _, masker = made(rank)
    assert sum(len(runs) for runs in masker._runs.values()) == len(spans) < len(rank.regions)
    masker.close()


def test_weights_with_much_between_them_are_packed_on_the_device() -> None:
    fused = torch.zeros((256, 640), dtype=torch.bfloat16)
    rank = cases.whole_rank({"narrow": fused[:, :64]})
    spans = landing_spans(rank.regions, cases.CPU)
    assert all(s.packed and s.begin == 0 and s.end == rank.regions[s.regions[0]].data.nbytes for s in spans)
    rank = cases.whole_rank({"wide": fused[:, :400]})
    assert [s.packed for s in landing_spans(rank.regions, cases.CPU)] == [False]
    _, host, copy = cases.on_host(rank)
    _, masker = made(rank)
    rank.change(0.1, 1)
    copy.change(0.1, 1)
    fused[:, 400:] = 7  # between them: comes down, and is nobody's
    cases.assert_equal_deltas(masker.begin().encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    masker.close()


@pytest.mark.parametrize("codec", ["auto", "lz4+zstd", "zstd"])
def test_other_codecs_give_the_bytes_of_the_cpu_path(codec: str) -> None:
    rank = cases.make_rank()
    _, host, copy = cases.on_host(rank)
    _, masker = made(rank, codec)
    for step, density in enumerate((0.01, 0.8)):
        rank.change(density, step)
        copy.change(density, step)
        wanted = host.begin().encode(codec, XXH3_128)
        cases.assert_equal_deltas(masker.begin().encode(codec, XXH3_128), wanted)
    masker.close()


def test_passes_undo_newest_first() -> None:
    rank = cases.make_rank(parts=3, index=2)
    snapshot, masker = made(rank)
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


def test_copies_are_queued_before_the_step_end_returns_and_the_fence_is_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = cases.make_rank()
    _, masker = made(rank)
    calls: list[str] = []
    copy_down, hold = CopiedMasker._copy_down, Mark.hold

    def noted(self: CopiedMasker, chunk: int) -> None:
        calls.append(f"copy {chunk}")
        copy_down(self, chunk)

    def held(self: Mark) -> None:
        calls.append("hold")
        hold(self)

    monkeypatch.setattr(CopiedMasker, "_copy_down", noted)
    monkeypatch.setattr(Mark, "hold", held)
    masked = masker.begin()
    assert calls == ["hold", "copy 0", "hold", "copy 1"]
    masker.fence()
    assert calls[4:] == ["hold"]
    masked.encode("sparse", XXH3_128)
    masker.close()


def test_the_next_pass_waits_until_this_one_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    _, host, copy = cases.on_host(rank)
    _, masker = made(rank)
    go, inner = threading.Event(), copied_masker.mask_regions

    def slow(*args: Any) -> Iterator[Any]:
        assert go.wait(20)
        yield from inner(*args)

    monkeypatch.setattr(copied_masker, "mask_regions", slow)
    rank.change(0.01, 1)
    copy.change(0.01, 1)
    first = masker.begin()
    threading.Timer(0.2, go.set).start()
    rank.change(0.02, 2)
    second = masker.begin()
    assert go.is_set()
    cases.assert_equal_deltas(first.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    copy.change(0.02, 2)
    cases.assert_equal_deltas(second.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    masker.close()


def test_the_fence_does_not_wait_for_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    _, host, copy = cases.on_host(rank)
    _, masker = made(rank)
    compared, inner = threading.Event(), copied_masker.mask_regions

    def slow(*args: Any) -> Iterator[Any]:
        assert compared.wait(20)
        yield from inner(*args)

    monkeypatch.setattr(copied_masker, "mask_regions", slow)
    rank.change(0.01, 1)
    copy.change(0.01, 1)
    masked = masker.begin()
    masker.fence()
    rank.change(0.01, 2)  # what was copied stays as it was
    compared.set()
    cases.assert_equal_deltas(masked.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    masker.close()


def test_a_volatile_weight_of_a_late_chunk_is_of_its_step_end_whatever_writes_it_next() -> None:
    rank = cases.make_rank()
    for i, region in enumerate(rank.regions):
        if rank.schema.tensors[region.tensor_id].name in cases.VOLATILE:
            rank.regions[i] = replace(region, chunk=1)
    _, host, copy = cases.on_host(rank)
    _, masker = made(rank)
    rank.change(0.05, 1)
    copy.change(0.05, 1)
    masked = masker.begin(late=(1,))
    rank.change(0.5, 2, cases.VOLATILE)  # finalize_model_grads of the next step, before the fence
    masker.start_rest()
    masker.fence()
    cases.assert_equal_deltas(masked.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    masker.close()


def test_late_chunks_are_read_when_they_begin_and_frames_do_not_show_it() -> None:
    rank = cases.make_rank()
    cases.check_late_chunks(rank, *made(rank))


def test_a_comparison_that_breaks_off_is_undone_and_the_next_pass_carries_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank)
    before = cases.copies_of(snapshot)
    inner = copied_masker.mask_regions

    def breaking(*args: Any) -> Iterator[Any]:
        for i, frame in enumerate(inner(*args)):
            yield frame
            if i == 1:
                raise MemoryError("no room for the changed words")

    monkeypatch.setattr(copied_masker, "mask_regions", breaking)
    rank.change(0.3, 1)
    masked = masker.begin()
    for call in (lambda: masked.encode("sparse", XXH3_128), masked.changed_nbytes):
        with pytest.raises(MemoryError, match="no room for the changed"):
            call()
    assert any((a != b).any() for a, b in zip(cases.copies_of(snapshot), before, strict=True))
    masker.undo([masked])
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    monkeypatch.setattr(copied_masker, "mask_regions", inner)
    masker.begin().encode("sparse", XXH3_128)
    cases.assert_snapshot_is_live(snapshot)
    masker.close()


def test_a_codec_that_fails_leaves_a_pass_that_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank)
    before = cases.copies_of(snapshot)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the encoder is out of order")

    monkeypatch.setattr(copied_masker, "encode", failing)
    passes = []
    for step in range(3):
        rank.change(0.3, step)
        passes.append(masker.begin())
        with pytest.raises(OSError, match="out of order"):
            passes[-1].encode("sparse", XXH3_128)
    masker.undo(passes[::-1])
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.close()


def test_a_copy_that_fails_fails_the_pass_and_leaves_the_snapshot_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank)
    before = cases.copies_of(snapshot)

    def failing(*args: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(CopiedMasker, "_copy_down", failing)
    rank.change(0.3, 1)
    masked = masker.begin()
    masker.fence()
    with pytest.raises(RuntimeError, match="device is gone"):
        masked.encode("sparse", XXH3_128)
    assert list(masked.entries()) == []
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.close()


def test_an_undo_while_a_pass_is_encoded_waits_and_takes_every_word_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank)
    before = cases.copies_of(snapshot)
    go, inner = threading.Event(), copied_masker.encode

    def slow(*args: Any) -> Any:
        assert go.wait(20)
        return inner(*args)

    monkeypatch.setattr(copied_masker, "encode", slow)
    rank.change(0.01, 1)
    masked = masker.begin()
    threading.Timer(0.2, go.set).start()
    masker.undo([masked])
    assert go.is_set()
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.close()


def test_an_undo_of_one_pass_waits_while_a_later_one_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the later one would have found what the earlier one had left, and written over what was taken back."""
    rank = cases.make_rank()
    snapshot, masker = made(rank)
    before = cases.copies_of(snapshot)
    rank.change(0.3, 1)
    first = masker.begin()
    first.encode("sparse", XXH3_128)
    comparing, go, inner = threading.Event(), threading.Event(), copied_masker.mask_regions

    def slow(*args: Any) -> Iterator[Any]:
        frames = inner(*args)
        frame = next(frames)  # by now others are compared, and not written
        comparing.set()
        assert go.wait(20)
        yield frame
        yield from frames

    monkeypatch.setattr(copied_masker, "mask_regions", slow)
    rank.change(0.3, 2)
    second = masker.begin()
    assert comparing.wait(20)
    threading.Timer(0.2, go.set).start()
    masker.undo([first])
    masker.undo([second])
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.close()


def test_nothing_is_compared_before_the_copies_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    _, masker = made(rank)
    there, looked = threading.Event(), threading.Event()
    early: list[bool] = []
    inner = copied_masker.mask_regions

    class Late(Mark):
        @property
        def passed(self) -> bool:
            looked.set()
            return there.is_set()

    def noted(*args: Any) -> Iterator[Any]:
        early.append(not there.is_set())
        yield from inner(*args)

    monkeypatch.setattr(copied_masker, "Mark", Late)
    monkeypatch.setattr(copied_masker, "mask_regions", noted)
    rank.change(0.01, 1)
    masked = masker.begin()
    assert looked.wait(20)
    there.set()
    masked.encode("sparse", XXH3_128)
    assert early == [False]
    masker.close()


def test_a_mark_that_cannot_be_made_fails_the_pass_not_the_step_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cases.make_rank()
    _, masker = made(rank)
    real, marks = Mark, [0]

    def failing(device: torch.device) -> Mark:
        marks[0] += 1
        if marks[0] == 2:
            raise RuntimeError("event: illegal memory access")
        return real(device)

    monkeypatch.setattr(copied_masker, "Mark", failing)
    masked = masker.begin()
    masker.fence()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        masked.encode("sparse", XXH3_128)
    masker.close()


def test_two_storages_over_one_memory_are_copied_each() -> None:
    memory = bytearray(64 << 10)
    short = torch.frombuffer(memory, dtype=torch.float32, count=1024)
    long = torch.frombuffer(memory, dtype=torch.float32, count=2048)[1024:]
    rank = cases.whole_rank({"a": short, "b": long})
    snapshot, masker = made(rank)
    rank.change(0.1, 1)
    masker.begin().encode("sparse", XXH3_128)
    cases.assert_snapshot_is_live(snapshot)
    masker.close()


def test_closing_ends_a_pass_that_waits_for_its_chunks() -> None:
    _, masker = made(cases.make_rank())
    masked = masker.begin(late=(1,))
    masker.close()
    masker.close()
    with pytest.raises(RuntimeError, match="closed before"):
        masked.encode("sparse", XXH3_128)


def test_a_rank_that_owns_nothing_has_empty_passes() -> None:
    _, masker = made(replace(cases.make_rank(), regions=[]))
    masked = masker.begin(late=(0,))
    masker.start_rest()
    masker.fence()
    delta = masked.encode("sparse", XXH3_128)
    assert (delta.records, delta.parts, delta.touched) == ((), (), {})
    masker.close()


@pytest.mark.parametrize(
    ("place", "connections", "copied"), [(HOST, "1", True), (HOST, "8", False), (SnapshotPlace.DEVICE, "1", False)]
)
def test_it_is_taken_for_a_snapshot_in_host_memory_behind_one_queue(
    place: SnapshotPlace, connections: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    for name in ("CopiedMasker", "DeviceMasker"):
        monkeypatch.setattr(device_masker, name, lambda *args, _name=name, **kwargs: _name)

    class Arena:
        is_cuda = place is SnapshotPlace.DEVICE

    snapshot: Any = type("AnySnapshot", (), {"arena": Arena})
    schema = cases.make_rank().schema
    kind = device_masker.make_masker(schema, snapshot, torch.device("cuda"), "sparse", XXH3_128, Telemetry())
    assert kind == ("CopiedMasker" if copied else "DeviceMasker")  # type: ignore[comparison-overlap]


def test_the_memory_plan_knows_what_comes_down() -> None:
    rank = cases.make_rank()
    owned = sum(r.data.nbytes for r in rank.regions)
    plan = plan_memory(rank.schema, rank.regions, PublishConfig(snapshot=HOST), torch.device("cuda"), anchor=False)
    (row,) = [r for r in plan.rows if "copied down" in r.what]
    assert owned <= row.host_nbytes <= owned + 192 * len(rank.regions)
    # Everything lies on another device than cuda here, so all of it is packed.
    assert row.device_nbytes == owned
