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

from megasync.kernels import amax, fp8_batch, fp8_reference, nvfp4, nvfp4_batch
from megasync.kernels.amax import AmaxBatch, amax_reference
from megasync.kernels.fp8_reference import Fp8Order
from megasync.kernels.nvfp4_reference import FLT_MAX, Order, quantize_reference_
from tests.golden.quant_inputs import DTYPES, bell, inputs, scattered

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
                top = torch.zeros(())
                nvfp4.amax_(view, top)
                assert torch.equal(top, amax_reference(view)), (dtype, case)
                for order in Order:
                    two_d = (num % 2) == 0
                    got = [torch.full((view.shape[0], view.shape[1] // n), 77, dtype=torch.uint8) for n in (2, 16)]
                    want = [t.clone() for t in got]
                    constants = constants_for(order, top)
                    nvfp4.quantize_(view, constants, order, two_d, got[0], got[1] if num % 3 else None)
                    quantize_reference_(view, constants, order, two_d, want[0], want[1] if num % 3 else None)
                    assert torch.equal(got[0], want[0]), (dtype, case, order, two_d)
                    assert torch.equal(got[1], want[1]), (dtype, case, order, two_d)
                    num += 1
    bad = torch.zeros(16, 16)
    for value in (float("nan"), float("-inf")):
        bad[3, 3] = value
        top = torch.zeros(())
        nvfp4.amax_(bad, top)
        assert not torch.isfinite(top)
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
                AmaxBatch([(r.data, r.slot) for r in regions if r.codes is not None]).raise_(values)
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


def compare_edges() -> int:
    """Any exponents in one block, scales that saturate: where each step under- or overflows."""
    num = 0
    for dtype in DTYPES.values():
        for seed in (3, 4):
            x = scattered(16, 128, seed, dtype)
            for order in Order:
                constants = constants_for(order, amax_reference(x) * (1.0, 0.125, 2.0**-20)[num % 3])
                got, want = ([torch.zeros(16, 128 // n, dtype=torch.uint8) for n in (2, 16)] for _ in range(2))
                nvfp4.quantize_(x, constants, order, num % 2 == 0, *got)
                quantize_reference_(x, constants, order, num % 2 == 0, *want)
                assert torch.equal(got[0], want[0]), (dtype, seed, order)
                assert torch.equal(got[1], want[1]), (dtype, seed, order)
                num += 1
    return num


FP8_RULES = [
    ((128, 128), Fp8Order.DEEPGEMM, False),
    ((128, 128), Fp8Order.DEEPGEMM, True),
    ((128, 128), Fp8Order.TE, False),
    ((128, 128), Fp8Order.TE, True),
    ((1, 0), Fp8Order.DIVIDE, False),
    ((0, 0), Fp8Order.DIVIDE, False),
    ((0, 0), Fp8Order.TE, False),
]


def compare_fp8() -> int:
    """Ragged, strided and aligned regions of every FP8 rule, in batches of several."""
    num = 0
    for dtype in DTYPES.values():
        base = torch.from_numpy(bell(130, 136, 6) * 0.02).to(dtype)
        base[:128, :128] = 0
        base[129, ::3] = -0.0
        views = [base, base[120:, 1:132], scattered(16, 48, 2 + num % 3, dtype)]
        for block, order, pow2 in FP8_RULES:
            height, width = block
            tops = torch.stack([amax_reference(v) for v in views])
            constants = None
            if not height:
                constants = torch.stack(fp8_reference.scale_and_factor(tops, order, pow2), dim=-1)
            regions, wanted = [], []
            for i, v in enumerate(views):
                extents = (-(-v.shape[0] // (height or 1)), -(-v.shape[1] // width) if width else 1)
                outs: list[torch.Tensor | None] = [torch.zeros(v.shape, dtype=torch.uint8), None, None]
                if height:
                    outs[1] = torch.zeros(extents) if i != 1 else None
                    outs[2] = torch.zeros(extents, dtype=torch.uint8) if pow2 else None
                    outs[0] = outs[0] if i != 2 else None
                again = [None if t is None else t.clone() for t in outs]
                mine = None if constants is None else constants[i]
                fp8_reference.quantize_reference_(v, block, order, pow2, mine, *again)
                regions.append(fp8_batch.Region(v, i, *outs))
                wanted.append(again)
            fp8_batch.Batch(regions, block, order, pow2).quantize_(constants)
            for region, again in zip(regions, wanted, strict=True):
                for a, b in zip((region.codes, region.scales, region.e8m0), again, strict=True):
                    assert a is None or b is None or torch.equal(a, b), (dtype, block, order, pow2)
            num += 1
    return num


def _interpret() -> None:
    """Body of the subprocess: send CPU tensors to the kernels, which the interpreter runs."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    for module in (amax, nvfp4_batch, fp8_batch):
        module.kernels_for = lambda _, name: importlib.import_module(f"megasync.kernels.{name}")  # type: ignore[attr-defined]
    print("boxes", compare_boxes(), "batches", compare_batches(), "edges", compare_edges(), "fp8", compare_fp8())


def _compile() -> None:
    """Body of the subprocess: compile for sm_90 and print each kernel's fp32 instructions."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]
    from triton.compiler import compile as triton_compile

    four = importlib.import_module("megasync.kernels._nvfp4_triton").quantize_kernel
    eight = importlib.import_module("megasync.kernels._fp8_triton")
    chosen: list[tuple[object, dict[str, object]]] = []
    for order in range(3):
        shape = {"TWO_D": True, "ROWS": 16, "BLOCKS": 4, "IS_BF16": order != 1}
        chosen.append((four, {"ORDER": order, **shape}))
    for kernel, order in ((eight.tile_kernel, 0), (eight.row_kernel, 2)):
        shape = {"ROWS": 8, "PAIRS": 64, "BLOCKED": True, "POW2": False}
        chosen.append((kernel, {"ORDER": order, "IS_BF16": True, **shape}))
    for kernel, constants in chosen:
        constants = constants | {"ALIGNED": True, "WIDTH": 13}
        signature = {"table_ptr": "*i64", "region_ptr": "*i32", "constants_ptr": "*fp32", "steps": "i32"}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"enable_fp_fusion": False, "num_warps": 1}
        ptx = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        found = sorted(set(re.findall(r"\b([a-z]+\.[\w.]*f32[\w.]*)", ptx)))
        wide = "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx
        print("kernel", wide, *found)


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
    assert re.fullmatch(r"boxes 27 batches 12 edges 12 fp8 14\s*", out)


@needs_triton
def test_compiled_kernels_round_as_ieee_and_fuse_only_what_is_named(tmp_path: Path) -> None:
    """Wide loads; no flush to zero, no approximate division or reciprocal in what the GPU gets, whatever the order."""
    lines = [x.split() for x in _run("compile", tmp_path).splitlines() if x.startswith("kernel")]
    assert len(lines) == 5
    arithmetic = re.compile(r"(abs|neg|add|sub|mul|max|min|fma|div)(\.rn)?\.f32")
    compared = re.compile(r"setp\.\w+\.f32|selp\.f32|mov\.f32|cvt\.rn\.f32\.s32")
    for _, wide, *found in lines:
        assert wide == "True"
        assert not [f for f in found if not arithmetic.fullmatch(f) and not compared.fullmatch(f)]
        assert {"div.rn.f32", "fma.rn.f32"} <= set(found)


def test_batches_on_cpu_equal_single_boxes() -> None:
    assert compare_batches() == 12
    assert compare_fp8() == 14


def test_batches_refuse_what_differs() -> None:
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    codes = torch.zeros(16, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="share dtype and device"):
        nvfp4_batch.Batch(
            [nvfp4_batch.Region(x, 0, codes, None), nvfp4_batch.Region(x.float(), 0, codes, None)], Order.TE, True
        )
    with pytest.raises(ValueError, match="expected"):
        nvfp4_batch.Batch([nvfp4_batch.Region(x, 0, codes[:8], None)], Order.TE, True)
    values = torch.zeros(3)
    AmaxBatch([]).raise_(values)
    nvfp4_batch.Batch([], Order.TE, True).quantize_(torch.ones(3, 2))
    fp8_batch.Batch([], (1, 0), Fp8Order.DIVIDE, False).quantize_()
    assert not values.any()
    with pytest.raises(TypeError, match="contiguous float32"):
        AmaxBatch([(x, 0)]).raise_(values.double())
    with pytest.raises(ValueError, match="not \\(64, 64\\)"):
        fp8_batch.Batch([], (64, 64), Fp8Order.TE, False)
    region = fp8_batch.Region(x, 0, torch.zeros(16, 32, dtype=torch.uint8), None)
    with pytest.raises(ValueError, match="needs its constants"):
        fp8_batch.Batch([region], (0, 0), Fp8Order.TE, False).quantize_()
    with pytest.raises(ValueError, match=r"scales of shape \(1, 2\).*expected \(1, 1\)"):
        fp8_batch.Batch([fp8_batch.Region(x, 0, None, torch.zeros(1, 2))], (128, 128), Fp8Order.TE, False)
    with pytest.raises(ValueError, match="written by its owner"):
        fp8_batch.Batch([fp8_batch.Region(x, 0, None, torch.zeros(1, 1))], (0, 0), Fp8Order.TE, False)


if __name__ == "__main__":
    {"interpret": _interpret, "compile": _compile}[sys.argv[1]]()
