"""NVFP4 on a CUDA device: bytes equal to those of the CPU reference, for kernels, batches and plain torch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megasync.kernels.amax import AmaxBatch
from megasync.kernels.nvfp4_batch import Batch, Region
from megasync.kernels.nvfp4_reference import BLOCK, Order, quantize_reference_
from megasync.quant import nvfp4
from megasync.quant.formulas import Formula, formula, known_ids
from tests.golden.quant_inputs import DTYPES, bell, inputs, scattered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
NVFP4 = [i for i in known_ids() if i.startswith("nvfp4/")]


def _of(id: str, dtype: str) -> Formula:
    return formula(id if dtype == "bf16" else id + "+f32")


def _same(f: Formula, x: torch.Tensor, device_view: torch.Tensor) -> None:
    want = nvfp4.quantize(x, nvfp4.amax(x), f)
    amax = nvfp4.amax(device_view)
    assert amax.is_cuda
    assert torch.equal(amax.cpu(), nvfp4.amax(x))
    got = nvfp4.quantize(device_view, amax, f)
    assert torch.equal(got.scales.cpu(), want.scales)
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.global_scale.cpu(), want.global_scale)
    assert torch.equal(nvfp4.encode_scale(amax, f).cpu(), nvfp4.encode_scale(amax.cpu(), f))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", NVFP4)
def test_kernels_equal_the_reference(id: str, dtype: str) -> None:
    f = _of(id, dtype)
    for x in inputs(dtype).values():
        on_device = x.cuda()
        _same(f, x, on_device)
        _same(f, x[3:36, 16:112].contiguous(), on_device[3:36, 16:112])
        _same(f, x.t()[:, :48].contiguous(), on_device.t()[:, :48])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", NVFP4)
def test_kernels_equal_the_reference_on_many_values(id: str, dtype: str) -> None:
    f = _of(id, dtype)
    for exponent in (-39, -6, 0, 36):
        x = torch.from_numpy(bell(1000, 2048, exponent + 50) * 10.0**exponent).to(DTYPES[dtype])
        x *= torch.exp2(torch.arange(1000) % 21 - 10.0).to(x.dtype)[:, None] if exponent != 36 else 1.0
        _same(f, x, x.cuda())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", NVFP4)
def test_plain_torch_on_the_device_equals_plain_torch_on_the_cpu(id: str, dtype: str) -> None:
    f = _of(id, dtype)
    assert isinstance(f.order, Order)
    for x in inputs(dtype).values():
        constants = nvfp4.constants(nvfp4.amax(x), f)
        assert torch.equal(nvfp4.constants(nvfp4.amax(x).cuda(), f).cpu(), constants)
        out = []
        for device in ("cpu", "cuda"):
            codes = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=device)
            scales = torch.zeros(x.shape[0], x.shape[1] // BLOCK, dtype=torch.uint8, device=device)
            quantize_reference_(x.to(device), constants.to(device), f.order, f.block[0] == BLOCK, codes, scales)
            out.append((codes.cpu(), scales.cpu()))
        assert torch.equal(out[0][0], out[1][0])
        assert torch.equal(out[0][1], out[1][1])


@needs_triton
def test_nan_and_infinity_are_seen() -> None:
    for dtype in DTYPES.values():
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = torch.zeros(100, 512, dtype=dtype, device="cuda")
            x[77, 300] = bad
            assert not torch.isfinite(nvfp4.amax(x))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", list(Order))
def test_batches_equal_single_boxes(order: Order, dtype: str) -> None:
    base = torch.from_numpy(bell(1024, 4096, 3) * 0.02).to(DTYPES[dtype]).cuda()
    for views in (
        [base[:512], base[512:528, :1040], base[528:, 2048:], base[512:1000, 1040:1056]],
        [base[:17, 16:], base.t()[:96, :160], base[1::2, 32:4000]],
    ):
        for two_d in (False, True):
            regions = [
                Region(
                    v,
                    i % 3,
                    torch.zeros(v.shape[0], v.shape[1] // 2, dtype=torch.uint8, device="cuda") if i != 1 else None,
                    torch.zeros(v.shape[0], v.shape[1] // 16, dtype=torch.uint8, device="cuda") if i != 2 else None,
                )
                for i, v in enumerate(views)
            ]
            batch = Batch(regions, order, two_d)
            values = torch.zeros(3, device="cuda")
            AmaxBatch([(r.data, r.slot) for r in regions if r.codes is not None]).raise_(values)
            want = torch.zeros(3)
            for r in regions:
                if r.codes is not None:
                    want[r.slot] = torch.maximum(want[r.slot], nvfp4.amax(r.data.cpu()))
            assert torch.equal(values.cpu(), want)
            constants = torch.tensor([[5e3, 2e-5], [4e3, 3e-5], [6e3, 1e-5]])
            batch.quantize_(constants.cuda())
            for r in regions:
                again = [None if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in (r.codes, r.scales)]
                quantize_reference_(r.data.cpu(), constants[r.slot], order, two_d, again[0], again[1])
                for a, b in zip(again, (r.codes, r.scales), strict=True):
                    assert a is None or b is None or torch.equal(a, b.cpu())


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", NVFP4)
def test_kernels_equal_the_reference_where_steps_under_and_overflow(id: str, dtype: str) -> None:
    """Any exponents in one block, amaxes that saturate the scales: every rounding at its edges, exact division among them."""
    f = _of(id, dtype)
    assert isinstance(f.order, Order)
    for seed in range(6):
        x = scattered(512, 1024, seed, DTYPES[dtype])
        for factor in (1.0, 0.125, 2.0**-20):
            amax = (nvfp4.amax(x) * factor).clamp(max=3.38e38)
            constants = nvfp4.constants(amax, f)
            want = [torch.zeros(512, 1024 // n, dtype=torch.uint8) for n in (2, 16)]
            quantize_reference_(x, constants, f.order, f.block[0] == BLOCK, *want)
            got = [t.cuda() for t in (torch.zeros_like(w) for w in want)]
            batch = Batch([Region(x.cuda(), 0, got[0], got[1])], f.order, f.block[0] == BLOCK)
            batch.quantize_(constants.view(1, 2).cuda())
            assert torch.equal(got[0].cpu(), want[0]), (seed, factor)
            assert torch.equal(got[1].cpu(), want[1]), (seed, factor)
