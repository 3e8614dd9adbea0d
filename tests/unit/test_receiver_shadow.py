"""Canonical shadows: live tensors that are value transforms of canonical ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, MemoryPlanError, PlanError, UndoneError
from megasync.receiver.applier import Applier
from megasync.receiver.bind import bind
from megasync.receiver.engine import Derivation
from megasync.receiver.shadow import is_widening, same_bytes, widening
from megasync.sinks.memory import MemorySink
from megasync.types import Box
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import BrokenBackend, Mailbox, PlainEngine, RankEngine, live, on_ranks, words_of

Tensors = Mapping[str, torch.Tensor]


def bf16(words: np.ndarray) -> torch.Tensor:
    return live(words).view(torch.bfloat16)


NORM = spec("layers.0.norm", "BF16", (64,))
PLAIN = spec("layers.0.w", "BF16", (20, 32))


def cast_world(**more: object) -> tuple[Publisher, PlainEngine, Applier, dict[str, np.ndarray]]:
    """A norm that the engine keeps in single precision, and a plain weight."""
    words = random_words([NORM, PLAIN])
    publisher = Publisher(MemorySink(), make_schema("run", [NORM, PLAIN]), frame_changed=10)
    publisher.checkpoint(words)
    engine = PlainEngine(
        {"norm32": bf16(words[NORM.name]).float(), PLAIN.name: live(words[PLAIN.name])},
        groups=[widening(NORM.name, "norm32", NORM, torch.float32)],
    )
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1), **more)  # type: ignore[arg-type]
    return publisher, engine, applier, words


def test_case_32_cast_is_derived_in_place_at_the_same_address() -> None:
    publisher, engine, applier, words = cast_world()
    applier.join()
    address = engine.live["norm32"].data_ptr()
    for v, density in ((1, 0.3), (2, 0.9)):
        words = changed(words, density, seed=v)
        publisher.delta(words)
        result = applier.update()
        assert result.derived == (f"cast of {NORM.name}",)
        assert torch.equal(engine.live["norm32"], bf16(words[NORM.name]).float())
        assert engine.live["norm32"].data_ptr() == address
        np.testing.assert_array_equal(words_of(engine.live[PLAIN.name]), words[PLAIN.name])
        applier.audit()
    applier.rollback()
    assert applier.version == 1
    applier.audit()


def test_cast_keeps_nan_payloads_and_negative_zero() -> None:
    words = {NORM.name: np.array([0x8000, 0x7FC1, 0xFF81, 0x7F80] * 16, np.uint16)}
    publisher = Publisher(MemorySink(), make_schema("run", [NORM]))
    publisher.checkpoint(words)
    wide = (words[NORM.name].astype(np.uint32) << 16).view(np.float32)
    engine = PlainEngine(
        {"norm32": torch.from_numpy(wide)}, groups=[widening(NORM.name, "norm32", NORM, torch.float32)]
    )
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    new = {NORM.name: words[NORM.name].copy()}
    new[NORM.name][5] = 0x7FC3
    publisher.delta(new)
    applier.update()
    assert words_of(engine.live["norm32"])[5] == 0x7FC30000


def test_untouched_groups_are_not_derived() -> None:
    publisher, _, applier, words = cast_world()
    applier.join()
    publisher.delta(changed(words, 0.1, names=[PLAIN.name]))
    assert applier.update().derived == ()


@pytest.mark.parametrize("written", [1, 2, 3])
def test_undo_restores_shadows_and_derived_tensors(written: int) -> None:
    publisher, engine, applier, words = cast_world(backend=lambda b: BrokenBackend(b, write_fails_after=written))
    applier.join()
    before = {n: t.clone() for n, t in engine.live.items()}
    publisher.delta(changed(words, 0.5))
    with pytest.raises(UndoneError):
        applier.update()
    assert all(same_bytes(before[n], engine.live[n]) for n in before)
    applier.audit()


def alpha_world(broken: bool = False) -> tuple[Publisher, PlainEngine, Applier, dict[str, np.ndarray]]:
    """Global scales of two fused shards, of which the engine keeps the maximum and a product with the input scale."""
    specs = [
        spec("layers.0.gate.weight_scale_2", "F32", (1,)),
        spec("layers.0.up.weight_scale_2", "F32", (1,)),
        spec("layers.0.input_scale", "F32", (1,)),
    ]
    words = {t.name: np.array([v], np.float32).view(np.uint32) for t, v in zip(specs, (2.0, 3.0, 0.5), strict=True)}
    publisher = Publisher(MemorySink(), make_schema("run", specs), frame_changed=1)
    publisher.checkpoint(words)
    calls: list[int] = []

    def derive(x: Tensors) -> Tensors:
        calls.append(1)
        if broken and len(calls) > 1:
            raise RuntimeError("the derivation failed")
        top = torch.maximum(x[specs[0].name], x[specs[1].name])
        return {"global": top, "alpha": top * x[specs[2].name]}

    group = Derivation("alphas of layer 0", tuple(t.name for t in specs), ("global", "alpha"), derive)
    engine = PlainEngine({"global": torch.tensor([3.0]), "alpha": torch.tensor([1.5])}, groups=[group], seeds=words)
    engine.calls = calls  # type: ignore[attr-defined]
    return publisher, engine, Applier(engine, publisher.sink, ApplyConfig(workers=1)), words


def test_case_46_89_group_is_derived_once_after_its_last_member() -> None:
    publisher, engine, applier, _ = alpha_world()
    applier.join()
    engine.calls.clear()  # type: ignore[attr-defined]
    new = {n: np.array([v], np.float32).view(np.uint32) for n, v in zip(publisher.words, (4.0, 3.5, 0.25), strict=True)}
    publisher.delta(new)
    assert len(publisher.newest.frames) == 3  # type: ignore[union-attr]
    applier.update()
    assert len(engine.calls) == 1  # type: ignore[attr-defined]
    assert (engine.live["global"].item(), engine.live["alpha"].item()) == (4.0, 1.0)


def test_failing_derivation_is_undone() -> None:
    publisher, engine, applier, words = alpha_world(broken=True)
    applier.join()
    publisher.delta(changed(words, 1.0))
    with pytest.raises(UndoneError, match="the derivation failed"):
        applier.update()
    assert (engine.live["global"].item(), engine.live["alpha"].item()) == (3.0, 1.5)
    assert engine.events == ["pause", ("resume", 0)]


def test_derivation_that_breaks_its_promise_is_undone() -> None:
    publisher, engine, applier, words = cast_world()
    group = engine.groups[0]
    applier.join()
    publisher.delta(changed(words, 0.5))
    from dataclasses import replace

    applier._session.binding.shadows.derivations = (  # type: ignore[union-attr]
        replace(group, derive=lambda x: {"norm32": x[NORM.name]}),
    )
    with pytest.raises(UndoneError, match=r"norm32 is live torch\.float32\[64\], derived torch\.bfloat16\[64\]"):
        applier.update()


def test_live_tensor_that_is_not_its_derivation_is_found_at_join() -> None:
    _, engine, applier, _ = alpha_world()
    engine.live["alpha"].fill_(7)
    with pytest.raises(BaseMismatchError, match="alpha"):
        applier.join()


def test_shadow_that_cannot_be_seeded_is_named() -> None:
    _, engine, applier, _ = alpha_world()
    engine.seeds = {}
    with pytest.raises(PlanError, match=r"no canonical bytes for layers\.0\.gate\.weight_scale_2"):
        applier.join()


def test_shadows_beyond_their_limit_are_refused_by_name() -> None:
    _, engine, _, _ = cast_world()
    schema = make_schema("run", [NORM, PLAIN])
    with pytest.raises(MemoryPlanError, match=r"1 tensors need 128 bytes, .* is 100; .*layers\.0\.norm \(128 bytes\)"):
        bind(engine, schema, shadow_limit_nbytes=100)


def test_input_that_the_engine_also_holds_is_read_from_there() -> None:
    """An absorbed projection: the plain weight is live, and a transposed single-precision copy is derived from it."""
    words = random_words([PLAIN])
    publisher = Publisher(MemorySink(), make_schema("run", [PLAIN]))
    publisher.checkpoint(words)
    group = Derivation("absorbed", (PLAIN.name,), ("w_kc",), lambda x: {"w_kc": x[PLAIN.name].float().t().contiguous()})
    first = bf16(words[PLAIN.name])
    engine = PlainEngine({PLAIN.name: first, "w_kc": first.float().t().contiguous()}, groups=[group])
    from tests.unit.receiving import identity

    engine.places = {PLAIN.name: identity(PLAIN)}
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    assert applier._session.binding.shadows.nbytes == 0  # type: ignore[union-attr]
    new = changed(words, 0.2)
    publisher.delta(new)
    applier.update()
    assert torch.equal(engine.live["w_kc"], bf16(new[PLAIN.name]).float().t())
    np.testing.assert_array_equal(words_of(engine.live[PLAIN.name]), new[PLAIN.name])


def test_sliced_and_replicated_shadows_over_ranks() -> None:
    t = spec("layers.0.bias", "BF16", (8, 4))
    words = random_words([NORM, t])
    publisher = Publisher(MemorySink(), make_schema("run", [NORM, t]))
    publisher.checkpoint(words)
    mailbox = Mailbox(2)
    engines = []
    for rank in range(2):
        part = Box((4 * rank, 0), (4, 4))
        rows = bf16(words[t.name][4 * rank : 4 * rank + 4]).float()
        norm = widening(NORM.name, "n", NORM, torch.float32)
        from dataclasses import replace

        groups = [replace(norm, primary=rank == 0), widening(t.name, "b", t, torch.float32, part=part)]
        engines.append(
            RankEngine(mailbox, rank, live={"n": bf16(words[NORM.name]).float(), "b": rows}, places={}, groups=groups)
        )
    appliers = [Applier(e, publisher.sink, ApplyConfig(workers=1)) for e in engines]
    assert [r.version for r in on_ranks([a.join for a in appliers])] == [0, 0]  # type: ignore[attr-defined]
    new = changed(words, 0.5)
    publisher.delta(new)
    assert [r.version for r in on_ranks([a.update for a in appliers])] == [1, 1]  # type: ignore[attr-defined]
    for rank, e in enumerate(engines):
        assert torch.equal(e.live["n"], bf16(new[NORM.name]).float())
        assert torch.equal(e.live["b"], bf16(new[t.name][4 * rank : 4 * rank + 4]).float())


def test_only_casts_that_lose_nothing_are_widening() -> None:
    yes = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]
    yes += [(torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float16)]
    no = [(torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]
    no += [(torch.bfloat16, torch.bfloat16), (torch.int8, torch.float32)]
    assert all(is_widening(a, b) for a, b in yes)
    assert not any(is_widening(a, b) for a, b in no)
    with pytest.raises(PlanError, match="the cast loses bits"):
        widening("w", "live.w", spec("w", "F32", (2,)), torch.bfloat16)


def test_anchor_over_a_shadowed_tensor() -> None:
    publisher, engine, applier, words = cast_world()
    applier.join()
    new = changed(words, 0.8)
    publisher.anchor(new, version=1)
    assert applier.update().derived == (f"cast of {NORM.name}",)
    assert torch.equal(engine.live["norm32"], bf16(new[NORM.name]).float())
    assert applier.audit().version == 1


def scales_world(derive: Callable[[Tensors], Tensors]) -> tuple[Publisher, PlainEngine, Applier, dict[str, np.ndarray]]:
    """Two canonical scales whose largest is live."""
    specs = [spec("a", "F32", (1,)), spec("b", "F32", (1,)), PLAIN]
    words = random_words(specs) | {n: np.array([v], np.float32).view(np.uint32) for n, v in (("a", 0.5), ("b", 0.25))}
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    engine = PlainEngine(
        {"s": torch.tensor([0.5]), PLAIN.name: live(words[PLAIN.name])},
        groups=[Derivation("largest", ("a", "b"), ("s",), derive)],
        seeds=words,
    )
    return publisher, engine, Applier(engine, publisher.sink, ApplyConfig(workers=1)), words


def _largest(x: Tensors) -> dict[str, torch.Tensor]:
    return {"s": torch.maximum(x["a"], x["b"])}


def _writes(x: Tensors) -> dict[str, torch.Tensor]:
    return {"s": torch.maximum(x["a"].mul_(0), x["b"])}


def _fails(x: Tensors) -> dict[str, torch.Tensor]:
    raise RuntimeError("the transform exploded")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (_writes, "derivation largest of a, b wrote its input a"),
        (_fails, "derivation largest of a, b failed with RuntimeError: the transform exploded"),
        (lambda x: None, "derivation largest of a, b failed with TypeError"),
        (lambda x: {"s": 3.0}, "derivation largest of a, b gave float for s"),
    ],
)
def test_derivation_that_misbehaves_is_named_at_join_update_and_audit(bad: Callable[..., Tensors], said: str) -> None:
    derive = _largest
    publisher, engine, applier, words = scales_world(lambda x: derive(x))
    derive = bad
    with pytest.raises(BaseMismatchError, match=said):
        applier.join()
    with pytest.raises(BaseMismatchError, match="the last join did not find or load one"):
        applier.update()
    derive = _largest
    assert applier.join().version == 0
    new = {**words, "b": np.array([2.0], np.float32).view(np.uint32)}
    publisher.delta(new)
    derive = bad
    with pytest.raises(UndoneError, match=said):
        applier.update()
    assert float(engine.live["s"]) == 0.5
    with pytest.raises(BaseMismatchError, match=said):
        applier.audit()
    derive = _largest
    assert applier.join().version == 0  # the shadows are as they were
    assert applier.update().version == 1
    assert float(engine.live["s"]) == 2.0
    applier.audit()


def test_recovery_that_fails_is_named() -> None:
    words = random_words([NORM])
    publisher = Publisher(MemorySink(), make_schema("run", [NORM]))
    publisher.checkpoint(words)
    group = widening(NORM.name, "norm32", NORM, torch.float32)

    def recover(x: Tensors) -> Tensors:
        raise KeyError("norm31")

    engine = PlainEngine({"norm32": bf16(words[NORM.name]).float()}, groups=[replace(group, recover=recover)])
    with pytest.raises(PlanError, match=r"recovering layers\.0\.norm from live norm32 failed with KeyError"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()
