"""Value transforms of quantised weights: against plain arithmetic, and followed by a receiver through updates and undo."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import PlanError, UndoneError
from megasync.quant import fp8, nvfp4
from megasync.quant.derived import (
    absorbed_key_value,
    dequantised_nvfp4,
    global_scale_product,
    reciprocal_of_largest,
    requantised_to_largest,
)
from megasync.quant.formulas import formula
from megasync.receiver.applier import Applier
from megasync.receiver.engine import Derivation
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from tests.golden.quant_inputs import bell
from tests.unit.publishing import Publisher, make_schema, spec
from tests.unit.receiving import BrokenBackend, PlainEngine

Tensors = Mapping[str, torch.Tensor]
GATE, UP, INPUT = "layers.0.gate.weight_scale_2", "layers.0.up.weight_scale_2", "layers.0.input_scale"


def _scalars(**values: float) -> dict[str, torch.Tensor]:
    return {n: torch.tensor([v]) for n, v in values.items()}


def test_case_34_alphas_are_a_pair_or_refused_by_name() -> None:
    x = {GATE: torch.tensor(2.0), UP: torch.tensor([3.0]), INPUT: torch.tensor([0.5]), "b": torch.tensor(0.25)}
    pair = global_scale_product([GATE, UP], [INPUT, "b"], "alphas", as_pair=True)(x)["alphas"]
    assert pair.tolist() == [1.0, 1.5]
    one = global_scale_product([GATE, UP], [INPUT], "alpha")
    with pytest.raises(PlanError, match=r"alpha is one factor .*gate\.weight_scale_2 = 2, .*up\.weight_scale_2 = 3"):
        one(x)
    x[UP] = torch.tensor([2.0])
    assert one(x)["alpha"].tolist() == [1.0]
    encoded = global_scale_product([GATE, UP], [], "alpha", encodes=True)(x)
    assert encoded["alpha"].tolist() == [0.5]


def test_reciprocal_of_the_largest() -> None:
    out = reciprocal_of_largest(["a", "b"], "live")(_scalars(a=3.0, b=7.0))["live"]
    assert out.tolist() == [float(torch.tensor(7.0).reciprocal())]


def test_requantisation_keeps_the_part_with_the_largest_scale() -> None:
    f = formula("fp8/tensor")
    parts = [torch.from_numpy(bell(32, 48, i) * s).to(torch.bfloat16) for i, s in ((1, 0.02), (2, 0.05), (3, 0.01))]
    made = [fp8.quantize(w, f, amax=nvfp4.amax(w)) for w in parts]
    names, scales = ["q", "k", "v"], ["qs", "ks", "vs"]
    x = {n: m.codes for n, m in zip(names, made, strict=True)} | {
        n: m.scales for n, m in zip(scales, made, strict=True)
    }
    out = requantised_to_largest(names, scales, "qkv", "scale")(x)
    codes = out["qkv"].view(torch.uint8)
    top = max(float(m.scales) for m in made)
    assert float(out["scale"]) == top
    assert torch.equal(codes[32:64], made[1].codes)
    want = torch.div(fp8.dequantize(made[0].codes, made[0].scales, f), torch.tensor(top)).to(torch.float8_e4m3fn)
    assert torch.equal(codes[:32], want.view(torch.uint8))
    assert not (codes & 0x7F == 0x7F).any()  # no NaN
    for part, w in zip(out["qkv"].float().split(32), parts, strict=True):
        assert torch.allclose(part * top, w.float(), rtol=0.14, atol=top * 2**-9)


def test_case_49_absorbed_weights_of_both_formats() -> None:
    heads, key, value, rank = 2, 96, 32, 128
    w = torch.from_numpy(bell(heads * (key + value), rank, 7) * 0.02).to(torch.bfloat16)
    where = {"num_heads": heads, "key_rows": key, "value_rows": value}
    out = absorbed_key_value("kv_b", "w_kc", "w_vc", **where)({"kv_b": w})
    assert torch.equal(out["w_kc"][1], w[128:224])
    assert torch.equal(out["w_vc"][0], w[96:128].t())
    q = fp8.quantize(w, formula("fp8/deepgemm-128"))
    derive = absorbed_key_value("kv_b", "w_kc", "w_vc", block_scales="s", dtype=torch.float32, **where)
    plain = fp8.dequantize(q.codes, q.scales, formula("fp8/deepgemm-128"))
    assert torch.equal(derive({"kv_b": q.codes, "s": q.scales})["w_kc"][0], plain[:96])


def test_dequantised_nvfp4_of_both_checkpoints() -> None:
    w = torch.from_numpy(bell(16, 64, 8) * 0.02).to(torch.bfloat16)
    f = formula("nvfp4/te-2d")
    q = nvfp4.quantize(w, nvfp4.amax(w), f)
    x = {"c": q.codes, "s": q.scales, "g": q.global_scale, "e": torch.tensor([4.0])}
    want = nvfp4.dequantize(q.codes, q.scales, q.global_scale).to(torch.bfloat16)
    assert torch.equal(dequantised_nvfp4("c", "s", "g", "live")(x)["live"], want)
    quarter = nvfp4.dequantize(q.codes, q.scales, torch.tensor(0.25)).to(torch.bfloat16)
    assert torch.equal(dequantised_nvfp4("c", "s", "e", "live", encodes=True)(x)["live"], quarter)


def _world(
    specs: list[TensorSpec], words: dict[str, np.ndarray], group: Derivation, **more: object
) -> tuple[Publisher, PlainEngine, Applier]:
    publisher = Publisher(MemorySink(), make_schema("run", specs), frame_changed=50)
    publisher.checkpoint(words)
    tensors = {n: torch.from_numpy(w.copy()) for n, w in words.items()}
    engine = PlainEngine(dict(group.derive(_typed(specs, tensors))), groups=[group], seeds=words)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1), **more)  # type: ignore[arg-type]
    return publisher, engine, applier


def _typed(specs: list[TensorSpec], tensors: Tensors) -> dict[str, torch.Tensor]:
    return {s.name: tensors[s.name].view(torch.float32) if s.dtype == "F32" else tensors[s.name] for s in specs}


@pytest.mark.parametrize("fails", [False, True])
def test_fused_requantisation_follows_updates_and_undo_restores_it(fails: bool) -> None:
    """Codes of one part, then scales of another: all that depends on them is derived again, and undone exactly."""
    f = formula("fp8/tensor")
    names = ["layers.0.q_proj.weight", "layers.0.k_proj.weight"]
    scales = [n + "_scale" for n in names]
    specs = [spec(n, "F8_E4M3", (16, 32)) for n in names] + [spec(n, "F32", (1,)) for n in scales]

    def made(factors: tuple[float, float]) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        for i, (name, scale, factor) in enumerate(zip(names, scales, factors, strict=True)):
            w = torch.from_numpy(bell(16, 32, i) * factor).to(torch.bfloat16)
            q = fp8.quantize(w, f, amax=nvfp4.amax(w))
            out |= {name: q.codes.numpy(), scale: q.scales.reshape(1).numpy().view(np.uint32)}
        return out

    derive = requantised_to_largest(names, scales, "qkv", "scale")
    group = Derivation("fused qk of layer 0", (*names, *scales), ("qkv", "scale"), derive)
    more = {"backend": lambda b: BrokenBackend(b, write_fails_after=2)} if fails else {}
    publisher, engine, applier = _world(specs, made((0.02, 0.05)), group, **more)
    applier.join()
    before = {n: t.clone() for n, t in engine.live.items()}
    after = made((0.09, 0.05))
    publisher.delta(after)
    if fails:
        with pytest.raises(UndoneError):
            applier.update()
        assert all(torch.equal(before[n].view(torch.uint8), t.view(torch.uint8)) for n, t in engine.live.items())
        applier.audit()
        return
    assert applier.update().derived == ("fused qk of layer 0",)
    want = derive(_typed(specs, {n: torch.from_numpy(w) for n, w in after.items()}))
    assert all(torch.equal(want[n].view(torch.uint8), t.view(torch.uint8)) for n, t in engine.live.items())
    applier.rollback()
    assert all(torch.equal(before[n].view(torch.uint8), t.view(torch.uint8)) for n, t in engine.live.items())


def test_case_34_a_pair_that_comes_apart_in_an_update_is_undone() -> None:
    specs = [spec(n, "F32", (1,)) for n in (GATE, UP, INPUT)]

    def words(gate: float, up: float) -> dict[str, np.ndarray]:
        return {
            n: np.array([v], np.float32).view(np.uint32)
            for n, v in zip((GATE, UP, INPUT), (gate, up, 0.5), strict=True)
        }

    group = Derivation("alphas", (GATE, UP, INPUT), ("alpha",), global_scale_product([GATE, UP], [INPUT], "alpha"))
    publisher, engine, applier = _world(specs, words(2.0, 2.0), group)
    applier.join()
    publisher.delta(words(4.0, 4.0))
    applier.update()
    assert engine.live["alpha"].tolist() == [2.0]
    publisher.delta(words(4.0, 6.0))
    with pytest.raises(UndoneError, match="different global scales"):
        applier.update()
    assert engine.live["alpha"].tolist() == [2.0]
    assert applier.version == 1
