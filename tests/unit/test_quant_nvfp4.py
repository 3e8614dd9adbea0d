"""NVFP4 formulas: published quantisers' bytes, exact rounding, edge values, boxes apart against the whole."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import NonFiniteError, PlanError
from megasync.kernels.nvfp4 import amax_, quantize_
from megasync.kernels.nvfp4_reference import Order, e2m1_codes
from megasync.quant import nvfp4
from megasync.quant.formulas import formula, known_ids
from megasync.types import Box
from tests.golden.quant_inputs import DTYPES, bell, inputs
from tests.golden.quant_oracles import FORMULAS, GOLDEN, knows, oracle

NAMES = sorted(FORMULAS)
E2M1 = [Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6)]


def _formula(name: str, dtype: str = "bf16"):  # type: ignore[no-untyped-def]
    return formula(f"nvfp4/{name}@1{'' if dtype == 'bf16' else '+f32'}")


def _nearest(x: Fraction, table: list[Fraction]) -> int:
    """Index of the nearest value, ties to the even index (a float format's even code), saturating."""
    x = min(x, table[-1])
    best = min(range(len(table)), key=lambda i: (abs(table[i] - x), i % 2))
    return best


def _e4m3_table() -> list[Fraction]:
    subnormal = [Fraction(m, 512) for m in range(8)]
    normal = [Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
    return (subnormal + normal)[:127]  # byte 0x7F is NaN


def _same_global(name: str, amax: torch.Tensor, q: nvfp4.Nvfp4, theirs: np.ndarray, dtype: str) -> bool:
    ours = {"te": amax, "mo": q.global_scale, "co": nvfp4.encode_scale(amax, _formula(name, dtype))}[name[:2]]
    return bool(ours.reshape(1).numpy().tobytes() == np.asarray(theirs, dtype=np.float32).reshape(1).tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_case_38_bytes_of_the_published_quantisers(name: str, dtype: str) -> None:
    golden = np.load(GOLDEN / "quant_nvfp4.npz")
    seen = 0
    for case, x in inputs(dtype).items():
        if not knows(name, case):
            continue
        amax = nvfp4.amax(x)
        q = nvfp4.quantize(x, amax, _formula(name, dtype))
        assert np.array_equal(q.scales.numpy(), golden[f"{name}/{dtype}/{case}/scales"]), case
        assert np.array_equal(q.codes.numpy(), golden[f"{name}/{dtype}/{case}/codes"]), case
        assert _same_global(name, amax, q, golden[f"{name}/{dtype}/{case}/global"], dtype), case
        seen += 1
    assert seen >= 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_installed_quantisers(name: str, dtype: str) -> None:
    run = oracle(name)
    if run is None:
        pytest.skip(f"{FORMULAS[name]} is not installed")
    for seed in range(8):
        x = torch.from_numpy(bell(64, 256, 100 + seed) * 10.0 ** (seed - 5)).to(DTYPES[dtype])
        x[seed] *= 2.0**-seed
        amax = nvfp4.amax(x)
        q = nvfp4.quantize(x, amax, _formula(name, dtype))
        codes, scales, whole = run(x)
        assert torch.equal(q.scales, scales)
        assert torch.equal(q.codes, codes)
        assert _same_global(name, amax, q, whole.float().numpy(), dtype)


def test_case_38_orders_differ_on_near_ties() -> None:
    """One quantiser must be authoritative: the formulas agree on nearly every code and not on all."""
    x = torch.from_numpy(bell(512, 1024, 7) * 0.02).to(torch.bfloat16)
    amax = nvfp4.amax(x)
    by_name = {n: nvfp4.quantize(x, amax, _formula(n)) for n in ("te-1d", "modelopt-1d", "compressed-tensors-1d")}
    assert torch.equal(by_name["te-1d"].scales, by_name["modelopt-1d"].scales)
    for name in ("modelopt-1d", "compressed-tensors-1d"):
        ratio = float((by_name[name].codes != by_name["te-1d"].codes).float().mean())
        assert 0 < ratio < 0.2


def test_e2m1_rounds_to_nearest_even_against_fractions() -> None:
    values = np.concatenate([np.arange(0, 8, 1 / 64), [5.0, np.nextafter(np.float32(5), 9), 1e30, np.inf]])
    values = np.concatenate([values, np.nextafter(values[values > 0].astype(np.float32), 0)]).astype(np.float32)
    got = e2m1_codes(torch.from_numpy(np.concatenate([values, -values]))).numpy()
    want = [_nearest(Fraction(float(min(v, 1e31))), E2M1) for v in values]
    signed = [w | (8 if v > 0 else 0) for w, v in zip(want, values, strict=True)]
    assert got.tolist() == want + signed


def test_scales_round_to_nearest_even_and_saturate_against_fractions() -> None:
    """Block amaxes over the whole range: the exact product with the constant, rounded by rational arithmetic."""
    table = _e4m3_table()
    amax = torch.tensor(2688.0)  # S is 1, so the scale is b * fp32(1/6)
    b = np.concatenate([2.0 ** np.arange(-12, 12), np.linspace(0.0, 2688, 301), [0.0]]).astype(np.float32)
    x = torch.zeros(len(b), 16)
    x[:, 5] = torch.from_numpy(b)
    q = nvfp4.quantize(x, amax, _formula("te-1d", "f32"))
    sixth = np.float32(1) / np.float32(6)
    want = [_nearest(Fraction(float(np.float32(v) * sixth)), table) for v in b]
    assert q.scales[:, 0].tolist() == want
    assert max(want) == 0x7E


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_case_40_all_zero_weights_and_blocks_decode_to_zero(name: str, dtype: str) -> None:
    f = _formula(name, dtype)
    zero = torch.zeros(32, 64, dtype=DTYPES[dtype])
    q = nvfp4.quantize(zero, nvfp4.amax(zero), f)
    assert not q.codes.any()
    assert float(q.global_scale) == 1.0
    assert float(nvfp4.encode_scale(torch.zeros(()), f)) == 1.0
    assert torch.equal(nvfp4.dequantize(q.codes, q.scales, q.global_scale), torch.zeros(32, 64))
    part = zero.clone()
    part[16:, 16:] = 0.5
    q = nvfp4.quantize(part, nvfp4.amax(part), f)
    assert torch.isfinite(q.scales.view(torch.float8_e4m3fn).float()).all()
    values = nvfp4.dequantize(q.codes, q.scales, q.global_scale)
    assert not values[:16].any()
    assert not values[:, :16].any()
    assert torch.allclose(values[16:, 16:], torch.tensor(0.5), rtol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_case_51_negative_zero_and_nan(name: str) -> None:
    f = _formula(name)
    x = torch.full((16, 16), 1.0, dtype=torch.bfloat16)
    x[0, 0], x[0, 1], x[0, 2] = -0.0, -1e-3, 1e-3
    q = nvfp4.quantize(x, nvfp4.amax(x), f)
    assert q.codes[0, 0] == 0x80  # -0.0 in the low nibble is code 0, the small negative keeps its sign: code 8
    assert q.codes[0, 1] & 0xF == 0
    for bad in (float("nan"), float("inf"), -float("inf")):
        y = x.clone()
        y[3, 4] = bad
        with pytest.raises(NonFiniteError, match=r"model\.w\.weight"):
            nvfp4.quantize(y, nvfp4.amax(y), f, name="model.w.weight")


@pytest.mark.parametrize("name", NAMES)
def test_case_52_strided_views_are_read_as_they_lie(name: str) -> None:
    base = torch.from_numpy(bell(96, 64, 11)).to(torch.bfloat16)
    f = _formula(name)
    for view in (base.t()[:48, :64], base[::2], base[5:37, 16:48]):
        amax = nvfp4.amax(view)
        a, b = nvfp4.quantize(view, amax, f), nvfp4.quantize(view.contiguous(), amax, f)
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)


def test_packing_puts_even_elements_low() -> None:
    x = torch.tensor([[6.0, 0.5] * 8] * 16)
    q = nvfp4.quantize(x, torch.tensor(2688.0), _formula("te-1d", "f32"))
    assert q.scales.unique().tolist() == [0x38]  # 1.0
    assert q.codes.unique().tolist() == [0x17]
    assert nvfp4.unpack(q.codes)[0, :2].tolist() == [6.0, 0.5]


def test_amax_that_moves_changes_scales_and_grown_amax_is_seen() -> None:
    f = _formula("te-2d")
    x = torch.from_numpy(bell(64, 64, 12) * 0.02).to(torch.bfloat16)
    before = nvfp4.quantize(x, nvfp4.amax(x), f)
    y = x.clone()
    y[63, 63] = 1.0
    after = nvfp4.quantize(y, nvfp4.amax(y), f)
    assert float(after.global_scale) == float(torch.tensor(1.0) / torch.tensor(2688.0))
    assert (before.scales[:48, :3] != after.scales[:48, :3]).all()


@pytest.mark.parametrize("name", NAMES)
def test_relative_error_is_that_of_the_format(name: str) -> None:
    x = torch.from_numpy(bell(64, 128, 13)).to(torch.bfloat16)
    q = nvfp4.quantize(x, nvfp4.amax(x), _formula(name))
    error = (nvfp4.dequantize(q.codes, q.scales, q.global_scale) - x.float()).abs()
    blocks = x.float().unflatten(1, (-1, 16)).abs().amax(2)
    tops = blocks.unflatten(0, (-1, 16)).amax(1).repeat_interleave(16, 0) if name == "te-2d" else blocks
    # Half of the widest step (2 of 6) of a block whose scale is off by at most 1/16.
    assert (error <= tops.repeat_interleave(16, 1) * (1 / 6 + 1 / 15)).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 6),
    cuts=st.tuples(st.lists(st.integers(0, 4), max_size=2), st.lists(st.integers(0, 5), max_size=2)),
    exponent=st.integers(-44, 36),
    seed=st.integers(0, 1000),
)
def test_boxes_apart_are_the_whole_at_once(
    name: str, dtype: str, rows: int, blocks: int, cuts: tuple[list[int], list[int]], exponent: int, seed: int
) -> None:
    f = _formula(name, dtype)
    x = torch.from_numpy(bell(rows, blocks * 16, seed) * 10.0**exponent).float().to(DTYPES[dtype])
    x[:, : 16 * (seed % 2)] = 0
    unit = f.block[0]
    r = sorted({0, rows, *(min(rows, c * (16 if unit == 16 else 5)) for c in cuts[0])})
    c = sorted({0, blocks * 16, *(min(blocks, k) * 16 for k in cuts[1])})
    boxes = [
        Box((a, p), (b - a, q - p)) for a, b in zip(r, r[1:], strict=False) for p, q in zip(c, c[1:], strict=False)
    ]
    parts = [x[b.start[0] : b.start[0] + b.extent[0], b.start[1] : b.start[1] + b.extent[1]] for b in boxes]
    amax = torch.stack([nvfp4.amax(p) for p in parts]).amax()
    assert float(amax) == float(x.abs().max())
    whole = nvfp4.quantize(x, amax, f)
    codes, scales = torch.empty_like(whole.codes), torch.empty_like(whole.scales)
    for box, part in zip(boxes, parts, strict=True):
        q = nvfp4.quantize(part, amax, f, box=box, shape=tuple(x.shape))
        rows_of = slice(box.start[0], box.start[0] + box.extent[0])
        codes[rows_of, box.start[1] // 2 : (box.start[1] + box.extent[1]) // 2] = q.codes
        scales[rows_of, box.start[1] // 16 : (box.start[1] + box.extent[1]) // 16] = q.scales
        assert q.global_scale.equal(whole.global_scale)
    assert torch.equal(codes, whole.codes)
    assert torch.equal(scales, whole.scales)
    assert torch.isfinite(nvfp4.dequantize(codes, scales, whole.global_scale)).all()


def test_large_weights_go_in_chunks_without_a_seam() -> None:
    x = torch.from_numpy(bell(1088, 2048, 14)).to(torch.bfloat16)  # two chunks and a part of a third
    f = _formula("te-2d")
    amax = nvfp4.amax(x)
    q = nvfp4.quantize(x, amax, f)
    for start in (0, 496, 512, 1072):
        part = nvfp4.quantize(x[start : start + 16], amax, f)
        assert torch.equal(q.codes[start : start + 16], part.codes)
        assert torch.equal(q.scales[start : start + 16], part.scales)


@pytest.mark.parametrize(
    ("name", "box", "axis"),
    [
        ("te-2d", Box((8, 0), (16, 32)), 0),
        ("te-2d", Box((0, 0), (24, 32)), 0),
        ("te-1d", Box((0, 8), (4, 16)), 1),
        ("modelopt-1d", Box((0, 0), (4, 24)), 1),
    ],
)
def test_a_box_that_cuts_a_block_is_refused(name: str, box: Box, axis: int) -> None:
    x = torch.zeros(box.extent, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=rf"w\.weight .* cuts blocks of 16 on axis {axis}"):
        nvfp4.quantize(x, torch.tensor(1.0), _formula(name), name="w.weight", box=box, shape=(64, 64))


def test_weights_that_the_format_cannot_hold_are_refused() -> None:
    f = _formula("te-1d")
    one = torch.tensor(1.0)
    with pytest.raises(PlanError, match="40 columns"):
        nvfp4.quantize(torch.zeros(16, 40, dtype=torch.bfloat16), one, f)
    with pytest.raises(PlanError, match="matrices"):
        nvfp4.quantize(torch.zeros(2, 16, 16, dtype=torch.bfloat16), one, f)
    with pytest.raises(TypeError, match=r"\+f32"):
        nvfp4.quantize(torch.zeros(16, 16), one, f)
    with pytest.raises(ValueError, match="no NVFP4 formula"):
        nvfp4.quantize(torch.zeros(16, 16), one, formula("fp8/tensor@1"))


def test_kernel_wrappers_refuse_wrong_buffers() -> None:
    x, constants = torch.zeros(16, 32, dtype=torch.bfloat16), torch.ones(2)
    good = torch.zeros(16, 16, dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8"):
        quantize_(x, constants, Order.TE, False, good.to(torch.int8), None)
    with pytest.raises(ValueError, match="expected \\(16, 16\\)"):
        quantize_(x, constants, Order.TE, False, good[:, :8], None)
    with pytest.raises(TypeError, match="float16"):
        quantize_(x.half(), constants, Order.TE, False, good, None)
    with pytest.raises(TypeError, match=r"float32 \[slots, 2\]"):
        quantize_(x, torch.ones(3), Order.TE, False, good, None)
    with pytest.raises(TypeError, match="one float32"):
        amax_(x, torch.zeros(2))
    empty = torch.zeros(())
    amax_(torch.empty(0, 16), empty)
    assert float(empty) == 0.0


def test_formula_ids() -> None:
    assert formula("nvfp4/te-2d").id == "nvfp4/te-2d@1"
    assert formula("nvfp4/te-2d@1+f32").id == "nvfp4/te-2d@1+f32"
    assert {formula(i).id for i in known_ids()} == set(known_ids())
    for bad in ("nvfp4/te-3d", "nvfp4/te-2d@2", "te-2d", "nvfp4/te-2d@1+f16", "", "nvfp4/te-2d@x"):
        with pytest.raises(ValueError, match="unknown quantisation formula"):
            formula(bad)
