"""FP8 formulas against a scalar re-computation, finite scales everywhere, boxes apart against the whole."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import NonFiniteError, PlanError
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import Formula, formula, known_ids
from megasync.types import Box
from tests.golden.quant_inputs import DTYPES, bell, inputs
from tests.golden.quant_oracles import GOLDEN

FP8 = [i for i in known_ids() if i.startswith("fp8/")]
_TABLE = [Fraction(m, 512) for m in range(8)]
_TABLE += [Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
_TABLE = _TABLE[:127]
f32 = np.float32


def _e4m3(y: np.float32) -> int:
    """Byte of the nearest e4m3 value by rational arithmetic, ties to the even byte, saturating."""
    x = min(abs(Fraction(float(y))), _TABLE[-1])
    byte = min(range(127), key=lambda i: (abs(_TABLE[i] - x), i % 2))
    return byte | (0x80 if np.signbit(y) else 0)


def _scalar(a: np.float32, name: str) -> tuple[np.float32, np.float32, bool]:
    """Scale, what meets the weights, and whether that divides: one block of the formula, in numpy scalars."""
    with np.errstate(all="ignore"):
        if name.startswith("te-"):
            f = f32(1) if a == 0 else min(f32(448) / a, np.finfo(f32).max)
            if name.endswith("pow2"):
                f = f32(2.0 ** np.floor(np.log2(np.float64(f))))
            return f32(1) / f, f, False
        if name.startswith("deepgemm"):
            s = max(a, f32(1e-4)) / f32(448)
            if name.endswith("ue8m0"):
                m, e = np.frexp(s)
                s = f32(2.0 ** (e - 1 if m == 0.5 else e))
            return s, f32(1) / s, False
        s = a / f32(448)
        s = f32(1) if s == 0 else s
        return s, s, True


def _amax(x: torch.Tensor, f: Formula) -> torch.Tensor | None:
    return nvfp4.amax(x) if f.needs_amax else None


@pytest.mark.parametrize("id", FP8)
@pytest.mark.parametrize("exponent", [-39, -3, 3])
def test_bytes_against_scalar_arithmetic(id: str, exponent: int) -> None:
    f = formula(id)
    x = torch.from_numpy(bell(130, 132, 21) * 10.0**exponent).to(torch.bfloat16)
    x[0, :3] = torch.tensor([0.0, -0.0, 1e-3 * 10.0**exponent])
    x[128:, 128:] = 0  # the last, partial block is all zero
    q = fp8.quantize(x, f, amax=_amax(x, f))
    height, width = (f.block[0] or 130, f.block[1] or 132)
    values = x.float().numpy()
    for r in range(0, 130, height):
        for c in range(0, 132, width):
            block = values[r : r + height, c : c + width]
            scale, factor, divides = _scalar(np.abs(block).max(), f.name)
            stored = q.scales.numpy().reshape(-(-130 // height), -1)[r // height, c // width]
            assert stored == scale
            for i, j in [
                (0, 0),
                (0, 1),
                (0, 2),
                (block.shape[0] - 1, block.shape[1] - 1),
                (min(77, len(block) - 1), 1),
            ]:
                if i < block.shape[0] and j < block.shape[1]:
                    with np.errstate(all="ignore"):
                        y = block[i, j] / factor if divides else block[i, j] * factor
                    assert int(q.codes[r + i, c + j]) == _e4m3(y), (id, r, c, i, j)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", FP8)
def test_case_40_all_zero_block_has_a_finite_scale(id: str, dtype: str) -> None:
    f = formula(id if dtype == "bf16" else id + "+f32")
    x = torch.zeros(256, 256, dtype=DTYPES[dtype])
    for y in (x, x.index_fill(0, torch.arange(3), 0.25)):
        q = fp8.quantize(y, f, amax=_amax(y, f))
        assert torch.isfinite(q.scales).all()
        assert (q.scales > 0).all()
        values = fp8.dequantize(q.codes, q.scales, f)
        assert torch.equal(values[3:], torch.zeros(253, 256))
        assert torch.allclose(values[:3], y[:3].float(), rtol=0.07)


@pytest.mark.parametrize("id", ["fp8/deepgemm-128-ue8m0@1", "fp8/te-128-pow2@1"])
def test_case_42_power_of_two_scales_keep_shape_and_bytes(id: str) -> None:
    """ue8m0 scales as fp32 and as exponent bytes are the same values in the same shape, however small the weights."""
    f = formula(id)
    for exponent in (-38, -6, 0, 30):
        x = torch.from_numpy(bell(300, 200, 22) * 10.0**exponent).to(torch.bfloat16)
        first, second = fp8.quantize(x, f), fp8.quantize(x * 2, f)
        assert first.scales.shape == second.scales.shape == (3, 2)
        mantissa, _ = np.frexp(first.scales.numpy())
        assert (mantissa == 0.5).all()
        raw = fp8.e8m0_bytes(first.scales)
        assert raw.dtype is torch.uint8
        assert torch.equal(fp8.e8m0_values(raw), first.scales)
        assert (raw.view(torch.float8_e8m0fnu).float() == first.scales).all()
        assert not (first.codes & 0x7F == 0x7F).any()  # no NaN byte


def test_ceil_power_of_two_at_its_edges() -> None:
    x = torch.tensor([1.0, np.nextafter(f32(1), f32(2)), 0.75, 0.5, 1e-45, 2.0**-126, 3e38], dtype=torch.float32)
    got = fp8.ceil_power_of_two(x).tolist()
    assert got == [1.0, 2.0, 1.0, 0.5, 2.0**-126, 2.0**-126, 2.0**127]


@pytest.mark.parametrize("id", FP8)
def test_case_51_negative_zero_keeps_its_sign_and_nan_is_refused(id: str) -> None:
    f = formula(id)
    x = torch.ones(16, 16, dtype=torch.bfloat16)
    x[0, 0] = -0.0
    q = fp8.quantize(x, f, amax=_amax(x, f))
    assert int(q.codes[0, 0]) == 0x80
    x[5, 6] = float("nan")
    with pytest.raises(NonFiniteError, match=r"some\.weight"):
        fp8.quantize(x, f, amax=_amax(x, f), name="some.weight")


@settings(max_examples=40, deadline=None)
@given(
    id=st.sampled_from(FP8),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    cut=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    seed=st.integers(0, 100),
)
def test_boxes_apart_are_the_whole_at_once(id: str, rows: int, columns: int, cut: tuple[int, int], seed: int) -> None:
    f = formula(id)
    x = torch.from_numpy(bell(rows, columns, seed)).to(torch.bfloat16)
    amax = _amax(x, f)
    whole = fp8.quantize(x, f, amax=amax)
    r = sorted({0, rows, min(rows, cut[0] * 128)})
    c = [0, columns] if f.block == (1, 0) else sorted({0, columns, min(columns, cut[1] * 128)})
    codes = torch.empty_like(whole.codes)
    for a, b in zip(r, r[1:], strict=False):
        for p, q in zip(c, c[1:], strict=False):
            part = fp8.quantize(x[a:b, p:q], f, amax=amax, box=Box((a, p), (b - a, q - p)), shape=(rows, columns))
            codes[a:b, p:q] = part.codes
            if f.block == (128, 128):
                assert torch.equal(part.scales, whole.scales[a // 128 : -(-b // 128), p // 128 : -(-q // 128)])
            elif f.block == (1, 0):
                assert torch.equal(part.scales, whole.scales[a:b])
            else:
                assert torch.equal(part.scales, whole.scales)
    assert torch.equal(codes, whole.codes)


def test_case_52_strided_views_are_read_as_they_lie() -> None:
    base = torch.from_numpy(bell(256, 384, 23)).to(torch.bfloat16)
    for id in FP8:
        f = formula(id)
        view = base.t()[:256, ::2]
        a, b = (fp8.quantize(v, f, amax=_amax(view, f)) for v in (view, view.contiguous()))
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)


def test_refusals() -> None:
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="cuts blocks of 128 on axis 0"):
        fp8.quantize(x[:64], formula("fp8/te-128"), box=Box((64, 0), (64, 128)), shape=(256, 128))
    with pytest.raises(PlanError, match="cuts blocks of 256 on axis 1"):
        fp8.quantize(x, formula("fp8/channel"), box=Box((0, 0), (128, 128)), shape=(128, 256))
    with pytest.raises(ValueError, match="reduced amax"):
        fp8.quantize(x, formula("fp8/tensor"))
    with pytest.raises(ValueError, match="no FP8 formula"):
        fp8.quantize(x, formula("nvfp4/te-2d"))
    with pytest.raises(TypeError, match="float16"):
        fp8.quantize(x.half(), formula("fp8/te-128"))


def _frozen_digests() -> dict[str, str]:
    """sha256 over codes and scales of every formula on every golden input."""
    out: dict[str, str] = {}
    for base in known_ids():
        for dtype in DTYPES:
            f = formula(base if dtype == "bf16" else base + "+f32")
            digest = hashlib.sha256()
            for x in inputs(dtype).values():
                amax = nvfp4.amax(x)
                if f.family == "nvfp4":
                    q = nvfp4.quantize(x, amax, f)
                    parts = (q.codes, q.scales, q.global_scale, nvfp4.encode_scale(amax, f))
                else:
                    q8 = fp8.quantize(x, f, amax=amax if f.needs_amax else None)
                    parts = (q8.codes, q8.scales)
                for part in parts:
                    digest.update(part.numpy().tobytes())
            out[f.id] = digest.hexdigest()
    return out


def test_published_formulas_never_change_their_bytes() -> None:
    """A released id computes the same bytes for ever; another rule takes another version."""
    frozen = json.loads((GOLDEN / "quant_frozen.json").read_text())
    now = _frozen_digests()
    assert {i: now.get(i) for i in frozen} == frozen
    assert set(now) == set(frozen), "a new formula needs its digest in tests/golden/quant_frozen.json"


@pytest.mark.parametrize("id", ["fp8/deepgemm-128-ue8m0", "fp8/te-128-pow2"])
def test_power_of_two_scales_decode_finitely_up_to_31_32_of_the_range(id: str) -> None:
    """What the module says of the top of fp32: from 31/32 of 2^128 on the code rounds up to 256, beside 2^120."""
    f = formula(id + "+f32")
    edge = 31 * 2.0**123
    below = float(np.nextafter(np.float32(edge), np.float32(0)))
    for value, finite in ((below, True), (edge, False)):
        q = fp8.quantize(torch.full((1, 1), value, dtype=torch.float32), f)
        assert float(q.scales) == 2.0**120
        assert bool(torch.isfinite(fp8.dequantize(q.codes, q.scales, f)).all()) is finite
