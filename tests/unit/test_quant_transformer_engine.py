"""Pieces over parameters that TransformerEngine keeps quantised, on plain objects with its attribute layout."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasync.adapters import transformer_engine as adapter
from megasync.adapters.transformer_engine import StoredExporter, StoredWeight, storage_of
from megasync.errors import PlanError
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import formula
from megasync.types import Box
from tests.golden.quant_inputs import bell

E4M3 = SimpleNamespace(name="kFloat8E4M3")


def _pad(t: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """As TransformerEngine pads scales; what lies in the padding is not ours."""
    out = torch.full((-(-t.shape[0] // rows) * rows, -(-t.shape[1] // columns) * columns), 0x55).to(t.dtype)
    out[: t.shape[0], : t.shape[1]] = t
    return out


def _nvfp4(weight: torch.Tensor, amax: torch.Tensor | None = None, **more: Any) -> SimpleNamespace:
    amax = nvfp4.amax(weight) if amax is None else amax
    q = nvfp4.quantize(weight, amax, formula("nvfp4/te-2d"))
    return SimpleNamespace(
        _rowwise_data=q.codes,
        _rowwise_scale_inv=_pad(q.scales, 128, 4),
        _columnwise_data=None,
        _columnwise_scale_inv=None,
        _amax_rowwise=amax.reshape(1).clone(),
        _amax_columnwise=None,
        _fp4_dtype=SimpleNamespace(name="kFloat4E2M1"),
        _with_gemm_swizzled_scales=False,
        _row_scaled_nvfp4=False,
        _nvfp4_use_4over6=False,
        _nvfp4_e4m3_max=448,
        **more,
    )


def _fp8_block(weight: torch.Tensor) -> SimpleNamespace:
    q = fp8.quantize(weight, formula("fp8/te-128-pow2"))
    return SimpleNamespace(
        _rowwise_data=q.codes,
        _rowwise_scale_inv=_pad(q.scales, 1, 4),
        _fp8_dtype=E4M3,
        _is_2D_scaled=True,
    )


def _fp8_tensor(weight: torch.Tensor) -> SimpleNamespace:
    q = fp8.quantize(weight, formula("fp8/te-tensor"), amax=nvfp4.amax(weight))
    return SimpleNamespace(_data=q.codes, _scale_inv=q.scales.reshape(1), _fp8_dtype=E4M3, _transpose=None)


def _weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(bell(rows, columns, seed) * 0.02).to(torch.bfloat16)


def _whole(name: str, param: Any, shape: tuple[int, int]) -> StoredWeight:
    return StoredWeight(name, param, shape, Box((0, 0), shape))


def _own(exporter: StoredExporter) -> dict[str, torch.Tensor]:
    boxes = [(p.name, p.box) for p in exporter.pieces()]
    owned = exporter.own(boxes, exporter.specs())
    return {f"{p.name}@{p.box.start[0] if p.box.start else 0}": p.data for p in owned}


def test_nvfp4_storage_is_read_without_copies() -> None:
    w = _weight(200, 96, 1)
    param = _nvfp4(w)
    exporter = StoredExporter([_whole("m.o_proj.weight", param, (200, 96))])
    specs = {s.name: s for s in exporter.specs()}
    assert {s.formula for s in specs.values()} == {"nvfp4/te-stored@1"}
    assert specs["m.o_proj.weight"].shape == (200, 48)
    assert specs["m.o_proj.weight_scale"].shape == (200, 6)
    data = _own(exporter)
    codes, scales, whole = (data[f"m.o_proj.weight{s}@0"] for s in ("", "_scale", "_scale_2"))
    assert codes.data_ptr() == param._rowwise_data.data_ptr()
    assert scales.data_ptr() == param._rowwise_scale_inv.data_ptr()
    assert scales.shape == (200, 6)
    assert exporter.settle() >= 0
    q = nvfp4.quantize(w, nvfp4.amax(w), formula("nvfp4/te-2d"))
    assert torch.equal(codes, q.codes)
    assert torch.equal(scales, q.scales)
    assert torch.equal(whole, q.global_scale)
    # The trainer casts the next step's weights into the same memory.
    other = _nvfp4(w * 2)
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"):
        getattr(param, name).copy_(getattr(other, name))
    exporter.settle()
    exporter.check_alive()
    assert torch.equal(whole, q.global_scale * 2)
    assert torch.equal(codes, q.codes)


def test_fused_projection_is_cut_into_canonical_rows() -> None:
    """Query groups of a fused QKV: q rows 0..63, k 64..95, v 96..127 of each group."""
    w = _weight(256, 64, 2)
    param = _nvfp4(w)
    rows = [
        ("q", 0, 64, 0),
        ("k", 64, 32, 0),
        ("v", 96, 32, 0),
        ("q", 128, 64, 64),
        ("k", 192, 32, 32),
        ("v", 224, 32, 32),
    ]
    whole = {"q": (128, 64), "k": (64, 64), "v": (64, 64)}
    stored = [
        StoredWeight(f"a.{n}_proj.weight", param, whole[n], Box((to, 0), (num, 64)), local=(at, 0))
        for n, at, num, to in rows
    ]
    exporter = StoredExporter(stored, checkpoint="compressed-tensors")
    data = _own(exporter)
    exporter.settle()
    for n, at, num, to in rows:
        assert torch.equal(data[f"a.{n}_proj.weight_packed@{to}"], param._rowwise_data[at : at + num])
        assert torch.equal(data[f"a.{n}_proj.weight_scale@{to}"], param._rowwise_scale_inv[at : at + num, :4])
    scales = {n: data[f"a.{n}_proj.weight_global_scale@0"] for n in "qkv"}
    assert {float(s) for s in scales.values()} == {float(nvfp4.encode_scale(nvfp4.amax(w), formula("nvfp4/te-2d")))}
    assert {s.group for s in exporter.specs()} == {"a.q_proj+k_proj+v_proj"}


def test_fp8_storages_are_read_without_copies() -> None:
    w = _weight(300, 200, 3)
    block, tensor = _fp8_block(w), _fp8_tensor(w)
    exporter = StoredExporter([_whole("m.a.weight", block, (300, 200)), _whole("m.b.weight", tensor, (300, 200))])
    data = _own(exporter)
    exporter.settle()
    assert data["m.a.weight_scale_inv@0"].shape == (3, 2)
    assert data["m.a.weight_scale_inv@0"].data_ptr() == block._rowwise_scale_inv.data_ptr()
    assert torch.equal(data["m.a.weight_scale_inv@0"], fp8.quantize(w, formula("fp8/te-128-pow2")).scales)
    assert data["m.a.weight@0"].data_ptr() == block._rowwise_data.data_ptr()
    assert data["m.b.weight@0"].data_ptr() == tensor._data.data_ptr()
    assert data["m.b.weight_scale@0"].data_ptr() == tensor._scale_inv.data_ptr()
    assert {s.name: s.dtype for s in exporter.specs()} == {
        "m.a.weight": "F8_E4M3",
        "m.a.weight_scale_inv": "F32",
        "m.b.weight": "F8_E4M3",
        "m.b.weight_scale": "F32",
    }


def test_case_34_parts_with_different_global_scales_are_refused_by_name() -> None:
    gate, up = _weight(64, 64, 4), _weight(64, 64, 5) * 2
    pair = [_whole("m.gate_proj.weight", _nvfp4(gate), (64, 64)), _whole("m.up_proj.weight", _nvfp4(up), (64, 64))]
    exporter = StoredExporter(pair)
    _own(exporter)
    with pytest.raises(PlanError, match=r"m\.gate_proj\+up_proj; reduce the amax"):
        exporter.settle()
    shared = torch.maximum(nvfp4.amax(gate), nvfp4.amax(up))
    pair = [_whole(s.name, _nvfp4(w, shared), (64, 64)) for s, w in zip(pair, (gate, up), strict=True)]
    exporter = StoredExporter(pair)
    data = _own(exporter)
    exporter.settle()
    assert torch.equal(data["m.gate_proj.weight_scale_2@0"], data["m.up_proj.weight_scale_2@0"])


def test_zero_weight_and_4over6_global_scales() -> None:
    zero = _nvfp4(torch.zeros(16, 16, dtype=torch.bfloat16))
    four = _nvfp4(_weight(16, 16, 6))
    four._nvfp4_use_4over6, four._nvfp4_e4m3_max = True, 256
    exporter = StoredExporter([_whole("m.a.weight", zero, (16, 16)), _whole("m.b.weight", four, (16, 16))])
    data = _own(exporter)
    exporter.settle()
    assert float(data["m.a.weight_scale_2@0"]) == 1.0
    assert float(data["m.b.weight_scale_2@0"]) == float(torch.div(four._amax_rowwise, torch.tensor([1536.0])))


def test_every_unreadable_storage_is_listed() -> None:
    w = _weight(128, 128, 7)
    bad = {
        "swizzled": _nvfp4(w),
        "row": _nvfp4(w),
        "transposed": _nvfp4(w),
        "plain": w,
        "e5m2": _fp8_tensor(w),
        "narrow": _fp8_block(w),
        "unaligned": _fp8_block(w),
        "outside": _nvfp4(w),
    }
    bad["swizzled"]._with_gemm_swizzled_scales = True
    bad["row"]._row_scaled_nvfp4 = True
    bad["transposed"]._rowwise_data = None
    bad["e5m2"]._fp8_dtype = SimpleNamespace(name="kFloat8E5M2")
    bad["narrow"]._is_2D_scaled = False
    stored = [_whole(f"m.{n}.weight", p, (128, 128)) for n, p in bad.items() if n not in ("unaligned", "outside")]
    stored.append(
        StoredWeight("m.unaligned.weight", bad["unaligned"], (64, 128), Box((0, 0), (64, 128)), local=(64, 0))
    )
    stored.append(StoredWeight("m.outside.weight", bad["outside"], (256, 128), Box((0, 0), (256, 128))))
    with pytest.raises(PlanError) as caught:
        StoredExporter(stored)
    text = str(caught.value)
    assert text.startswith("8 quantised parameters cannot be read")
    for part in (
        "swizzled for the",
        "per row",
        "column-wise",
        "Tensor is no quantised",
        "E5M2",
        "1 x 128",
        "inside a block",
    ):
        assert part in text, part
    assert "outside a storage of (128, 64)" in text


def test_storage_that_moved_is_named() -> None:
    param = _nvfp4(_weight(16, 32, 8))
    exporter = StoredExporter([_whole("m.a.weight", param, (16, 32))])
    exporter.check_alive()
    param._rowwise_data = param._rowwise_data.clone()
    with pytest.raises(PlanError, match=r"m\.a\.weight moved"):
        exporter.check_alive()


def test_storage_is_known_by_its_attributes() -> None:
    w = _weight(16, 16, 9)
    assert storage_of(_nvfp4(w)) == "nvfp4"
    assert storage_of(_fp8_block(w)) == "fp8-block"
    assert storage_of(_fp8_tensor(w)) == "fp8-tensor"
    assert storage_of(w) is None
    assert storage_of(torch.nn.Parameter(w)) is None


def test_transformer_engine_is_never_imported() -> None:
    """A half-installed TransformerEngine raises other errors than ImportError, so nothing may touch it."""
    tree = ast.parse(Path(adapter.__file__).read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert "megasync.trainer.exporter" in names
    assert not [n for n in names if n.startswith("transformer_engine")]
