"""Quantised export through publisher and receiver: what moved is carried, be it codes, block scales or global scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import ApplyConfig, PublishConfig
from megasync.errors import BaseMismatchError, MegasyncError, PlanError
from megasync.quant import nvfp4
from megasync.quant.checkpoint import QuantRule
from megasync.quant.formulas import formula
from megasync.receiver.applier import Applier
from megasync.sinks.memory import MemorySink
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.quantised import QuantisedExporter
from megasync.versions.publication import PublicationReader
from tests.golden.quant_inputs import bell
from tests.unit.receiving import plain_engine

GATE, UP, NORM = (
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.norm.weight",
)
ID = "nvfp4/te-1d"


def _weights() -> dict[str, torch.Tensor]:
    out = {n: torch.from_numpy(bell(64, 128, i) * 0.02).to(torch.bfloat16) for i, n in enumerate((GATE, UP))}
    for w in out.values():
        w[3, 16:32] = torch.tensor([4.0, 1.0] * 8) * 2.0**-9  # a block in the middle of the format's range
    return out | {NORM: torch.ones(64, dtype=torch.bfloat16)}


def _whole_range(w: dict[str, torch.Tensor]) -> Iterator[tuple[str, set[str]]]:
    """Steps of the trainer, and what each of them touches."""
    for n in (GATE, UP):
        w[n].mul_(2)
    yield "every weight doubles", {GATE + "_scale_2", UP + "_scale_2"}
    w[GATE][3, 16:32] *= 2
    yield "a block doubles", {GATE + "_scale"}
    w[UP][3, 17] *= 1.5
    yield "an element inside a block grows", {UP}
    w[NORM][5] = 2.0
    yield "a tensor that is not quantised changes", {NORM}
    w[GATE][9, 9] = 0.7
    yield "the amax of the pair moves", {n + s for n in (GATE, UP) for s in ("", "_scale", "_scale_2")}


def _made(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    amax = torch.maximum(nvfp4.amax(w[GATE]), nvfp4.amax(w[UP]))
    out = {NORM: w[NORM]}
    for n in (GATE, UP):
        q = nvfp4.quantize(w[n], amax, formula(ID))
        out |= {n: q.codes, n + "_scale": q.scales, n + "_scale_2": q.global_scale}
    return out


@pytest.mark.parametrize("codec", ["sparse", "lz4+zstd"])
def test_scales_that_move_while_codes_do_not_and_the_other_way_round(codec: str) -> None:
    w, sink = _weights(), MemorySink()
    exporter = QuantisedExporter(TensorExporter(w), [QuantRule("*_proj.weight", ID)])
    callback = MegasyncCallback(exporter, sink, PublishConfig(max_first_density=1, timeout_s=20, codec=codec))
    callback.on_train_start()
    reader = PublicationReader(sink, "run")
    engine = plain_engine({n: np.zeros(t.shape or (1,), f"<u{t.element_size()}") for n, t in _made(w).items()})
    applier = Applier(engine, sink, ApplyConfig(workers=1))
    applier.join()
    for version, (what, touched) in enumerate(_whole_range(w), start=1):
        callback.step_end()
        callback.flush()
        manifest = reader.newest()
        assert manifest is not None
        assert manifest.version == version
        schema = reader.schema(manifest.schema_digest)
        assert {schema.tensors[i].name for i in manifest.touched_ids} == touched, what
        assert manifest.formulas == ("nvfp4/te-1d@1",)
        applier.update()
        for n, t in _made(w).items():
            got = engine.live[n].reshape(-1).view(torch.uint8)
            assert torch.equal(got, t.contiguous().reshape(-1).view(torch.uint8)), (what, n)
    applier.audit()
    callback.on_train_end()


def test_rule_that_selects_nothing_stops_the_start() -> None:
    """Otherwise BF16 would go out although quantised was asked."""
    rules = [QuantRule("*_proj.weight", ID), QuantRule("model.layer.*", "fp8/tensor")]
    exporter = QuantisedExporter(TensorExporter(_weights()), rules)
    callback = MegasyncCallback(exporter, MemorySink(), PublishConfig(timeout_s=20))
    with pytest.raises(MegasyncError, match=r"1 quantisation rules select no weight of the run: 'model\.layer\.\*'"):
        callback.on_train_start()


def test_activation_scales_are_frozen_and_proven() -> None:
    """They are in the root and in no publication: an engine that holds other ones is refused."""
    w, sink = _weights(), MemorySink()
    rules = [QuantRule("*_proj.weight", ID, input_scale=True)]
    names = [n.replace(".weight", ".input_scale") for n in (GATE, UP)]
    with pytest.raises(PlanError, match=rf"2 activation scales that are not given: {names[0]}, .*input_scales="):
        QuantisedExporter(TensorExporter(w), rules)
    with pytest.raises(ValueError, match="must be a float32 tensor of one element"):
        QuantisedExporter(TensorExporter(w), rules, input_scales={n: torch.zeros(2) for n in names})
    scales = {n: torch.tensor(0.25 + k) for k, n in enumerate(names)}
    exporter = QuantisedExporter(TensorExporter(w), rules, input_scales=scales)
    callback = MegasyncCallback(exporter, sink, PublishConfig(max_first_density=1, timeout_s=20))
    callback.on_train_start()
    w[NORM][5] = 2.0
    callback.step_end()
    callback.flush()
    callback.on_train_end()
    for right in (True, False):
        live = {n: np.zeros(t.shape or (1,), f"<u{t.element_size()}") for n, t in _made(w).items()}
        live |= {n: (t if right else t * 2).reshape(1).numpy().view(np.uint32) for n, t in scales.items()}
        engine = plain_engine(live)
        applier = Applier(engine, sink, ApplyConfig(workers=1))
        if right:
            applier.join()
            assert applier.update().version == 1
            assert torch.equal(engine.live[NORM].view(torch.bfloat16), w[NORM])
        else:
            with pytest.raises(BaseMismatchError, match=r"frozen tensors .*input_scale"):
                applier.join()
