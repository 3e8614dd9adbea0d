"""What is live before an anchor overwrites it: a wrong layout over the right weights is refused, other weights are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config import ApplyConfig
from megasync.errors import PlanError
from megasync.layout.compose import arrange
from megasync.layout.modes import Layout
from megasync.layout.named import fused_gate_up, marlin_nibbles
from megasync.receiver.applier import Applier
from megasync.receiver.backend import FetchedFrame
from megasync.receiver.prior import hash_sum
from megasync.sinks.base import DEFAULT_TIMEOUT_S
from megasync.sinks.memory import MemorySink
from megasync.types import WORD_DTYPES, TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import Mailbox, PlainEngine, RankEngine, load, on_ranks, words_of

GATE, UP = spec("layers.0.gate", "BF16", (48, 20)), spec("layers.0.up", "BF16", (48, 20))
HEAD, NORM = spec("head", "F32", (33, 7)), spec("layers.0.norm", "BF16", (24,))
SPECS = [GATE, UP, HEAD, NORM]
STORAGES = {"gate_up": (96 * 20, torch.int16), "head": (33 * 7, torch.int32), "norm": (24, torch.int16)}
Words = Mapping[str, np.ndarray]


def rows(part: int) -> Layout:
    return arrange((48, 20), word_nbytes=2).concat(0, offset=48 * part, total=96).to("gate_up")


def right() -> dict[str, Layout]:
    head = arrange((33, 7), word_nbytes=4).to("head")
    return {GATE.name: rows(0), UP.name: rows(1), HEAD.name: head, NORM.name: arrange((24,), word_nbytes=2).to("norm")}


def storages() -> dict[str, torch.Tensor]:
    return {n: torch.zeros(k, dtype=dtype) for n, (k, dtype) in STORAGES.items()}


def two_rows_swapped() -> dict[str, Layout]:
    parts = []
    for first, last, to in ((0, 1, 1), (1, 2, 0), (2, 48, 2)):
        box = arrange((48, 20), word_nbytes=2, start=(first, 0), stop=(last, 20))
        parts += box.concat(0, offset=to, total=96).to("gate_up").records
    return right() | {GATE.name: replace(rows(0), records=tuple(parts))}


def columns_reversed() -> dict[str, Layout]:
    return right() | {HEAD.name: arrange((33, 7), word_nbytes=4).reverse(1).to("head")}


def exchanged() -> dict[str, Layout]:
    return right() | {GATE.name: rows(1), UP.name: rows(0)}


def taking_turns() -> dict[str, Layout]:
    """Rows of gate and up in turn, where the engine has one after the other: each holds half of the other's words."""
    whole = arrange((48, 20), word_nbytes=2)
    return right() | {t.name: whole.interleave(0, 8, k).to("gate_up") for k, t in enumerate((GATE, UP))}


def world(words: Words, live: Words, places: dict[str, Layout], **config: object) -> tuple[PlainEngine, Applier]:
    """A run that starts with an anchor of ``words``, and an engine that loaded ``live`` and says ``places``."""
    publisher = Publisher(MemorySink(), make_schema("run", SPECS), frame_changed=300)
    publisher.anchor(words)
    engine = PlainEngine(load(right(), storages(), live), places)
    return engine, Applier(engine, publisher.sink, ApplyConfig(workers=1, **config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (two_rows_swapped, r"live words of layers\.0\.gate \(1 tensors\)"),
        (columns_reversed, r"live words of head \(1 tensors\)"),
        (exchanged, r"live words of layers\.0\.gate, layers\.0\.up \(2 tensors\)"),
        (taking_turns, r"live words of layers\.0\.gate, layers\.0\.up \(2 tensors\)"),
    ],
)
@pytest.mark.parametrize("limit", [1 << 30, 5_000, 100])
def test_wrong_layout_over_the_right_weights_is_refused(
    places: Callable[[], dict[str, Layout]], named: str, limit: int
) -> None:
    words = random_words(SPECS)
    engine, applier = world(words, words, places(), staged_limit_nbytes=limit)
    before = {n: t.clone() for n, t in engine.live.items()}
    with pytest.raises(PlanError, match=named + r".*layout is wrong.*Nothing was touched"):
        applier.join()
    assert all(torch.equal(before[n], t) for n, t in engine.live.items())
    assert "pause" not in engine.events
    assert applier.version == -1


def older(words: Words) -> Words:
    return changed(words, 0.05, seed=3)


def other(words: Words) -> Words:
    return random_words(SPECS, seed=9)


def zeros(words: Words) -> Words:
    return {n: np.zeros_like(w) for n, w in words.items()}


def one_word(words: Words) -> Words:
    out = {n: w.copy() for n, w in words.items()}
    out[HEAD.name][3, 2] ^= 1
    return out


def copies_before_training(words: Words) -> Words:
    """Gate and up began as one matrix; the run has trained gate only since: what gate holds is what up is now."""
    return {**words, GATE.name: words[UP.name]}


@pytest.mark.parametrize(
    ("live", "matched"), [(older, 0), (other, 0), (zeros, 0), (one_word, 3), (copies_before_training, 3)]
)
@pytest.mark.parametrize("limit", [1 << 30, 100])
def test_other_weights_are_overwritten_with_a_warning(
    live: Callable[[Words], Words], matched: int, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    words = random_words(SPECS)
    engine, applier = world(words, live(words), right(), staged_limit_nbytes=limit)
    with caplog.at_level(logging.WARNING, "megasync.receiver.prior"):
        result = applier.join()
    assert result.versions == (0,)
    assert f"{matched} of 4 tensors" in caplog.text
    assert f"overwrites the other {4 - matched}" in caplog.text
    cold = load(right(), storages(), words)
    assert all(torch.equal(engine.live[n], t) for n, t in cold.items())


class Counting(MemorySink):
    """Writes down how many bytes of payloads were read."""

    payload_nbytes = 0

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().read_into(key, offset, out, timeout_s=timeout_s)
        if "/payload-" in key:
            self.payload_nbytes += len(out)


SLICE_NBYTES = 2 * 96 * 20 + 4 * 33 * 7 + 2 * 24


@pytest.mark.parametrize(
    ("limit", "again"),
    [
        (1 << 30, []),  # staged
        (2 * SLICE_NBYTES - 1, []),  # no room for what is replaced
        (SLICE_NBYTES, []),
        (SLICE_NBYTES - 1, [UP]),  # nor for the last of the masks
        (2 * 48 * 20, [GATE, UP]),
        (10, SPECS),
    ],
)
@pytest.mark.parametrize("torn", [False, True])
def test_late_joiner_reads_and_decodes_the_anchor_once(
    limit: int, again: list[TensorSpec], torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as there is memory: tensors that are neither staged nor kept are read a second time, no others."""
    words = random_words(SPECS)
    publisher = Publisher(Counting(), make_schema("run", SPECS), frame_changed=1)  # a frame for each tile
    manifest = publisher.anchor(words)
    engine = PlainEngine(load(right(), storages(), other(words)), right())
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1, staged_limit_nbytes=limit))
    if torn:
        applier._status.set(state="updating", target=0)
    decoded: list[int] = []
    true_entries = FetchedFrame.entries
    monkeypatch.setattr(FetchedFrame, "entries", lambda f: decoded.append(f.record.offset) or true_entries(f))
    result = applier.join()
    assert result.versions == (0,)
    assert len(decoded) == len(manifest.frames) + len(again)
    assert publisher.sink.payload_nbytes == result.fetched_nbytes  # type: ignore[attr-defined]
    assert applier.telemetry.counts["fetched_nbytes"] == result.fetched_nbytes
    if not again:
        assert result.fetched_nbytes == manifest.payload_total_nbytes
    cold = load(right(), storages(), words)
    assert all(torch.equal(engine.live[n], t) for n, t in cold.items())
    assert applier.ready


def test_weights_of_the_version_are_not_compared_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    words = random_words(SPECS)
    engine, applier = world(words, words, right())
    assert applier.join().proofs == ("audit",)
    assert not caplog.records
    assert np.array_equal(words_of(engine.live["norm"]), words[NORM.name])


def test_few_values_in_another_order_are_no_evidence() -> None:
    """A norm of which two entries changed places by chance is another version, not a wrong layout."""
    words = {**random_words(SPECS), NORM.name: np.tile(np.array([0x3F80, 0x3F81, 0x3F7F], np.uint16), 8)}
    live = {**words, NORM.name: words[NORM.name][::-1].copy()}
    engine, applier = world(words, live, right())
    assert applier.join().versions == (0,)
    assert np.array_equal(words_of(engine.live["norm"]), words[NORM.name])


def test_tensor_of_equal_words_has_no_order() -> None:
    words = {**random_words(SPECS), GATE.name: np.full((48, 20), 0x3F80, np.uint16)}
    _, applier = world(words, words, two_rows_swapped())
    assert applier.join().version == 0


def test_nibbles_in_another_order_are_found() -> None:
    """Packed 4-bit weights: another order of nibbles makes other bytes, so nibbles are what is counted."""
    t = spec("layers.0.packed", "U8", (64, 32))
    words = random_words([t])
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.anchor(words)
    storage = {"s": torch.zeros(64 * 32, dtype=torch.uint8)}
    engine = PlainEngine(
        load({t.name: marlin_nibbles(t.shape, storage="s")}, storage, words),
        {t.name: arrange(t.shape, word_nbytes=1, unit="nibble").permute((1, 0)).to("s")},
    )
    with pytest.raises(PlanError, match=r"live words of layers\.0\.packed"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()


@pytest.mark.parametrize("wrong", [False, True])
def test_ranks_that_took_each_other_s_rows_all_refuse(wrong: bool) -> None:
    """Rank 0 was loaded with rank 1's slices: no rank's own words are its anchor's, those of both together are."""
    specs = [GATE, UP]
    words = random_words(specs)
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.anchor(words)
    mailbox = Mailbox(2)
    storage = {"s": torch.zeros(48 * 20, dtype=torch.int16)}

    def places(rank: int) -> dict[str, Layout]:
        parts = {GATE.name: "gate", UP.name: "up"}
        return {
            n: fused_gate_up(p, (48, 20), word_nbytes=2, storage="s", tp_rank=rank, tp_size=2)  # type: ignore[arg-type]
            for n, p in parts.items()
        }

    live = words if wrong else random_words(specs, seed=4)
    engines = [RankEngine(mailbox, r, live=load(places(1 - r), storage, live), places=places(r)) for r in range(2)]
    appliers = [Applier(e, publisher.sink, ApplyConfig(workers=1)) for e in engines]
    found = on_ranks([a.join for a in appliers])
    if wrong:
        assert [type(x) for x in found] == [PlanError] * 2
        assert all("layers.0.gate, layers.0.up" in str(x) for x in found)
    else:
        assert [a.version for a in appliers] == [0, 0]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 40_000), st.integers(0, 1 << 30))
def test_hash_sum_knows_words_and_not_their_order(word_nbytes: int, num: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 8 * word_nbytes, num, dtype=WORD_DTYPES[word_nbytes], endpoint=False)
    found = hash_sum(words)
    assert 0 <= found < 1 << 64
    assert hash_sum(rng.permutation(words)) == found
    if num:
        words[rng.integers(num)] ^= 1
        assert hash_sum(words) != found
