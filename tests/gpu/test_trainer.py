"""The trainer's mask stage on a GPU: bytes of the CPU path, the fence, late chunks, withdrawal, flat memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import OnError, PublishConfig, SnapshotPlace
from megasync.digest import XXH3_128, box_lanes
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import MemorySink
from megasync.telemetry import Telemetry
from megasync.trainer import device_masker
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.copied_masker import CopiedMasker
from megasync.trainer.device_arena import host_arena
from megasync.trainer.device_digest import device_lanes
from megasync.trainer.mask import words_of
from megasync.trainer.memory_plan import plan_memory
from megasync.trainer.side_masker import SideMasker
from megasync.types import Box
from megasync.versions.publication import PublicationReader
from tests.gpu import trainer_cases as cases
from tests.unit.test_publish_alone import assert_same, change, copy, model, rebuild

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PLACES = pytest.mark.parametrize("place", [*SnapshotPlace, "one queue"], indirect=True)
SLEEP_CYCLES = 40_000_000  # about 20 ms: longer than any step of these tests


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SnapshotPlace:
    """Where the snapshot is; in host memory also as where all streams share one hardware queue."""
    if request.param != "one queue":
        return SnapshotPlace(request.param)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return SnapshotPlace.HOST


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def model_on_gpu(seed: int = 0) -> dict[str, torch.Tensor]:
    return {n: t.cuda() for n, t in model(seed).items()}


def change_on_gpu(tensors: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """As ``change``, queued on the current stream."""
    on_host = {n: t.cpu() for n, t in tensors.items()}
    change(on_host, share, seed)
    for name, t in tensors.items():
        t.copy_(on_host[name])


@PLACES
@pytest.mark.parametrize(("parts", "index"), [(1, 0), (3, 1)])
def test_frames_bytes_sums_and_snapshot_are_those_of_the_cpu_path(place: SnapshotPlace, parts: int, index: int) -> None:
    rank = cases.make_rank(cuda(), parts, index)
    host_snapshot, host, copied = cases.on_host(rank)
    snapshot, masker = cases.on_device(rank, cuda(), place)
    assert snapshot.arena.is_cuda == (place is SnapshotPlace.DEVICE)
    assert snapshot.arena.is_cuda or snapshot.arena.is_pinned()
    for step, density in enumerate((0.002, 0.0, 0.05, 0.7, 1.0, 1e-6)):
        masker.fence()
        rank.change(density, step)
        copied.change(density, step)
        masked = masker.begin()
        wanted = host.begin().encode("sparse", XXH3_128)
        cases.assert_equal_deltas(masked.encode("sparse", XXH3_128), wanted)
        cases.assert_same_bytes(cases.copies_of(snapshot), cases.copies_of(host_snapshot))
    assert dict(snapshot.lanes()) == dict(host_snapshot.lanes())
    masker.close()


@PLACES
def test_every_publication_rebuilds_bit_for_bit_and_a_restart_goes_on(place: SnapshotPlace) -> None:
    sink, tensors = MemorySink(), model_on_gpu()
    config = PublishConfig(max_first_density=1, snapshot=place)
    versions = [copy(tensors)]
    for start in (0, 2):
        callback = MegasyncCallback(TensorExporter(tensors), sink, config)
        callback.on_train_start()
        for step in range(start, start + 2):
            callback.before_optimizer_step()
            change_on_gpu(tensors, (0.01, 0.6)[step % 2], step)
            assert callback.step_end() == step + 1
            versions.append(copy(tensors))
        callback.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert (newest.version, newest.epoch) == (4, 2)
    for manifest in reader.chain(newest):
        assert_same(rebuild(reader, manifest), versions[manifest.version])


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass begins late on the mask's stream, as behind a busy GPU."""
    inner, read = device_masker.compact_jobs_, CopiedMasker._copy_down

    def late(*args: Any, **kwargs: Any) -> Iterator[Any]:
        torch.cuda._sleep(SLEEP_CYCLES)
        yield from inner(*args, **kwargs)

    def read_late(*args: Any) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        read(*args)

    monkeypatch.setattr(device_masker, "compact_jobs_", late)
    monkeypatch.setattr(CopiedMasker, "_copy_down", read_late)


class Trained:
    """A weight under a torch optimizer, and a volatile bias that the next backward writes."""

    def __init__(self, place: SnapshotPlace, sink: MemorySink) -> None:
        self.weight = torch.nn.Parameter(torch.randn(2048, 2048, device="cuda"))
        self.bias = torch.randn(4096, device="cuda")
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        exporter = TensorExporter({"w": self.weight, "bias": self.bias}, volatile=["bias"])
        config = PublishConfig(max_first_density=1, snapshot=place, on_error=OnError.RAISE)
        self.callback = MegasyncCallback(exporter, sink, config, optimizer=self.optimizer)
        self.callback.on_train_start()

    def step(self) -> dict[str, Any]:
        """Backward, optimizer, step end, all queued without a wait; the weights as they were at the step end."""
        self.bias.add_(1)  # finalize_model_grads
        self.weight.grad = torch.randn_like(self.weight)
        self.optimizer.step()
        kept = {"w": self.weight.detach().clone(), "bias": self.bias.clone()}
        self.callback.step_end()
        return kept


@PLACES
@pytest.mark.parametrize("fenced", [True, False])
def test_case_67_the_fence_keeps_the_next_step_out_and_without_it_the_step_leaks(
    place: SnapshotPlace, fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MemorySink()
    trained = Trained(place, sink)
    kept = [trained.step(), trained.step()]
    trained.callback.flush()
    slow(monkeypatch)
    if not fenced:
        monkeypatch.setattr(SideMasker, "fence", lambda self: setattr(self, "_running", None))
    kept += [trained.step(), trained.step()]  # the second must not reach the first one's version
    trained.callback.flush()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 4

    def whole() -> bool:
        try:
            for manifest in reader.chain(newest)[1:]:
                assert_same(rebuild(reader, manifest), copy(kept[manifest.version - 1]))
        except AssertionError:
            return False
        return True

    assert whole() is fenced
    trained.callback.close()


def test_the_compute_stream_is_held_only_while_a_pass_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(SnapshotPlace.DEVICE, MemorySink())
    trained.step()
    trained.callback.flush()
    trained.callback.telemetry.drain()
    slow(monkeypatch)
    trained.step()
    trained.step()  # comes before the first one's pass is done
    torch.cuda.synchronize()
    trained.callback.flush()
    trained.step()
    assert trained.callback.telemetry.seconds["held"] > 0.005
    monkeypatch.undo()
    trained.callback.flush()
    trained.callback.telemetry.drain()
    trained.step()
    torch.cuda.synchronize()  # a long forward and backward
    trained.callback.flush()
    trained.step()
    assert trained.callback.telemetry.seconds["held"] < 0.005
    trained.callback.close()


@PLACES
def test_late_chunks_are_read_after_the_gather_that_their_forward_waited_for(place: SnapshotPlace) -> None:
    rank = cases.make_rank(cuda())
    snapshot, masker = cases.on_device(rank, cuda(), place)
    _, host, copied = cases.on_host(rank)
    late = [n for n, c in cases.CHUNK_OF.items() if c == 1]
    early = [s.name for s in cases.SPECS if s.name not in late]
    gathers = torch.cuda.Stream()
    for step in range(3):
        masker.fence()
        rank.change(0.03, step, early)
        masked = masker.begin(late=(1,))
        gathers.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(gathers):
            torch.cuda._sleep(SLEEP_CYCLES)
            rank.change(0.03, step, late)
        torch.cuda.current_stream().wait_stream(gathers)  # what finish_param_sync does
        masker.start_chunk(1)
        copied.change(0.03, step, early)
        copied.change(0.03, step, late)
        cases.assert_equal_deltas(masked.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    cases.assert_snapshot_is_live(snapshot)
    masker.close()


@PLACES
def test_withdrawn_versions_are_put_back_on_the_device(place: SnapshotPlace) -> None:
    sink, tensors = FaultySink(MemorySink()), model_on_gpu()
    config = PublishConfig(on_error=OnError.RETRY, in_flight_limit=4, max_first_density=1, timeout_s=20, snapshot=place)
    callback = MegasyncCallback(TensorExporter(tensors), sink, config)
    callback.on_train_start()
    sink.add(Fault("create", key="v000000000002", error=lambda o, k: OSError("no space left")))
    for step in range(3):
        callback.before_optimizer_step()
        change_on_gpu(tensors, 0.05, step)
        callback.step_end()
    callback.flush()
    fates = {o.version: o.durable for o in callback.outcomes}
    assert fates[1]
    assert not fates[2]
    reader = PublicationReader(sink.inner, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == callback.version
    assert_same(rebuild(reader, newest), copy(tensors))
    callback.close()


@pytest.mark.alone
@PLACES
def test_case_64_memory_is_flat_over_a_thousand_syncs(place: SnapshotPlace) -> None:
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    rank = cases.make_rank(cuda())
    telemetry = Telemetry()
    _, masker = cases.on_device(rank, cuda(), place, telemetry=telemetry)
    words = next(p.data for p in rank.pieces if p.name == "layers.1.w").view(torch.int16)
    process = psutil.Process(os.getpid())
    seen = []
    for step in range(1000):
        masker.fence()
        words[step % 50 :: 50 + step % 7] ^= 1 + step % 100
        masker.begin().encode("sparse", XXH3_128)
        if step in (199, 999):
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
            seen.append((torch.cuda.memory_reserved(), free, pinned, process.memory_info().rss))
    masker.close()
    (reserved, free, pinned, rss), after = seen
    assert (after[0], after[2]) == (reserved, pinned)
    assert after[1] > free - (16 << 20)  # kernels compiled meanwhile
    assert after[3] < rss + (8 << 20)
    assert telemetry.counts.get("landing_overflow_nbytes", 0) == 0


@PLACES
def test_passes_stay_inside_the_memory_plan(place: SnapshotPlace) -> None:
    tensors = {f"layers.{i}.w": torch.randint(0, 256, (1 << 28,), dtype=torch.uint8, device="cuda") for i in range(3)}
    config = PublishConfig(max_first_density=1, snapshot=place)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    rank = cases.whole_rank(tensors)
    plan = plan_memory(rank.schema, rank.regions, config, cuda(), anchor=False)
    _, masker = cases.on_device(rank, cuda(), place)
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        masker.fence()
        for t in tensors.values():
            t[step::200] ^= 3
        masker.begin().encode("sparse", XXH3_128)
    taken = torch.cuda.max_memory_reserved() - before
    assert taken < plan.device_nbytes * 1.1 + (64 << 20), (taken, plan.report())
    masker.close()


def test_digest_sums_on_the_device_equal_those_of_the_host() -> None:
    live = torch.randn(700, 1000, device="cuda").bfloat16()
    for box in (Box((0, 0), (700, 1000)), Box((100, 8), (300, 504)), Box((3, 1), (5, 77)), Box((0, 0), (1, 1))):
        part = live[box.start[0] : box.start[0] + box.extent[0], box.start[1] : box.start[1] + box.extent[1]]
        assert device_lanes((700, 1000), box, part) == box_lanes((700, 1000), box, words_of(part))


def test_host_arenas_are_pinned_and_let_go() -> None:
    arena = host_arena(5 << 20, cuda())
    assert arena.is_pinned()
    view = arena[100:200]
    del arena
    assert view.is_pinned()
    for _ in range(3):
        again = host_arena(64 << 20, cuda())
        again.copy_(torch.ones(64 << 20, dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert int(again.sum()) == 64 << 20
        del again


def test_a_weight_left_on_the_host_is_carried_along() -> None:
    tensors = model_on_gpu()
    tensors["model.layers.1.router.bias"] = tensors["model.layers.1.router.bias"].cpu()
    sink = MemorySink()
    callback = MegasyncCallback(
        TensorExporter(tensors), sink, replace(PublishConfig(), max_first_density=1, snapshot=SnapshotPlace.DEVICE)
    )
    callback.on_train_start()
    for step in range(2):
        callback.before_optimizer_step()
        change_on_gpu(tensors, 0.02, step)
        callback.step_end()
    callback.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert_same(rebuild(reader, newest), copy(tensors))
