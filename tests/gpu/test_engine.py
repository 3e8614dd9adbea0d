"""The Decompression Engine on a real driver: it decodes where there is one, and is refused by name where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasync.codecs import zero_run
from megasync.codecs.block_batch import Span
from megasync.codecs.engine import Engine, probe_engine
from megasync.codecs.engine_arena import HostArena
from megasync.codecs.engine_driver import CudaDriver, load_libcuda
from megasync.errors import PlanError
from megasync.kernels.zero_run_rules import BLOCK_KINDS, BlockKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    torch.zeros(1, device="cuda:0")  # makes the device's context current
    return CudaDriver(load_libcuda())


def test_probe_of_this_device(driver: CudaDriver) -> None:
    probe = probe_engine(driver, 0)
    assert driver.version >= 12080
    assert probe.has_call
    major = torch.cuda.get_device_capability(0)[0]
    if major < 10:
        assert (probe.algorithm_mask, probe.max_nbytes) == (0, 0)
        for kind in BLOCK_KINDS:
            with pytest.raises(PlanError, match="device 0 has no Decompression Engine"):
                Engine(driver, probe, kind)


@pytest.mark.alone
def test_arena_is_capable_or_refused(driver: CudaDriver) -> None:
    """The driver may take the engine's flag without an engine; then the pointer attribute decides."""
    free = torch.cuda.mem_get_info()[0]
    has_engine = probe_engine(driver, 0).algorithm_mask != 0
    try:
        arena = HostArena(driver, 0, (2 << 20) + 1, device_writes=True)
    except PlanError:
        made = False
    else:
        made = True
        with arena:
            assert arena.span.nbytes == 4 << 20
            arena.view[:] = 7
            assert int(arena.view.sum(dtype=np.int64)) == 7 * (4 << 20)
    assert made or not has_engine
    assert torch.cuda.mem_get_info()[0] >= free - (4 << 20)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("density", [0.0, 0.00085, 0.02])
def test_engine_decodes_zero_run_blocks(driver: CudaDriver, kind: BlockKind, density: float) -> None:
    probe = probe_engine(driver, 0)
    if probe.refusal(kind) is not None:
        pytest.skip(str(probe.refusal(kind)))
    lengths = [1, 16, 65, 127, 128, 16_384, 65_535, 65_536, (1 << 20) - 1, 1 << 20]
    rng = np.random.default_rng(5)
    parts = [(rng.random(n) < density).astype(np.uint8) * 3 for n in lengths]
    blocks = [zero_run.encode_mask(kind, m, np.array([0, len(m)])).data for m in parts]
    nbytes = np.array([len(b) for b in blocks])
    padded = -(-nbytes // 16) * 16
    offsets = np.cumsum(padded) - padded
    out_nbytes = np.array(lengths)
    out_offsets = np.cumsum(out_nbytes + 16) - out_nbytes - 16
    with HostArena(driver, 0, int(padded.sum()) + 4096, device_writes=True) as arena:
        for at, block in zip(offsets, blocks, strict=True):
            arena.view[at : at + len(block)] = block
        sizes = arena.view[-4096:].view(np.uint32)
        out = torch.full((int(out_offsets[-1]) + (1 << 20),), 0x5A, dtype=torch.uint8, device="cuda:0")
        engine = Engine(driver, probe, kind)
        stream = torch.cuda.current_stream(0)
        queued = engine.decompress(
            engine.plan(len(parts), 1 << 20, int(nbytes.sum())),
            arena.view[:-4096],
            offsets,
            nbytes,
            Span(out.data_ptr(), out.numel()),
            out_offsets,
            out_nbytes,
            sizes,
            stream.cuda_stream,
        )
        stream.synchronize()
        queued.check()
        found = out.cpu().numpy()
        for at, mask in zip(out_offsets, parts, strict=True):
            assert np.array_equal(found[at : at + len(mask)], mask), f"{kind} block of {len(mask)} bytes"
