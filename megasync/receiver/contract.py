"""The suite that every engine adapter passes; also for engines that other packages bring.

Each check is a plain function of an `EngineCase`, a fresh one for each check, and raises AssertionError where the
engine breaks the contract of ``engine.Engine``. With pytest::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
    def test_my_engine(check):
        check(EngineCase(schema, words, load=lambda words: MyEngine(...)))

For an engine of several ranks, run a check on all ranks at once, each with a case whose sink is shared. Must not import
a trainer, an adapter or a test library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, PlanError, TaintedError, UndoneError
from megasync.receiver.applier import Applier
from megasync.receiver.backend import Backend, FetchedFrame, Placed
from megasync.receiver.bind import Binding, bind
from megasync.receiver.contract_run import ContractRun, bytes_of, changed_words, expect, raises, record
from megasync.receiver.cpu import CpuBackend
from megasync.receiver.engine import Engine
from megasync.receiver.sums import Sums
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec

Words = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class EngineCase:
    """An engine under test and what it should hold.

    Attributes:
        schema: A run whose tensors the engine loads.
        words: Canonical words that it is loaded with first, ``<u{w}`` in each tensor's shape (``(1,)`` for a scalar).
        load: A fresh engine, cold loaded with given canonical words; called several times.
        sink: Where the suite publishes.
        backend: Makes the backend; the CPU one by default.
    """

    schema: Schema
    words: Words
    load: Callable[[Words], Engine]
    sink: Sink = field(default_factory=MemorySink)
    backend: Callable[[Binding], Backend] = CpuBackend

    def start(self, backend: Callable[[Binding], Backend] | None = None) -> tuple[Engine, Applier, ContractRun]:
        """A loaded engine, its applier, joined, and the run at version 0."""
        run = ContractRun(self.sink, self.schema, self.words)
        engine = self.load(self.words)
        config = ApplyConfig(run=self.schema.run, workers=1)
        applier = Applier(engine, self.sink, config, backend=backend or self.backend)
        expect(applier.join().version == 0, "a cold loaded engine holds version 0, proven by content")
        return engine, applier, run

    def require(self, engine: Engine, words: Words, what: str) -> None:
        """All live tensors that matter have the bytes of a cold load."""
        cold = self.load(words)
        mine, theirs = written(engine, self.schema), written(cold, self.schema)
        expect(mine.keys() == theirs.keys(), f"{what}: two loads have the same live tensors")
        wrong = [n for n in mine if bytes_of(mine[n]) != bytes_of(theirs[n])]
        expect(not wrong, f"{what}: {wrong[:10]} differ from a cold load")


def written(engine: Engine, schema: Schema) -> dict[str, torch.Tensor]:
    """The live tensors that updates write or derive."""
    names = {r.storage for x in engine.layouts(schema).values() for r in x.records}
    names |= {n for d in engine.derivations(schema) for n in d.outputs}
    tensors = engine.tensors()
    return {n: tensors[n] for n in sorted(names)}


def check_every_word_has_one_place(case: EngineCase) -> None:
    """Binding proves it; a name that the engine does not know is an error that says it."""
    bind(case.load(case.words), case.schema, shadow_limit_nbytes=1 << 30)
    extra = TensorSpec("tensor.that.no.engine.has", "BF16", (3, 5))
    with raises(PlanError, extra.name):
        bind(
            case.load(case.words),
            replace(case.schema, tensors=(*case.schema.tensors, extra)),
            shadow_limit_nbytes=1 << 30,
        )


def check_updates_equal_cold_loads(case: EngineCase) -> None:
    """Some words, most words, no word: warm and cold are the same bytes after each version."""
    engine, applier, run = case.start()
    words = dict(case.words)
    for version, density in enumerate((0.01, 0.9, 0.0, 0.3), 1):
        words = changed_words(case.schema, words, density, seed=version)
        run.publish(words)
        expect(applier.update().version == version, f"version {version} is held after its update")
        case.require(engine, words, f"version {version}")
        applier.audit()


def check_no_live_tensor_is_left_behind(case: EngineCase) -> None:
    """Live tensors that hold the weights once more (a transpose, a cast, a packed copy) are as fresh as those written.

    Which they are is seen from cold loads: equal in two loads of the same words, different in loads of other ones.
    """
    engine, applier, run = case.start()
    others = sorted(engine.tensors().keys() - written(engine, case.schema).keys())
    words = changed_words(case.schema, case.words, 0.5, seed=1)
    first, again, cold = (case.load(w).tensors() for w in (case.words, case.words, words))
    shared = [n for n in others if n in first and n in again and n in cold]
    holding = [n for n in shared if bytes_of(first[n]) == bytes_of(again[n]) != bytes_of(cold[n])]
    run.publish(words)
    applier.update()
    live = engine.tensors()
    stale = [n for n in holding if n not in live or bytes_of(live[n]) != bytes_of(cold[n])]
    expect(
        not stale,
        f"live tensors {stale[:10]} hold weights, no layout or derivation names them, and they are not a cold load's after "
        "an update: map them as copies, derive them, or refresh them in resume()",
    )


def check_observation_follows_the_weights(case: EngineCase) -> None:
    """Output after an update is a cold load's: nothing computes with what the engine packed from its first weights."""
    engine, applier, run = case.start()
    if engine.observe() is None:
        return
    for version, density in enumerate((0.5, 0.02), 1):
        words = changed_words(case.schema, run.words, density, seed=version)
        run.publish(words)
        applier.update()
        expect(
            engine.observe() == case.load(words).observe(),
            f"version {version}: output is not a cold load's, though the live tensors are: the engine computes with a copy",
        )


def check_weights_are_what_it_computes_with(case: EngineCase) -> None:
    """Flipped bits change the output, as in the self-test; says nothing of engines that cannot be observed."""
    ContractRun(case.sink, case.schema, case.words)
    engine = case.load(case.words)
    config = ApplyConfig(run=case.schema.run, workers=1, self_test=True)
    try:
        Applier(engine, case.sink, config, backend=case.backend).join()
    except (PlanError, TaintedError) as e:
        raise AssertionError(str(e)) from e
    case.require(engine, case.words, "the self-test")


def check_nothing_moves(case: EngineCase) -> None:
    """Addresses, shapes and strides stay over updates; what moved is refused before any write."""
    engine, applier, run = case.start()
    before = {n: (t.data_ptr(), t.shape, t.stride()) for n, t in written(engine, case.schema).items()}
    run.publish(changed_words(case.schema, case.words, 0.1, seed=1))
    real = engine.tensors
    name = next(iter(before))
    engine.tensors = lambda: {**real(), name: real()[name].clone()}  # type: ignore[method-assign]
    with raises(BaseMismatchError, name):
        applier.update()
    expect(not applier.ready, "an engine whose tensors moved is not ready")
    engine.tensors = real  # type: ignore[method-assign]
    expect(applier.join().version == 0, "once it is back, a join finds its version")
    expect(applier.update().version == 1, "and the update works")
    after = {n: (t.data_ptr(), t.shape, t.stride()) for n, t in written(engine, case.schema).items()}
    expect(before == after, "an update moved live tensors")


def check_pause_and_resume(case: EngineCase) -> None:
    """One pause and one resume an apply, in this order, with the version; none where nothing is to do."""
    engine, applier, run = case.start()
    events = record(engine)
    run.publish(changed_words(case.schema, case.words, 0.1, seed=1))
    applier.update()
    expect(events == ["pause", "resume 1"], f"an update paused and resumed once: {events}")
    applier.update()
    expect(len(events) == 2, "an update with nothing to do left the engine alone")
    applier.rollback()
    expect(events[2:] == ["pause", "resume 0"], f"a rollback says the version it goes back to: {events}")
    case.require(engine, case.words, "rollback")


def check_failed_update_is_undone(case: EngineCase) -> None:
    """Bytes, derived tensors and version are as before, and the engine runs again."""
    engine, applier, run = case.start(lambda b: _Fails(case.backend(b), undo=True))
    events = record(engine)
    run.publish(changed_words(case.schema, case.words, 0.2, seed=1))
    with raises(UndoneError, "undone"):
        applier.update()
    case.require(engine, case.words, "a failed update")
    expect(events == ["pause", "resume 0"], f"the engine runs on its old version: {events}")
    expect((applier.version, applier.ready) == (0, True), "the old version is held and served")


def check_failed_undo_keeps_it_stopped(case: EngineCase) -> None:
    """Quarantine, and no resume after it."""
    engine, applier, run = case.start(lambda b: _Fails(case.backend(b), undo=False))
    events = record(engine)
    run.publish(changed_words(case.schema, case.words, 0.2, seed=1))
    with raises(TaintedError, "replace the replica"):
        applier.update()
    expect(events == ["pause", "quarantine"], f"a tainted engine is not resumed: {events}")
    expect(not applier.ready, "a tainted engine is not ready")


def check_anchor_over_other_weights(case: EngineCase) -> None:
    """An engine that holds anything else takes an anchor and then the deltas after it."""
    run = ContractRun(case.sink, case.schema, case.words, root="anchor")
    other = changed_words(case.schema, case.words, 0.5, seed=9)
    engine = case.load(other)
    applier = Applier(engine, case.sink, ApplyConfig(run=case.schema.run, workers=1), backend=case.backend)
    expect(applier.join().versions == (0,), "the anchor was loaded")
    case.require(engine, case.words, "an anchor")
    words = changed_words(case.schema, case.words, 0.1, seed=1)
    run.publish(words)
    applier.update()
    case.require(engine, words, "a delta after an anchor")


def check_gather_and_observe(case: EngineCase) -> None:
    """Gathering keeps rank order; observing twice gives the same, where it gives anything."""
    engine = case.load(case.words)
    mine = bytes([engine.rank]) * 3
    found = engine.gather(mine)
    expect(len(found) == engine.num_ranks and found[engine.rank] == mine, "gather gives every rank's bytes in order")
    expect(engine.observe() == engine.observe(), "output for a fixed input is the same twice")


CHECKS: tuple[Callable[[EngineCase], None], ...] = (
    check_every_word_has_one_place,
    check_updates_equal_cold_loads,
    check_no_live_tensor_is_left_behind,
    check_observation_follows_the_weights,
    check_weights_are_what_it_computes_with,
    check_nothing_moves,
    check_pause_and_resume,
    check_failed_update_is_undone,
    check_failed_undo_keeps_it_stopped,
    check_anchor_over_other_weights,
    check_gather_and_observe,
)


class _Fails(Backend):
    """Writes half of what it is given, then raises; undo works, or raises too."""

    name = "failing"

    def __init__(self, inner: Backend, *, undo: bool) -> None:
        self.inner, self.undo = inner, undo

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """The inner backend's."""
        return self.inner.place(frames)

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        """Half, then an error."""
        for p in placed[: (len(placed) + 1) // 2]:
            p.xor_()
        raise OSError("the suite lets this write fail")

    def undo_(self, placed: Sequence[Placed]) -> list[Sums]:
        """The inner backend's undo, or an error."""
        if not self.undo:
            raise OSError("the suite lets this undo fail")
        return self.inner.undo_(placed)
