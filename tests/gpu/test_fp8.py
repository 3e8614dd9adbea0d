"""FP8 on a CUDA device: bytes equal to those of the CPU reference, for single boxes and for batches of regions."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megasync.kernels.fp8_batch import Batch, Region
from megasync.kernels.fp8_reference import Fp8Order, quantize_reference_
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import Formula, formula, known_ids
from tests.golden.quant_inputs import DTYPES, bell, inputs, scattered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
FP8 = [i for i in known_ids() if i.startswith("fp8/")]


def _of(id: str, dtype: str) -> Formula:
    return formula(id if dtype == "bf16" else id + "+f32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", FP8)
def test_boxes_equal_the_cpu(id: str, dtype: str) -> None:
    f = _of(id, dtype)
    base = torch.from_numpy(bell(300, 520, 9)).to(DTYPES[dtype])
    views = [base, base[:, 1:], base.t()[:200], base[::3, :131]]  # the first goes wide, the others do not
    for x in [*inputs(dtype).values(), *views, *(scattered(256, 384, s, DTYPES[dtype]) for s in range(6))]:
        amax = nvfp4.amax(x) if f.needs_amax else None
        want = fp8.quantize(x, f, amax=amax)
        moved = base.cuda() if x._base is base else x.cuda()
        device = moved.as_strided(x.shape, x.stride(), x.storage_offset()) if x._base is base else moved
        got = fp8.quantize(device, f, amax=None if amax is None else amax.cuda())
        assert torch.equal(got.codes.cpu(), want.codes)
        assert torch.equal(got.scales.cpu(), want.scales)


@pytest.mark.parametrize("id", FP8)
def test_batches_equal_the_reference(id: str) -> None:
    """Ragged, strided and aligned regions in one batch, with and without codes, scales and exponents."""
    f = formula(id)
    assert isinstance(f.order, Fp8Order)
    base = torch.from_numpy(bell(1024, 2056, 4) * 0.02).to(torch.bfloat16)
    base[128:256, :128] = 0
    base[300, ::5] = -0.0
    cuts = [(slice(0, 512), slice(0, 2048)), (slice(512, 1000), slice(3, 1001)), (slice(1, 1024, 2), slice(0, 8))]
    height, width = f.block
    constants = fp8.constants(torch.tensor([0.07, 0.02]), f) if not height else None
    device, regions, wanted = base.cuda(), [], []
    for i, cut in enumerate(cuts):
        x = base[cut]
        extents = (-(-x.shape[0] // (height or 1)), -(-x.shape[1] // width) if width else 1)
        codes = torch.zeros(x.shape, dtype=torch.uint8) if i != 1 or not height else None
        scales = torch.zeros(extents) if height and i != 2 else None
        e8m0 = torch.zeros(extents, dtype=torch.uint8) if height and f.pow2 else None
        mine = None if constants is None else constants[i % 2]
        outs = [None if t is None else torch.zeros_like(t, device="cuda") for t in (codes, scales, e8m0)]
        regions.append(Region(device[cut], i % 2, *outs))
        quantize_reference_(x, f.block, f.order, f.pow2, mine, codes, scales, e8m0)
        wanted.append((codes, scales, e8m0))
    Batch(regions, f.block, f.order, f.pow2).quantize_(None if constants is None else constants.cuda())
    for region, want in zip(regions, wanted, strict=True):
        for a, b in zip((region.codes, region.scales, region.e8m0), want, strict=True):
            assert (a is None) == (b is None)
            assert b is None or torch.equal(a.cpu(), b)
