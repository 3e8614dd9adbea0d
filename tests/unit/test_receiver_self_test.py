"""The self-test where weights reach the engine through derivations, and what flipping leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import PlanError
from megasync.quant.derived import global_scale_product, requantised_to_largest
from megasync.receiver.applier import Applier
from megasync.receiver.engine import Derivation
from megasync.receiver.self_test import _FLIPS, _flip_one, _is_special
from megasync.sinks.memory import MemorySink
from megasync.types import WORD_DTYPES
from tests.unit.publishing import Publisher, make_schema, random_words, spec
from tests.unit.receiving import Mailbox, PlainEngine, RankEngine, identity, live, on_ranks, plain_engine

Tensors = Mapping[str, torch.Tensor]
PLAIN = spec("layers.0.w", "BF16", (20, 32))
LARGE, SMALL = spec("layers.0.large", "F32", (1,)), spec("layers.0.small", "F32", (1,))
SCALES = {LARGE.name: 0.5, SMALL.name: 0.25}


def scale(value: float) -> np.ndarray:
    return np.array([value], np.float32).view(np.uint32)


def largest(x: Tensors) -> dict[str, torch.Tensor]:
    return {"s": torch.maximum(x[LARGE.name], x[SMALL.name])}


def world(derive: Callable[[Tensors], Tensors], s: float, output: Callable[[PlainEngine], bytes]) -> Applier:
    """A plain weight and one live scalar made of two canonical scales."""
    specs = [PLAIN, LARGE, SMALL]
    words = random_words(specs) | {n: scale(v) for n, v in SCALES.items()}
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    engine = PlainEngine(
        {PLAIN.name: live(words[PLAIN.name]), "s": torch.tensor([s])},
        groups=[Derivation("largest", (LARGE.name, SMALL.name), ("s",), derive)],
        seeds=words,
    )
    engine.output = lambda: output(engine)
    return Applier(engine, publisher.sink, ApplyConfig(workers=1, self_test=True))


def both(engine: PlainEngine) -> bytes:
    return b"".join(engine.live[n].numpy().tobytes() for n in (PLAIN.name, "s"))


def scalar(engine: PlainEngine) -> bytes:
    return engine.live["s"].numpy().tobytes()


def plain(engine: PlainEngine) -> bytes:
    return engine.live[PLAIN.name].numpy().tobytes()


def test_the_smaller_of_two_scales_is_told_by_a_larger_value(caplog: pytest.LogCaptureFixture) -> None:
    applier = world(largest, 0.5, both)
    assert applier.join().proofs == ("audit", "self-test")
    assert not caplog.records
    applier.audit()


def test_tensor_without_a_derivation_is_refused_beside_derived_ones() -> None:
    applier = world(largest, 0.5, scalar)
    with pytest.raises(PlanError, match=r"flipping bits of layers\.#\.w changes no output"):
        applier.join()


def test_derived_scales_that_the_output_does_not_show_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megasync.receiver.self_test"):
        applier = world(largest, 0.5, plain)
        assert "self-test" in applier.join().proofs
    assert "could not be told for layers.#.large, layers.#.small: " in caplog.text
    assert "what is derived changes with them" in caplog.text
    applier.audit()


def test_input_that_no_flip_carries_through_is_named_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    def only_large(x: Tensors) -> dict[str, torch.Tensor]:
        return {"s": x[LARGE.name] if float(x[LARGE.name]) == 0.5 else torch.tensor([0.5])}

    with caplog.at_level(logging.WARNING, "megasync.receiver.self_test"):
        applier = world(only_large, 0.5, both)
        assert "self-test" in applier.join().proofs
    assert "no flip of them changes what is derived" in caplog.text
    applier.audit()


def test_requantised_parts_are_told() -> None:
    q, k = spec("layers.0.q", "F8_E4M3", (8, 16)), spec("layers.0.k", "F8_E4M3", (8, 16))
    qs, ks = spec("layers.0.q_scale", "F32", ()), spec("layers.0.k_scale", "F32", ())
    specs = [q, k, qs, ks]
    words = random_words(specs)
    for t in (q, k):
        words[t.name] %= 0x60  # finite, and far from the largest code
    words |= {qs.name: scale(0.02), ks.name: scale(0.5)}
    derive = requantised_to_largest([q.name, k.name], [qs.name, ks.name], "qk", "qk_scale")
    inputs = {
        t.name: torch.from_numpy(words[t.name].copy()).view(torch.float8_e4m3fn if t in (q, k) else torch.float32)
        for t in specs
    }
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    engine = PlainEngine(
        dict(derive(inputs)),
        groups=[Derivation("qk", tuple(inputs), ("qk", "qk_scale"), derive)],
        seeds={n: w.view(np.uint8).reshape(w.shape) if w.itemsize == 1 else w for n, w in words.items()},
    )
    engine.output = lambda: (
        engine.live["qk"].view(torch.uint8).numpy().tobytes() + engine.live["qk_scale"].numpy().tobytes()
    )
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1, self_test=True))
    assert "self-test" in applier.join().proofs
    applier.audit()


def test_derivation_that_refuses_parts_apart_is_flipped_with_its_partners() -> None:
    """One alpha for gate and up refuses scales that differ: flipping one of them alone must leave nothing behind."""
    specs = [spec("layers.0.gate_scale_2", "F32", ()), spec("layers.0.up_scale_2", "F32", ())]
    words = {t.name: scale(0.25) for t in specs}
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    names = [t.name for t in specs]
    engine = PlainEngine(
        {"alpha": torch.tensor([0.25])},
        groups=[Derivation("alpha", tuple(names), ("alpha",), global_scale_product(names, [], "alpha"))],
        seeds=words,
    )
    engine.output = lambda: engine.live["alpha"].numpy().tobytes()
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1, self_test=True))
    assert "self-test" in applier.join().proofs
    applier.audit()


def test_ranks_agree_where_only_one_shows_a_tensor() -> None:
    words = random_words([PLAIN])
    publisher = Publisher(MemorySink(), make_schema("run", [PLAIN]))
    publisher.checkpoint(words)
    mailbox = Mailbox(2)
    engines = [
        RankEngine(mailbox, r, live={PLAIN.name: live(words[PLAIN.name])}, places={PLAIN.name: identity(PLAIN)})
        for r in range(2)
    ]
    from megasync.layout.named import as_copy

    engines[1].places = {PLAIN.name: as_copy(identity(PLAIN))}
    engines[0].output = lambda: plain(engines[0])
    engines[1].output = lambda: b"only the first rank has logits"
    appliers = [Applier(e, publisher.sink, ApplyConfig(workers=1, self_test=True)) for e in engines]
    found = on_ranks([a.join for a in appliers])
    assert all("self-test" in r.proofs for r in found), found  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", _FLIPS)
def test_flips_make_no_nan_and_undo_themselves(dtype: str) -> None:
    """Over every byte pattern (every 16-bit one, samples of wider ones)."""
    size = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2}.get(dtype, 1)
    if size <= 2:
        words = np.arange(1 << 8 * size, dtype=WORD_DTYPES[size])
    else:
        top = np.arange(1 << 16, dtype=WORD_DTYPES[size]) << WORD_DTYPES[size].itemsize * 8 - 16
        words = np.concatenate((top, top | 1))
    t = spec("w", dtype, words.shape)
    engine = plain_engine({"w": words})
    from megasync.receiver.bind import bind

    binding = bind(engine, make_schema("run", [t]), shadow_limit_nbytes=0)
    usual = ~_is_special(words, dtype)
    for bit in range(len(_FLIPS[dtype])):
        _flip_one(binding, 0, bit)
        now = binding.words("w", size).copy()
        assert np.array_equal(now[~usual], words[~usual])
        assert not _is_special(now[usual], dtype).any()
        assert (now[usual] != words[usual]).mean() > 0.5
        _flip_one(binding, 0, bit)
        assert np.array_equal(binding.words("w", size), words)
    kinds = {"F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}
    if dtype in kinds:
        values = torch.from_numpy(words.copy()).view(kinds[dtype]).float()
        assert np.array_equal(torch.isfinite(values).numpy(), usual)
