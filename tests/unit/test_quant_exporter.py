"""The quantising exporter on one rank: owned boxes against whole weights, pass-through views, refusals."""

from __future__ import annotations

import pytest
import torch

from megasync.errors import NonFiniteError, PlanError
from megasync.quant import fp8, nvfp4
from megasync.quant.checkpoint import QuantRule
from megasync.quant.formulas import formula
from megasync.schema import make_schema
from megasync.tiles import tile_grid
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.quantised import QuantisedExporter
from megasync.types import Box, TensorSpec
from tests.golden.quant_inputs import bell

GATE, UP, DOWN = (f"m.layers.0.mlp.experts.3.{n}_proj.weight" for n in ("gate", "up", "down"))
OUT, NORM, BIAS = "m.layers.0.self_attn.o_proj.weight", "m.layers.0.norm.weight", "m.layers.0.mlp.gate.expert_bias"
RULES = [
    QuantRule("*.experts.*.weight", "nvfp4/te-2d"),
    QuantRule("*.o_proj.weight", "fp8/deepgemm-128-ue8m0", "deepseek", scale_dtype="F8_E8M0"),
]


class PlainExporter(Exporter):
    """Weights of one rank, each in one or more row pieces over one storage."""

    def __init__(self, tensors: dict[str, torch.Tensor], cuts: dict[str, list[int]]) -> None:
        self.tensors, self._cuts = tensors, cuts

    def specs(self) -> list[TensorSpec]:
        names = {torch.bfloat16: "BF16", torch.float32: "F32"}
        return [TensorSpec(n, names[t.dtype], tuple(t.shape), layer=0) for n, t in self.tensors.items()]

    def pieces(self) -> list[Piece]:
        out: list[Piece] = []
        for name, t in self.tensors.items():
            edges = [0, *self._cuts.get(name, []), t.shape[0]]
            for a, b in zip(edges, edges[1:], strict=False):
                start = (a, *(0,) * (t.ndim - 1))
                out.append(Piece(name, Box(start, (b - a, *t.shape[1:])), t[a:b]))
        return out

    def settle(self) -> float:
        for t in self.tensors.values():
            t.add_(0)  # in place, as an optimizer writes
        return 0.25


def _tensors() -> dict[str, torch.Tensor]:
    def bf16(rows: int, columns: int, seed: int, scale: float = 0.02) -> torch.Tensor:
        return torch.from_numpy(bell(rows, columns, seed) * scale).to(torch.bfloat16)

    return {
        GATE: bf16(512, 256, 1),
        UP: bf16(512, 256, 2, 0.05),
        DOWN: bf16(256, 512, 3),
        OUT: bf16(300, 256, 4),
        NORM: torch.ones(256, dtype=torch.bfloat16),
        BIAS: torch.from_numpy(bell(1, 8, 5)[0]).float(),
    }


def _own_all(exporter: QuantisedExporter) -> dict[str, list[Piece]]:
    """Own every tile part, as a plan over one rank would."""
    schema = make_schema("run", exporter.specs())
    held: dict[str, list[Box]] = {}
    for p in exporter.pieces():
        held.setdefault(p.name, []).append(p.box)
    boxes: list[tuple[str, Box]] = []
    for spec in schema.tensors:
        grid = tile_grid(spec)
        for tile in range(grid.num_tiles):
            whole = grid.box(tile) if spec.shape else Box((), ())
            cut = (whole.intersect(h) for h in held[spec.name])
            boxes += [(spec.name, b) for b in cut if b is not None]
    out: dict[str, list[Piece]] = {}
    owned = exporter.own(boxes, schema.tensors)
    assert [(p.name, p.box) for p in owned] == boxes
    for p in owned:
        out.setdefault(p.name, []).append(p)
    return out


def _assemble(pieces: list[Piece], shape: tuple[int, ...]) -> torch.Tensor:
    whole = torch.full(shape, 77, dtype=pieces[0].data.dtype)
    for p in pieces:
        assert p.data.shape == p.box.extent
        whole[tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.extent, strict=True))] = p.data
    return whole


def _check(owned: dict[str, list[Piece]], t: dict[str, torch.Tensor]) -> None:
    f = formula("nvfp4/te-2d")
    for names in ((GATE, UP), (DOWN,)):
        amax = torch.stack([nvfp4.amax(t[n]) for n in names]).amax()
        for n in names:
            q = nvfp4.quantize(t[n], amax, f)
            assert torch.equal(_assemble(owned[n], q.codes.shape), q.codes)
            assert torch.equal(_assemble(owned[n + "_scale"], q.scales.shape), q.scales)
            assert torch.equal(_assemble(owned[n + "_scale_2"], ()), q.global_scale)
    q8 = fp8.quantize(t[OUT], formula("fp8/deepgemm-128-ue8m0"))
    assert torch.equal(_assemble(owned[OUT], q8.codes.shape), q8.codes)
    assert torch.equal(_assemble(owned[OUT + "_scale_inv"], q8.scales.shape), fp8.e8m0_bytes(q8.scales))
    assert torch.equal(_assemble(owned[NORM], (256,)), t[NORM])
    assert torch.equal(_assemble(owned[BIAS], (8,)), t[BIAS])


def test_case_39_mixed_formats_in_one_exporter() -> None:
    t = _tensors()
    exporter = QuantisedExporter(PlainExporter(t, {GATE: [64, 320], OUT: [128]}), RULES)
    assert exporter.settle_always
    specs = {s.name: s for s in exporter.specs()}
    assert specs[GATE].dtype == "U8"
    assert specs[BIAS].dtype == "F32"  # case 50: an FP32 bias beside BF16 weights stays FP32
    assert specs[NORM].dtype == "BF16"
    assert specs[GATE].group == specs[UP + "_scale_2"].group
    owned = _own_all(exporter)
    for _ in range(3):
        assert exporter.settle() > 0
        _check(owned, t)
        for name in (GATE, DOWN, OUT):
            t[name].mul_(1.25)
    assert exporter.exchange_s == 0.0
    nvfp4_nbytes = sum(t[n].numel() for n in (GATE, UP, DOWN)) * 9 // 16 + 3 * 4
    assert exporter.owned_nbytes == nvfp4_nbytes + t[OUT].numel() + 3 * 2


def test_pass_through_pieces_are_views_and_quantised_ones_have_no_bytes_before_own() -> None:
    t = _tensors()
    exporter = QuantisedExporter(PlainExporter(t, {}), RULES)
    by_name = {p.name: p for p in exporter.pieces()}
    assert by_name[NORM].data.data_ptr() == t[NORM].data_ptr()
    assert by_name[GATE].data.device.type == "meta"
    assert by_name[GATE + "_scale_2"].box == Box((), ())
    own = _own_all(exporter)
    assert own[BIAS][0].data.data_ptr() == t[BIAS].data_ptr()


def test_case_34_fused_pair_has_one_global_scale() -> None:
    t = _tensors()
    exporter = QuantisedExporter(PlainExporter(t, {}), RULES)
    owned = _own_all(exporter)
    exporter.settle()
    gate, up = (float(owned[n + "_scale_2"][0].data) for n in (GATE, UP))
    assert gate == up == float(torch.div(t[UP].abs().max().float(), torch.tensor(2688.0)))
    t[GATE][7, 7] = 3.0  # the partner's amax moves both
    exporter.settle()
    _check(owned, t)
    assert float(owned[UP + "_scale_2"][0].data) == float(torch.tensor(3.0) / torch.tensor(2688.0))


def test_compressed_tensors_global_scale_encodes() -> None:
    t = {DOWN: _tensors()[DOWN]}
    rule = QuantRule("*", "nvfp4/compressed-tensors-1d", "compressed-tensors")
    exporter = QuantisedExporter(PlainExporter(t, {}), [rule])
    owned = _own_all(exporter)
    exporter.settle()
    f = formula(rule.formula)
    amax = nvfp4.amax(t[DOWN])
    base = DOWN.removesuffix("weight")
    assert torch.equal(owned[base + "weight_global_scale"][0].data, nvfp4.encode_scale(amax, f).reshape(1))
    q = nvfp4.quantize(t[DOWN], amax, f)
    assert torch.equal(_assemble(owned[base + "weight_packed"], q.codes.shape), q.codes)


def test_case_51_nan_names_the_weights_and_writes_nothing() -> None:
    t = _tensors()
    exporter = QuantisedExporter(PlainExporter(t, {}), RULES)
    owned = _own_all(exporter)
    exporter.settle()
    before = {n: [p.data.clone() for p in ps] for n, ps in owned.items() if n not in (NORM, BIAS)}
    t[OUT][0, 0] = float("nan")
    t[UP][5, 5] = float("inf")
    with pytest.raises(NonFiniteError, match=r"2 groups: .*gate_proj\+up_proj, .*o_proj"):
        exporter.settle()
    assert all(torch.equal(p.data, b) for n, bs in before.items() for p, b in zip(owned[n], bs, strict=True))


def test_pieces_that_cut_blocks_are_listed() -> None:
    exporter = QuantisedExporter(PlainExporter(_tensors(), {GATE: [24], OUT: [64]}), RULES)
    with pytest.raises(PlanError, match=r"4 pieces cannot be quantised: .*blocks of 16.*blocks of 128"):
        exporter.pieces()


def test_boxes_of_nobody_are_refused() -> None:
    exporter = QuantisedExporter(PlainExporter(_tensors(), {GATE: [256]}), RULES)
    with pytest.raises(PlanError, match=r"1 owned boxes lie in no piece"):
        exporter.own([(GATE, Box((240, 0), (32, 128)))], exporter.specs())
    with pytest.raises(PlanError, match=r"cuts blocks of 16 on axis 0"):
        exporter.own([(GATE, Box((8, 0), (16, 128)))], exporter.specs())
    with pytest.raises(PlanError, match=r"lie in no piece"):
        exporter.own([(NORM, Box((250,), (10,)))], exporter.specs())


def test_an_unselected_model_passes_through_whole() -> None:
    t = _tensors()
    exporter = QuantisedExporter(PlainExporter(t, {}), [])
    assert [s.name for s in exporter.specs()] == list(t)
    owned = _own_all(exporter)
    exporter.settle()
    exporter.check_alive()
    assert all(torch.equal(_assemble(owned[n], tuple(x.shape)), x) for n, x in t.items())
