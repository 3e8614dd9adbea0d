"""Versions: chains, wrong bases, anchors, stage ahead, rollback, and what a restart finds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from megasync.config import ApplyConfig
from megasync.errors import (
    BaseMismatchError,
    FormatError,
    LiveMismatchError,
    NeedsAnchorError,
    RetryError,
    SchemaMismatchError,
    UndoneError,
)
from megasync.manifest import manifest_key, root_of
from megasync.receiver import route
from megasync.receiver.applier import Applier
from megasync.receiver.ledger import require_base
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, plain_engine, words_of

SPECS = [
    spec("embed", "BF16", (50, 16)),
    spec("layers.0.w", "U8", (40, 30)),
    spec("layers.0.s", "F32", (5,)),
    spec("vision.tower", "F32", (9, 9), frozen=True),
]

Words = Mapping[str, np.ndarray]


class Run:
    """A run of some versions: 0 is a checkpoint or an anchor, the rest deltas."""

    def __init__(self, num: int = 0, *, root: str = "checkpoint") -> None:
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS), frame_changed=30)
        self.words: list[dict[str, np.ndarray]] = [random_words(SPECS)]
        if root == "anchor":
            self.publisher.anchor(self.words[0])
        else:
            self.publisher.checkpoint(self.words[0])
        for _ in range(num):
            self.step()

    @property
    def sink(self) -> MemorySink:
        return self.publisher.sink  # type: ignore[return-value]

    def step(self, density: float = 0.05) -> None:
        names = [t.name for t in SPECS if not t.frozen]
        self.words.append(changed(self.words[-1], density, seed=len(self.words), names=names))
        self.publisher.delta(self.words[-1])

    def anchor(self) -> None:
        names = [t.name for t in SPECS if not t.frozen]
        self.words.append(changed(self.words[-1], 0.1, seed=len(self.words), names=names))
        self.publisher.anchor(self.words[-1], version=len(self.words) - 1)

    def applier(self, words: Words, path: Path | None = None, **config: object) -> tuple[Applier, PlainEngine]:
        engine = plain_engine(words)
        made = ApplyConfig(**({"workers": 1} | config))  # type: ignore[arg-type]
        return Applier(engine, self.sink, made, status_path=path), engine


def require_words(engine: PlainEngine, words: Words) -> None:
    for n, w in words.items():
        np.testing.assert_array_equal(words_of(engine.live[n]), w, err_msg=n)


def test_case_2_same_version_twice_is_a_no_op() -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0])
    applier.join()
    assert applier.update(1).versions == (1,)
    events = list(engine.events)
    for again in (applier.update(1), applier.update()):
        assert (again.from_version, again.version, again.versions, again.pause_s) == (1, 1, (), 0.0)
    assert engine.events == events
    require_words(engine, run.words[1])


def test_case_5_manifest_that_lost_its_touched_names_is_an_error() -> None:
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()

    def lose_names(m):  # type: ignore[no-untyped-def]
        return replace(m, touched_ids=m.touched_ids[:0], new_states=m.new_states[:0], touched_olds=m.touched_olds[:0])

    run.publisher.edit_manifest = lose_names
    run.step()
    with pytest.raises(FormatError, match="metadata was lost"):
        applier.update()
    assert applier.version == 0
    require_words(engine, run.words[0])


def test_case_6_unparsable_head_keeps_the_version() -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0])
    applier.join()
    applier.update()
    good = run.sink.read_head("run")
    assert good is not None
    for bad in (good[:-3], b"\x00" * 40, b"7", good + b"x"):
        run.sink._heads["run"] = bad
        with pytest.raises(FormatError, match="head of run 'run'"):
            applier.update()
        assert (applier.version, applier.ready) == (1, True)
    require_words(engine, run.words[1])


def test_case_7_step_without_changes_advances_the_version() -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0])
    applier.join()
    run.words.append(run.words[-1])
    manifest = run.publisher.delta(run.words[-1])
    assert (manifest.num_changed, len(manifest.frames)) == (0, 0)
    run.step()
    result = applier.update()
    assert (result.versions, result.version) == ((1, 2, 3), 3)
    assert engine.events == ["pause", ("resume", 1), ("holds", 2), "pause", ("resume", 3)]
    require_words(engine, run.words[3])


def test_case_12_wrong_base_is_refused_with_both_numbers() -> None:
    run = Run(6)
    applier, engine = run.applier(run.words[0])
    applier.join()
    applier.update(3)
    held = applier._session.ledger.manifest  # type: ignore[union-attr]
    with pytest.raises(BaseMismatchError, match=r"version 6 .*starts from version 5, this engine holds version 3"):
        require_base(held, run.publisher.newest)  # type: ignore[arg-type]
    jump = Applier(engine, run.sink, ApplyConfig(workers=1), route=lambda reader, ledger, wanted: [wanted])
    assert jump.join().version == 3
    with pytest.raises(BaseMismatchError, match=r"starts from version 5, this engine holds version 3"):
        jump.update()
    assert jump.version == 3
    require_words(engine, run.words[3])


def test_case_4_pruned_chain_is_not_replayed_onto_another_base() -> None:
    run = Run(5)
    applier, engine = run.applier(run.words[0])
    applier.join()
    applier.update(2)
    run.sink.delete(manifest_key("run", 3, 1))
    fresh = Applier(engine, run.sink, ApplyConfig(workers=1))
    with pytest.raises(NeedsAnchorError, match=r"version 4 .*starts from version 3"):
        fresh.join()
    applier._reader._manifests.clear()
    with pytest.raises(NeedsAnchorError, match="this engine holds version 2"):
        applier.update()
    require_words(engine, run.words[2])


def test_case_17_three_versions_behind_each_step_is_proved() -> None:
    run = Run(3)
    one, engine = run.applier(run.words[0])
    one.join()
    result = one.update()
    assert result.versions == (1, 2, 3)
    require_words(engine, run.words[3])
    other, second = run.applier(run.words[0])
    other.join()
    for v in (1, 2, 3):
        other.update(v)
        require_words(second, run.words[v])
    assert all((words_of(engine.live[n]) == words_of(second.live[n])).all() for n in engine.live)
    assert second.events == engine.events == [e for v in (1, 2, 3) for e in ("pause", ("resume", v))]


def test_case_25_engine_with_checkpoint_weights_takes_no_traffic_before_it_caught_up(tmp_path: Path) -> None:
    run = Run(2)
    applier, engine = run.applier(run.words[0], tmp_path / "status.json")
    joined = applier.join()
    assert (joined.version, applier.ready, applier.status.state) == (0, False, "behind")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "behind"
    applier.update()
    assert (applier.version, applier.ready) == (2, True)
    require_words(engine, run.words[2])


@pytest.mark.parametrize("version", [0, 1, 3])
def test_join_finds_the_version_by_content(version: int) -> None:
    run = Run(3)
    applier, engine = run.applier(run.words[version])
    assert applier.join().version == version
    assert applier.ready == (version == 3)
    applier.update()
    require_words(engine, run.words[3])


def test_join_before_anything_was_published_asks_to_retry() -> None:
    applier, _ = Run().applier(random_words(SPECS))
    empty = Applier(plain_engine({}), MemorySink(), ApplyConfig(run="other"))
    with pytest.raises(RetryError, match="no publication yet"):
        empty.join()
    with pytest.raises(ValueError, match="join"):
        applier.update()


def test_unknown_weights_without_an_anchor_are_named() -> None:
    run = Run(2)
    wrong = {n: w.copy() for n, w in run.words[1].items()}
    wrong["layers.0.w"][3, 3] ^= 1
    applier, engine = run.applier(wrong)
    with pytest.raises(BaseMismatchError, match=r"1 tensors differ from version 1, the closest: layers\.0\.w"):
        applier.join()
    assert not applier.ready
    require_words(engine, wrong)


def test_case_10_anchor_covers_everything_over_unknown_weights() -> None:
    run = Run(1, root="anchor")
    unknown = random_words(SPECS, seed=99) | {"vision.tower": run.words[0]["vision.tower"]}
    applier, engine = run.applier(unknown)
    joined = applier.join()
    assert (joined.version, joined.versions, applier.ready) == (0, (0,), False)
    require_words(engine, run.words[0])
    applier.update()
    require_words(engine, run.words[1])
    assert applier.audit().version == 1


def test_anchor_does_not_hide_that_a_frozen_tensor_is_another() -> None:
    run = Run(0, root="anchor")
    unknown = random_words(SPECS, seed=99)
    applier, engine = run.applier(unknown)
    with pytest.raises(BaseMismatchError, match=r"frozen tensors vision\.tower"):
        applier.join()
    require_words(engine, unknown)


@pytest.mark.parametrize("limit", [1 << 30, 10_000])
def test_case_15_new_full_version_resets_the_chain(limit: int, tmp_path: Path) -> None:
    """With undo where it fits the memory allowed, else written as it is fetched."""
    run = Run(1)
    applier, engine = run.applier(run.words[0], tmp_path / "s", staged_limit_nbytes=limit)
    applier.join()
    applier.update()
    run.anchor()
    result = applier.update()
    assert (result.versions, result.version, applier.ready) == ((2,), 2, True)
    require_words(engine, run.words[2])
    run.step()
    run.step()
    assert applier.update().versions == (3, 4)
    require_words(engine, run.words[4])
    assert engine.events[2:4] == ["pause", ("resume", 2)]


def test_anchor_with_bytes_of_another_version_is_refused_before_any_write() -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0])
    applier.join()
    applier.update()
    true_states = run.publisher.states
    run.publisher.states = lambda words: true_states(run.words[0])  # type: ignore[method-assign]
    run.anchor()
    with pytest.raises(FormatError, match="do not have the state digests of its table"):
        applier.update()
    require_words(engine, run.words[1])
    assert (applier.version, applier.ready) == (1, True)


def test_case_19_long_chain_still_ends_and_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "LONG_CHAIN", 4)
    run = Run(6)
    applier, engine = run.applier(run.words[0])
    with caplog.at_level(logging.WARNING):
        applier.join()
    assert "6 steps from version 0 to 6" in caplog.text
    applier.update()
    require_words(engine, run.words[6])


def test_case_21_publication_without_a_head_is_not_seen() -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0])
    applier.join()
    before = run.sink.read_head("run")
    run.step()
    assert before is not None
    run.sink._heads["run"] = before  # all payloads and the manifest are there, the head never moved
    assert applier.update().versions == (1,)
    require_words(engine, run.words[1])


def test_case_87_head_before_its_manifest_is_an_error_not_a_half_version() -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0])
    applier.join()
    run.step()
    key = manifest_key("run", 2, 1)
    data = run.sink.read(key)
    run.sink.delete(key)
    with pytest.raises(RetryError, match="manifest of version 2"):
        applier.update()
    assert applier.version == 0
    run.sink.create(key, [data])
    assert applier.update().version == 2
    require_words(engine, run.words[2])


def test_another_history_of_the_same_version_is_refused() -> None:
    run = Run(2)
    applier, engine = run.applier(run.words[0])
    applier.join()
    applier.update(1)
    other = Run()
    other.publisher.head = None
    other.words.append(changed(other.words[0], 0.3, seed=77, names=["embed"]))
    other.publisher.delta(other.words[-1])
    other.step()
    applier._reader = type(applier._reader)(other.sink, "run")
    with pytest.raises(NeedsAnchorError, match=r"holds version 1 .*another history"):
        applier.update()
    require_words(engine, run.words[1])


def test_head_older_than_what_is_held_is_refused() -> None:
    run = Run(2)
    applier, engine = run.applier(run.words[0])
    applier.join()
    applier.update()
    fresh = Run(1)
    run.sink._heads["run"] = fresh.sink.read_head("run") or b""
    with pytest.raises(BaseMismatchError, match="version 1 is wanted, this engine holds version 2"):
        applier.update()
    assert applier.version == 2
    require_words(engine, run.words[2])


def test_manifest_whose_root_is_not_of_its_states_is_refused() -> None:
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()
    run.publisher.edit_manifest = lambda m: replace(m, root=root_of(np.zeros((1, 16), np.uint8)))
    run.step()
    with pytest.raises(FormatError, match="root"):
        applier.update()
    require_words(engine, run.words[0])
    assert engine.events == []


def test_delta_that_leads_elsewhere_than_it_says_is_refused_before_any_write() -> None:
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()
    true_states = run.publisher.states

    def lie(words: Words) -> np.ndarray:
        table = true_states(words).copy()
        table[run.publisher.schema.ids["embed"], 3] ^= 1
        return table

    run.publisher.states = lie  # type: ignore[method-assign]
    run.step()
    with pytest.raises(FormatError, match="leads to state digest"):
        applier.update()
    assert engine.events == []
    require_words(engine, run.words[0])


def test_live_words_that_someone_else_changed_are_found_before_any_write() -> None:
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()
    run.step()
    name = "layers.0.w"
    at = np.argwhere(run.words[0][name] != run.words[1][name])[0]
    engine.live[name][tuple(at)] ^= 8
    with pytest.raises(LiveMismatchError, match=r"live words of layers\.0\.w are not those of version 0"):
        applier.update()
    assert engine.events == []
    assert (applier.version, applier.ready, applier.status.state) == (-1, False, "behind")
    assert "layers.0.w" in applier.status.reason
    engine.live[name][tuple(at)] ^= 8
    with pytest.raises(BaseMismatchError, match="join again"):
        applier.update()
    applier.join()
    applier.update()
    require_words(engine, run.words[1])


def test_words_edited_after_staging_are_no_version_even_once_the_touched_ones_are_put_back() -> None:
    """The undo heals the very words that would betray the edit: nothing may build on the others."""
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()
    run.step()
    assert applier.stage() is not None
    engine.live["layers.0.w"].view(-1)[:] ^= 1
    problems: list[Exception] = []
    with pytest.raises(BaseMismatchError, match="join again"):
        applier.follow(Event(), poll_s=0.0, wait=lambda s: None, on_problem=problems.append)
    (first,) = problems
    assert isinstance(first, UndoneError)
    assert "something else writes" in str(first)
    assert (applier.version, applier.ready) == (-1, False)


def test_calls_from_several_threads_take_turns() -> None:
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()
    stop, faults = Event(), []  # type: ignore[var-annotated]

    def beside(call: Callable[[], object]) -> None:
        while not stop.is_set():
            try:
                call()
            except Exception as e:
                faults.append(e)
                return

    threads = [Thread(target=beside, args=(call,)) for call in (applier.update, applier.audit, applier.stage)]
    for t in threads:
        t.start()
    for _ in range(15):
        run.step()
        applier.update()
    stop.set()
    for t in threads:
        t.join()
    applier.update()
    assert not faults
    assert applier.audit().version == applier.version == 15
    require_words(engine, run.words[-1])
    applier.close()
    with pytest.raises(ValueError, match="the applier is closed"):
        applier.update()


def test_audit_that_fails_takes_the_engine_out_and_asks_to_join_again(tmp_path: Path) -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0], tmp_path / "s")
    applier.join()
    applier.update()
    engine.live["embed"][0, 0] ^= 1
    with pytest.raises(BaseMismatchError, match="audit: embed are not version 1's"):
        applier.audit()
    assert not applier.ready
    with pytest.raises(BaseMismatchError, match="join again"):
        applier.update()
    engine.live["embed"][0, 0] ^= 1
    assert applier.join().version == 1
    assert applier.ready


@pytest.mark.parametrize("workers", [1, 3])
def test_versions_staged_ahead_are_applied_without_another_read(workers: int) -> None:
    run = Run(3)
    applier, engine = run.applier(run.words[0], workers=workers)
    applier.join()
    first, second = applier.stage(), applier.stage()
    assert first is not None
    assert second is not None
    assert (first.version, first.ahead, second.version, second.ahead) == (1, False, 2, True)
    require_words(engine, run.words[0])
    assert engine.events == []
    for v in (1, 2):
        assert run.publisher.newest is not None
        run.sink.delete(f"run/v{v:012d}/e000001/payload-00000")
    assert applier.update(2).versions == (1, 2)
    require_words(engine, run.words[2])
    assert applier.stage(3) is not None
    assert applier.stage() is None
    applier.update()
    require_words(engine, run.words[3])


@pytest.mark.parametrize("density", [0.05, 0.7])
def test_rollback_returns_to_the_version_before_with_proofs(density: float, tmp_path: Path) -> None:
    run = Run(1)
    applier, engine = run.applier(run.words[0], tmp_path / "s")
    applier.join()
    run.step(density)
    applier.update()
    back = applier.rollback()
    assert (back.from_version, back.version, back.versions, applier.version) == (2, 1, (1,), 1)
    require_words(engine, run.words[1])
    assert applier.audit().version == 1
    assert json.loads((tmp_path / "s").read_text())["version"] == 1
    with pytest.raises(NeedsAnchorError, match="nothing is kept"):
        applier.rollback()
    assert applier.update().versions == (2,)
    require_words(engine, run.words[2])
    assert engine.events[-4:] == ["pause", ("resume", 1), "pause", ("resume", 2)]


def test_rollback_of_an_anchor_and_of_words_that_changed() -> None:
    run = Run()
    applier, engine = run.applier(run.words[0])
    applier.join()
    run.anchor()
    applier.update()
    applier.rollback()
    require_words(engine, run.words[0])
    applier.update()
    engine.live["embed"].view(-1)[:] ^= 1
    with pytest.raises(LiveMismatchError, match="live words of embed are not those of version 1; nothing was touched"):
        applier.rollback()
    assert (applier.version, applier.ready) == (-1, False)
    engine.live["embed"].view(-1)[:] ^= 1
    assert applier.join().version == 1


@pytest.mark.parametrize("root", ["checkpoint", "anchor"])
def test_rollback_reports_what_it_changed_not_what_the_version_before_once_did(root: str) -> None:
    run = Run(root=root)
    applier, _ = run.applier(run.words[0])
    applier.join()
    for density in (0.05, 0.6):
        run.step(density)
    up = applier.update(1)
    back = applier.rollback()
    num = sum(int((a != b).sum()) for a, b in zip(run.words[0].values(), run.words[1].values(), strict=True))
    nbytes = sum(
        int((a != b).sum()) * a.itemsize for a, b in zip(run.words[0].values(), run.words[1].values(), strict=True)
    )
    assert (back.num_changed, back.num_written) == (up.num_changed, up.num_written) == (num, num)
    assert back.density == up.density == nbytes / run.publisher.schema.nbytes
    applier.update()
    back = applier.rollback()
    assert back.num_changed == sum(
        int((a != b).sum()) for a, b in zip(run.words[1].values(), run.words[2].values(), strict=True)
    )
    assert back.version == 1


def test_rollback_memory_is_bounded() -> None:
    run = Run(1)
    applier, _ = run.applier(run.words[0], staged_limit_nbytes=9_000)
    applier.join()
    applier.update()
    assert applier._session is not None
    kept = applier._session.last
    run.step(0.2)
    applier.update()
    assert kept is not None
    assert applier._session.last is not kept
    assert applier._session.staged_nbytes <= 9_000


def test_publication_of_another_run_is_refused() -> None:
    run, other = Run(1), Publisher(MemorySink(), make_schema("other", SPECS))
    other.checkpoint(run.words[0])
    applier, _ = run.applier(run.words[0])
    applier.join()
    theirs = other.newest
    assert theirs is not None
    from megasync.manifest import decode_manifest

    with pytest.raises(SchemaMismatchError, match="run 'other'"):
        decode_manifest(theirs.encoded, run.publisher.schema)
