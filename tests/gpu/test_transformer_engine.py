"""TransformerEngine's own quantised tensors through the adapter, where TransformerEngine is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megasync.adapters.transformer_engine import StoredExporter, StoredWeight, storage_of
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import formula
from megasync.types import Box
from tests.golden.quant_inputs import bell

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPE = (384, 256)


def _engine() -> Any:
    """TransformerEngine's tensor modules; half-installed ones fail with errors other than ImportError."""
    try:
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch
    except Exception as e:
        pytest.skip(f"TransformerEngine is not installed: {type(e).__name__}")
    return transformer_engine_torch.DType


def _read(param: Any) -> dict[str, torch.Tensor]:
    """What the adapter gives of a parameter, by the last part of the name."""
    exporter = StoredExporter([StoredWeight("m.o_proj.weight", param, SHAPE, Box((0, 0), SHAPE))])
    owned = exporter.own([(p.name, p.box) for p in exporter.pieces()], exporter.specs())
    exporter.settle()
    return {p.name.rsplit(".", 1)[1]: p.data for p in owned}


def _weight() -> torch.Tensor:
    return torch.from_numpy(bell(*SHAPE, 1) * 0.02).to(torch.bfloat16).cuda()


def test_blockwise_storage() -> None:
    dtypes = _engine()
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        fp8_dtype=dtypes.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=2
    )
    param = quantizer(_weight())
    assert storage_of(param) == "fp8-block"
    got = _read(param)
    assert got["weight"].data_ptr() == param._rowwise_data.data_ptr()
    values = fp8.dequantize(got["weight"], got["weight_scale_inv"], formula("fp8/te-128-pow2"))
    assert torch.equal(values, param.dequantize(dtype=torch.float32))


def test_per_tensor_storage() -> None:
    dtypes = _engine()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    param = Float8CurrentScalingQuantizer(fp8_dtype=dtypes.kFloat8E4M3, device=torch.device("cuda"))(_weight())
    assert storage_of(param) == "fp8-tensor"
    got = _read(param)
    values = fp8.dequantize(got["weight"], got["weight_scale"], formula("fp8/te-tensor"))
    assert torch.equal(values, param.dequantize(dtype=torch.float32))


def test_nvfp4_storage() -> None:
    _engine()
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("TransformerEngine runs NVFP4 on compute capability 10.0 and above")
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    weight = _weight()
    param = NVFP4Quantizer(with_2d_quantization=True)(weight)
    assert storage_of(param) == "nvfp4"
    got = _read(param)
    want = nvfp4.quantize(weight.cpu(), nvfp4.amax(weight.cpu()), formula("nvfp4/te-2d"))
    assert torch.equal(got["weight"].cpu(), want.codes)
    assert torch.equal(got["weight_scale"].cpu(), want.scales)
    assert torch.equal(got["weight_scale_2"].cpu(), want.global_scale)
