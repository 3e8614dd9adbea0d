"""Engines of several ranks: slices add up, replicas are compared, and all ranks end at one version."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import (
    BaseMismatchError,
    PlanError,
    RankFailedError,
    ReplicaDriftError,
    RetryError,
    TaintedError,
    UndoneError,
)
from megasync.layout.compose import arrange
from megasync.layout.modes import Layout
from megasync.layout.named import column_parallel, fused_qkv
from megasync.receiver import tally
from megasync.receiver.applier import Applier
from megasync.receiver.votes import vote
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import BrokenBackend, Mailbox, RankEngine, load, on_ranks

SPECS = [
    spec("layers.0.q_proj", "BF16", (8 * 8, 48)),
    spec("layers.0.k_proj", "BF16", (2 * 8, 48)),
    spec("layers.0.v_proj", "BF16", (2 * 8, 48)),
    spec("layers.0.up", "BF16", (96, 48)),
    spec("layers.0.norm", "BF16", (48,)),
]


def tp_engine(
    mailbox: Mailbox, rank: int, words: Mapping[str, np.ndarray], specs: list[TensorSpec], heads: int, kv: int
) -> RankEngine:
    """A tensor-parallel rank with fused QKV, replicated KV heads and norms, a row slice and a column slice."""
    tp, dim, hidden = len(mailbox.slots), 8, 48
    places: dict[str, Layout] = {}
    for t in specs:
        if "norm" in t.name:
            places[t.name] = arrange(t.shape, word_nbytes=2).to("norm", primary=rank == 0)
        elif "up" in t.name:
            places[t.name] = column_parallel(t.shape, word_nbytes=2, storage="up", tp_rank=rank, tp_size=tp)
        else:
            places[t.name] = fused_qkv(
                t.name[len("layers.0.")],  # type: ignore[arg-type]
                q_shape=(heads * dim, hidden),
                kv_shape=(kv * dim, hidden),
                num_kv_heads=kv,
                word_nbytes=2,
                storage="qkv",
                tp_rank=rank,
                tp_size=tp,
            )
    own_kv = max(kv // tp, 1)
    storages = {
        "norm": torch.zeros(hidden, dtype=torch.int16),
        "up": torch.zeros(96 // tp * hidden, dtype=torch.int16),
        "qkv": torch.zeros((heads // tp + 2 * own_kv) * dim * hidden, dtype=torch.int16),
    }
    return RankEngine(mailbox, rank, live=load(places, storages, words), places=places)


class World:
    """A run and an engine of some ranks at version 0."""

    def __init__(self, num_ranks: int, backends: Mapping[int, object] = MappingProxyType({})) -> None:
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS), frame_changed=40)
        self.words = random_words(SPECS)
        self.publisher.checkpoint(self.words)
        self.mailbox = Mailbox(num_ranks)
        self.engines = [tp_engine(self.mailbox, r, self.words, SPECS, 8, 2) for r in range(num_ranks)]
        self.appliers = [
            Applier(e, self.publisher.sink, ApplyConfig(workers=1), backend=backends.get(r, "auto"))  # type: ignore[arg-type]
            for r, e in enumerate(self.engines)
        ]

    def join(self) -> list[object]:
        return on_ranks([a.join for a in self.appliers])

    def update(self) -> list[object]:
        return on_ranks([a.update for a in self.appliers])

    def publish(self, density: float, seed: int) -> None:
        self.words = changed(self.words, density, seed=seed)
        self.publisher.delta(self.words)

    def check(self, words: Mapping[str, np.ndarray]) -> None:
        """All live bytes are those of a cold load."""
        for rank, e in enumerate(self.engines):
            cold = tp_engine(self.mailbox, rank, words, SPECS, 8, 2)
            for n, live in e.live.items():
                assert torch.equal(live, cold.live[n]), (rank, n)


def test_tensor_parallel_ranks_add_up_to_whole_tensors() -> None:
    world = World(4)
    assert [r.version for r in world.join()] == [0] * 4  # type: ignore[attr-defined]
    for v in (1, 2):
        world.publish(0.05 if v == 1 else 0.5, seed=v)
        results = world.update()
        assert [r.version for r in results] == [v] * 4, results  # type: ignore[attr-defined]
        world.check(world.words)
    assert "vote of 4 ranks" in results[0].proofs  # type: ignore[attr-defined]
    assert len(world.appliers[0]._session.binding.mirrors) == 3 + 2 * 2  # norms, and k and v held twice


def test_sums_of_many_tensors_go_to_the_other_ranks_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "_ROWS", 2)
    sizes: list[int] = []
    encode = msgspec.msgpack.encode

    def noted(x: object) -> bytes:
        if isinstance(x, tally._Count):
            sizes.append(len(x.primaries))
        return encode(x)

    monkeypatch.setattr(tally.msgspec.msgpack, "encode", noted)
    world = World(4)
    world.join()
    assert len(SPECS) == 5
    assert max(sizes) == 2 * 16  # one column of sums: the audit of a join
    for v in (1, 2):
        world.publish(0.05, seed=v)
        assert [r.version for r in world.update()] == [v] * 4  # type: ignore[attr-defined]
        world.check(world.words)
    assert max(sizes) == 2 * 2 * 16
    world.engines[2].live["norm"][7] ^= 4
    world.publish(0.9, seed=5)
    assert all(isinstance(found, ReplicaDriftError) for found in world.update())


def test_case_79_drifted_replica_is_named_before_any_write() -> None:
    world = World(4)
    world.join()
    old = world.words
    world.publish(0.9, seed=5)
    world.engines[2].live["norm"][7] ^= 4
    for found in world.update():
        assert isinstance(found, ReplicaDriftError)
        assert "layers.0.norm on rank 2, primary on rank 0" in str(found)
    assert [(a.version, a.ready) for a in world.appliers] == [(-1, False)] * 4
    world.engines[2].live["norm"][7] ^= 4
    world.check(old)
    assert all(e.events == [] for e in world.engines)
    assert all(not isinstance(found, Exception) for found in world.join())
    assert [r.versions for r in world.update()] == [(1,)] * 4  # type: ignore[attr-defined]


def test_case_79_audit_names_a_drifted_kv_head() -> None:
    world = World(4)
    world.join()
    world.engines[3].live["qkv"][-1] ^= 1  # the last v row of the rank that repeats rank 2's head
    for found in on_ranks([a.audit for a in world.appliers]):
        assert isinstance(found, ReplicaDriftError)
        assert "layers.0.v_proj on rank 3, primary on rank 2" in str(found)


def test_case_91_one_rank_cannot_prepare_and_none_takes_the_version() -> None:
    world = World(2)
    world.join()
    old = world.words

    def asleep() -> None:
        raise BaseMismatchError("weights are asleep")

    world.engines[1].on_ready = asleep
    world.publish(0.1, seed=3)
    for found in world.update():
        assert isinstance(found, BaseMismatchError)
        assert "rank 1" in str(found)
        assert "asleep" in str(found)
    world.check(old)
    assert [(a.version, a.status.state) for a in world.appliers] == [(0, "serving")] * 2
    assert all(e.events == [] for e in world.engines)
    world.engines[1].on_ready = lambda: None
    assert [r.version for r in world.update()] == [1, 1]  # type: ignore[attr-defined]


def test_case_80_one_rank_fails_inside_and_the_whole_update_is_undone() -> None:
    world = World(2, {1: lambda b: BrokenBackend(b, write_fails_after=1)})
    world.join()
    old = world.words
    world.publish(0.1, seed=3)
    for found in world.update():
        assert isinstance(found, UndoneError)
        assert "rank 1" in str(found)
        assert "machine check" in str(found)
    world.check(old)
    assert [(a.version, a.status.state) for a in world.appliers] == [(0, "serving")] * 2
    assert [e.events for e in world.engines] == [["pause", ("resume", 0)]] * 2


def test_one_rank_cannot_undo_and_no_rank_resumes() -> None:
    world = World(2, {1: lambda b: BrokenBackend(b, write_fails_after=1, undo_fails=True)})
    world.join()
    world.publish(0.1, seed=3)
    assert all(isinstance(found, TaintedError) for found in world.update())
    assert [a.status.state for a in world.appliers] == ["tainted"] * 2
    assert [e.events for e in world.engines] == [["pause", "quarantine"]] * 2
    assert all(isinstance(found, TaintedError) for found in world.update())


def test_one_rank_cannot_resume_and_every_rank_holds_the_new_version_and_says_why_it_takes_no_traffic() -> None:
    world = World(2)
    world.join()

    def fail(version: int) -> None:
        raise RuntimeError("live nodes in the prefix cache")

    world.engines[1].on_resume = fail
    world.publish(0.1, seed=3)
    for again in range(2):  # the update, and the next one, which asks to resume before anything else
        for found in world.update():
            assert isinstance(found, RankFailedError), again
            assert found.causes == {1: "RuntimeError: live nodes in the prefix cache"}
        world.check(world.words)
        assert [(a.version, a.status.state, a.ready) for a in world.appliers] == [(1, "behind", False)] * 2
        assert all("version 1 is live and proven, but resume() failed" in a.status.reason for a in world.appliers)
    world.engines[1].on_resume = lambda version: None
    assert [r.versions for r in world.update()] == [(), ()]  # type: ignore[attr-defined]
    assert all(a.ready for a in world.appliers)
    assert [e.events for e in world.engines] == [["pause", *[("resume", 1)] * 3]] * 2


def test_case_91_one_rank_cannot_pause_and_every_rank_tries_again() -> None:
    world = World(2)
    world.join()
    old = world.words

    def never() -> None:
        raise TimeoutError("a request does not end")

    world.engines[1].on_pause = never
    world.publish(0.1, seed=3)
    for found in world.update():
        assert isinstance(found, RetryError)
        assert "rank 1" in str(found)
        assert "did not pause for version 1" in str(found)
    world.check(old)
    assert [(a.version, a.status.state) for a in world.appliers] == [(0, "serving")] * 2
    world.engines[1].on_pause = lambda: None
    assert [r.version for r in world.update()] == [1, 1]  # type: ignore[attr-defined]


def test_an_audit_that_fails_on_one_rank_takes_the_version_away_from_all() -> None:
    world = World(2)
    world.join()
    world.engines[1].live["up"] = world.engines[1].live["up"].clone()
    for found in on_ranks([a.audit for a in world.appliers]):
        assert isinstance(found, BaseMismatchError)
        assert "not where they were bound" in str(found)
    assert [(a.version, a.status.state) for a in world.appliers] == [(-1, "behind")] * 2


def test_words_that_no_rank_holds_are_named_on_every_rank() -> None:
    world = World(2)
    for e in world.engines:
        e.places = {n: x for n, x in e.places.items() if n != "layers.0.up"}  # type: ignore[union-attr]
    for found in world.join():
        assert isinstance(found, PlanError)
        assert "not held: layers.0.up" in str(found)


def test_words_that_two_ranks_hold_first_are_named() -> None:
    world = World(2)
    places = dict(world.engines[1].places or {})
    places["layers.0.norm"] = arrange((48,), word_nbytes=2).to("norm")
    world.engines[1].places = places
    for found in world.join():
        assert isinstance(found, PlanError)
        assert "held by several primaries: layers.0.norm (96 of 48 words)" in str(found)


def test_ranks_read_different_heads_and_go_where_rank_0_goes() -> None:
    world = World(2)
    world.join()
    world.publish(0.1, seed=3)
    first = world.words
    stale = world.publisher.sink.read_head("run")
    world.publish(0.1, seed=4)
    world.appliers[0]._reader.sink.read_head = lambda run, timeout_s=0: stale  # type: ignore[method-assign]
    world.appliers[1]._reader = type(world.appliers[1]._reader)(world.publisher.sink, "run")
    results = world.update()
    assert [r.version for r in results] == [1, 1]  # type: ignore[attr-defined]
    world.check(first)


def test_vote_keeps_the_class_that_all_ranks_share_and_lists_mixed_causes() -> None:
    mailbox = Mailbox(3)
    engines = [RankEngine(mailbox, r, live={}) for r in range(3)]

    def body(rank: int, errors: Mapping[int, Exception]) -> None:
        with vote(engines[rank], "a stage"):
            if rank in errors:
                raise errors[rank]

    same = {0: RetryError("no answer"), 2: RetryError("no answer either")}
    for found in on_ranks([lambda r=r: body(r, same) for r in range(3)]):  # type: ignore[misc]
        assert isinstance(found, RetryError)
        assert "rank 0" in str(found)
        assert "rank 2" in str(found)
    mixed = {0: RetryError("no answer"), 1: OSError("disk")}
    for found in on_ranks([lambda r=r: body(r, mixed) for r in range(3)]):  # type: ignore[misc]
        assert isinstance(found, RankFailedError)
        assert found.causes == {0: "RetryError: no answer", 1: "OSError: disk"}


def test_case_88_rank_that_never_comes_ends_in_an_error() -> None:
    world = World(2)
    world.mailbox.barrier = type(world.mailbox.barrier)(2, timeout=0.2)
    with pytest.raises(threading.BrokenBarrierError):
        world.appliers[0].join()
    assert not world.appliers[0].ready


def test_following_ends_on_all_ranks_when_one_is_stopped() -> None:
    world = World(2)
    world.join()
    world.publish(0.1, seed=3)
    stops = [threading.Event(), threading.Event()]
    looks = [0]

    def wait(seconds: float) -> None:
        looks[0] += 1
        if looks[0] == 3:
            stops[1].set()

    calls = [
        lambda a=a, s=s: a.follow(s, poll_s=1, wait=wait if s is stops[1] else lambda seconds: None)  # type: ignore[misc]
        for a, s in zip(world.appliers, stops, strict=True)
    ]
    assert on_ranks(calls) == [None, None]
    assert not stops[0].is_set()
    assert [a.version for a in world.appliers] == [1, 1]
    world.check(world.words)
