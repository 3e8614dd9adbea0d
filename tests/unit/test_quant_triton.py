"""The Triton kernels, run by Triton's interpreter and compiled for a GPU that need not be there, against the reference."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.kernels import nvfp4, nvfp4_batch
from megasync.kernels.nvfp4_reference import FLT_MAX, Order, amax_reference, quantize_reference_
from tests.golden.quant_inputs import DTYPES, inputs

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def constants_for(order: Order, amax: torch.Tensor) -> torch.Tensor:
    """Constants of each order, in fp32."""
    top = torch.full_like(amax, 2688.0)
    encode = torch.div(top, amax).clamp(max=FLT_MAX)
    decode = torch.where(amax / top == 0, 1.0, amax / top)
    pairs = {
        Order.TE: (encode * torch.full_like(amax, 6.0).reciprocal(), encode.reciprocal()),
        Order.MODELOPT: (decode * 6.0, decode),
        Order.COMPRESSED: (encode, encode),
    }
    return torch.stack(pairs[order], dim=-1)


def compare_boxes() -> int:
    """Single boxes: ragged rows, strided views, every order; gives back how many were compared."""
    num = 0
    for dtype, cases in (("bf16", ("ties", "sparse", "tiny")), ("f32", ("sparse", "wide"))):
        for case in cases:
            x = inputs(dtype)[case]
            for view in [x[:20, :32]] if case != "sparse" else [x[:20, :48], x.t()[16:32, :32], x[15:23:2, 16:80]]:
                amax = torch.zeros(())
                nvfp4.amax_(view, amax)
                assert torch.equal(amax, amax_reference(view)), (dtype, case)
                for order in Order:
                    two_d = (num % 2) == 0
                    got = [torch.full((view.shape[0], view.shape[1] // n), 77, dtype=torch.uint8) for n in (2, 16)]
                    want = [t.clone() for t in got]
                    constants = constants_for(order, amax)
                    nvfp4.quantize_(view, constants, order, two_d, got[0], got[1] if num % 3 else None)
                    quantize_reference_(view, constants, order, two_d, want[0], want[1] if num % 3 else None)
                    assert torch.equal(got[0], want[0]), (dtype, case, order, two_d)
                    assert torch.equal(got[1], want[1]), (dtype, case, order, two_d)
                    num += 1
    bad = torch.zeros(16, 16)
    for value in (float("nan"), float("-inf")):
        bad[3, 3] = value
        amax = torch.zeros(())
        nvfp4.amax_(bad, amax)
        assert not torch.isfinite(amax)
    return num


def compare_batches() -> int:
    """Regions of several sizes, strides and slots in one launch."""
    num = 0
    for dtype in DTYPES:
        x = inputs(dtype)["wide"]
        views = [x[:16, :64], x[16:33, 32:64], x.t()[:16, :16]]
        for order in Order:
            for chosen in (views, views[:2]):  # with the transposed view the addresses are not aligned
                regions = []
                for i, v in enumerate(chosen):
                    codes = (
                        None
                        if i == 1 and order is Order.TE
                        else torch.zeros(v.shape[0], v.shape[1] // 2, dtype=torch.uint8)
                    )
                    scales = None if i == 2 else torch.zeros(v.shape[0], v.shape[1] // 16, dtype=torch.uint8)
                    regions.append(nvfp4_batch.Region(v, i % 2, codes, scales))
                batch = nvfp4_batch.Batch(regions, order, num % 2 == 0)
                values, want = torch.zeros(2), torch.zeros(2)
                batch.amax_(values)
                for r in regions:
                    if r.codes is not None:
                        want[r.slot] = torch.maximum(want[r.slot], amax_reference(r.data))
                assert torch.equal(values, want)
                constants = constants_for(order, torch.tensor([4096.0, 9000.0]))
                batch.quantize_(constants)
                for r in regions:
                    again = [None if t is None else torch.zeros_like(t) for t in (r.codes, r.scales)]
                    quantize_reference_(r.data, constants[r.slot], order, num % 2 == 0, again[0], again[1])
                    for a, b in zip(again, (r.codes, r.scales), strict=True):
                        assert a is None or b is None or torch.equal(a, b)
                num += 1
    return num


def _interpret() -> None:
    """Body of the subprocess: send CPU tensors to the kernels, which the interpreter runs."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    kernels = importlib.import_module("megasync.kernels._nvfp4_triton")
    for module in (nvfp4, nvfp4_batch):
        module.triton_kernels = lambda x: kernels  # type: ignore[attr-defined]
    nvfp4_batch._STEPS = 1  # type: ignore[misc]  # the interpreter runs masked-off steps too
    print("boxes", compare_boxes(), "batches", compare_batches())


def _compile() -> None:
    """Body of the subprocess: compile for sm_90 and print each kernel's fp32 instructions."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]
    from triton.compiler import compile as triton_compile

    kernels = importlib.import_module("megasync.kernels._nvfp4_triton")
    for bf16 in (True, False):
        for order in range(3):
            chosen = {
                "ORDER": order,
                "IS_BF16": bf16,
                "TWO_D": True,
                "ALIGNED": True,
                "WIDTH": 11,
                "BLOCKS": 8,
                "STEPS": 8,
            }
            signature = {"table_ptr": "*i64", "region_ptr": "*i32", "constants_ptr": "*fp32"}
            signature |= dict.fromkeys(chosen, "constexpr")
            source = ASTSource(fn=kernels.batch_quantize_kernel, signature=signature, constexprs=chosen)
            options = {"enable_fp_fusion": False}
            ptx = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
            found = sorted(set(re.findall(r"\b([a-z]+\.[\w.]*f32[\w.]*)", ptx)))
            wide = "ld.global.v4.b32" in ptx
            print("kernel", bf16, order, wide, *found)


def _run(what: str, tmp_path: Path, **more: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_CACHE_DIR": str(tmp_path)} | more
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), what], capture_output=True, text=True, timeout=110, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_triton
def test_interpreted_kernels_equal_the_reference(tmp_path: Path) -> None:
    out = _run("interpret", tmp_path, TRITON_INTERPRET="1")
    assert re.fullmatch(r"boxes 27 batches 12\s*", out)


@needs_triton
def test_compiled_kernels_round_as_ieee_and_contract_nothing(tmp_path: Path) -> None:
    """No fused multiply-add, no flush to zero, no approximate division or reciprocal in what the GPU gets."""
    lines = [x.split() for x in _run("compile", tmp_path).splitlines() if x.startswith("kernel")]
    assert len(lines) == 6
    allowed = {"abs.f32", "cvt.rn.f32.s32", "div.rn.f32", "max.f32", "min.f32", "mul.f32", "mul.rn.f32"}
    compared = re.compile(r"setp\.\w+\.f32|selp\.f32|mov\.f32")
    for _, _, _, wide, *found in lines:
        assert wide == "True"
        assert {f for f in found if not compared.fullmatch(f)} <= allowed
        assert "div.rn.f32" in found


def test_batches_on_cpu_equal_single_boxes() -> None:
    assert compare_batches() == 12


def test_batches_refuse_what_differs() -> None:
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    codes = torch.zeros(16, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="share dtype and device"):
        nvfp4_batch.Batch(
            [nvfp4_batch.Region(x, 0, codes, None), nvfp4_batch.Region(x.float(), 0, codes, None)], Order.TE, True
        )
    with pytest.raises(ValueError, match="expected"):
        nvfp4_batch.Batch([nvfp4_batch.Region(x, 0, codes[:8], None)], Order.TE, True)
    empty = nvfp4_batch.Batch([], Order.TE, True)
    values = torch.zeros(3)
    empty.amax_(values)
    empty.quantize_(torch.ones(3, 2))
    assert not values.any()


if __name__ == "__main__":
    {"interpret": _interpret, "compile": _compile}[sys.argv[1]]()
