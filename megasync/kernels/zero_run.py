"""Zero-run LZ4 and Snappy blocks of a mask on its own device: Triton on a GPU, plain torch elsewhere; equal bytes.

Before it in the flow: ``old XOR new`` as a dense mask in HBM. After it: copy of the blocks to host memory, outer codec.
The rules are in ``zero_run_rules``; ``codecs.zero_run`` makes the same bytes with numpy. Nothing of nvCOMP is needed to
encode, and no 32 KiB of scratch for each block. Three layers: private Triton kernels (``_zero_run_triton``), the
specification (``zero_run_reference``), and the checked op of this module. Must import nothing above kernels.

Bytes moved on a GPU: the mask is read twice in full (count, then positions; the sizes must be known before anything is
written), and once more at the literals; 4 to 8 bytes a changed byte and about 100 a sequence for positions and plan;
the output is written once. So at 0.1 % density about 2.3 bytes of traffic to a byte of mask.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

from megasync.kernels.zero_run_reference import changed_positions_reference, emit_reference, plan_sequences
from megasync.kernels.zero_run_rules import MAX_BLOCK_NBYTES, BlockKind, check_kind

_SCAN_WORDS = 2048  # eight-byte words that one program of the scans takes
_EMIT_BYTES = 1024


def encode_zero_run(
    kind: BlockKind, mask: torch.Tensor, bounds: torch.Tensor, *, use_triton: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a dense mask into zero-run blocks.

    Args:
        kind: Block format.
        mask: uint8 ``[n]``, ``n`` below 2^31, any device, contiguous; on the Triton path aligned to 8 bytes.
        bounds: int64 ``[B + 1]``, CPU: where each block starts and ends in the mask; blocks of 1 byte to 1 MiB.
        use_triton: Force (True; also for a CPU tensor under Triton's interpreter) or forbid the kernels. By default
            they run where the mask is on a GPU and Triton is installed.

    Returns:
        uint8 bytes of all blocks one after the other, and int64 ``[B + 1]`` bounds of the blocks in them; both on the
        mask's device. A dense block may be larger than its mask.

    Raises:
        ValueError: An argument breaks the rules above.

    *Stream*: the current stream; waits for it three times (changed bytes, sequences, size of the output).
    *Memory*: result and scratch come from torch's allocator; nothing is kept.
    """
    check_kind(kind)
    _check(mask, bounds)
    kernels = _kernels(mask, use_triton)
    if kernels is not None and mask.data_ptr() % 8:
        raise ValueError("encode_zero_run: the mask must be aligned to 8 bytes")
    start, stop = int(bounds[0]), int(bounds[-1])
    device_bounds = bounds.to(mask.device, non_blocking=True)
    positions = changed_positions_reference(mask) if kernels is None else _changed_positions(kernels, mask)
    if start > 0 or stop < len(mask):
        positions = positions[(positions >= start) & (positions < stop)]
    plan = plan_sequences(kind, positions, device_bounds)
    if kernels is None:
        return emit_reference(kind, mask, plan), plan.block_bounds
    total = int(plan.offsets[-1])
    out = torch.empty(total, dtype=torch.uint8, device=mask.device)
    kernels.emit_kernel[(-(-total // _EMIT_BYTES),)](
        mask,
        out,
        plan.offsets,
        plan.literal_start,
        plan.literal_nbytes,
        plan.match_nbytes,
        plan.header_nbytes,
        len(plan.literal_start),
        total,
        IS_LZ4=kind == "lz4",
        BYTES=_EMIT_BYTES,
    )
    return out, plan.block_bounds


def changed_positions(mask: torch.Tensor, *, use_triton: bool | None = None) -> torch.Tensor:
    """Positions of the bytes of a mask that are not 0, ascending.

    Args:
        mask: uint8 ``[n]``, any device, contiguous; on the Triton path aligned to 8 bytes.
        use_triton: As in ``encode_zero_run``.

    Returns:
        int64 on the mask's device.

    Raises:
        ValueError: The mask is none.

    *Stream*: the current stream; waits for it once.
    """
    if mask.dtype is not torch.uint8 or mask.ndim != 1 or not mask.is_contiguous():
        raise ValueError(f"a mask is a contiguous uint8 vector, got {mask.dtype} {tuple(mask.shape)}")
    kernels = _kernels(mask, use_triton)
    if kernels is not None and mask.data_ptr() % 8:
        raise ValueError("changed_positions: the mask must be aligned to 8 bytes")
    return changed_positions_reference(mask) if kernels is None else _changed_positions(kernels, mask)


def _changed_positions(kernels: ModuleType, mask: torch.Tensor) -> torch.Tensor:
    whole = len(mask) & ~7
    rest = torch.nonzero(mask[whole:]).squeeze(1) + whole if whole < len(mask) else None
    words = mask[:whole].view(torch.int64)
    grid = (-(-len(words) // _SCAN_WORDS),)
    if not grid[0]:
        return torch.nonzero(mask).squeeze(1)
    counts = torch.empty(grid, dtype=torch.int32, device=mask.device)
    kernels.count_kernel[grid](words, counts, len(words), WORDS=_SCAN_WORDS)
    end = torch.cumsum(counts, 0)
    positions = torch.empty(int(end[-1]), dtype=torch.int64, device=mask.device)
    kernels.positions_kernel[grid](words, end - counts, positions, len(words), WORDS=_SCAN_WORDS)
    return positions if rest is None else torch.cat((positions, rest))


def _kernels(mask: torch.Tensor, use_triton: bool | None) -> ModuleType | None:
    """The Triton kernels, or None where the reference runs."""
    if use_triton is None:
        use_triton = mask.device.type != "cpu" and importlib.util.find_spec("triton") is not None
    return importlib.import_module("megasync.kernels._zero_run_triton") if use_triton else None


def _check(mask: torch.Tensor, bounds: torch.Tensor) -> None:
    if mask.dtype is not torch.uint8 or mask.ndim != 1 or not mask.is_contiguous() or len(mask) >= 1 << 31:
        raise ValueError(
            f"a mask is a contiguous uint8 vector below 2^31 bytes, got {mask.dtype} {tuple(mask.shape)}; "
            "encode more in several calls"
        )
    if bounds.dtype is not torch.int64 or bounds.device.type != "cpu" or bounds.ndim != 1 or len(bounds) < 2:
        raise ValueError(f"bounds are two or more int64 on the CPU, got {bounds.dtype} {tuple(bounds.shape)}")
    nbytes = bounds.diff()
    if (
        int(bounds[0]) < 0
        or int(bounds[-1]) > len(mask)
        or int(nbytes.min()) < 1
        or int(nbytes.max()) > MAX_BLOCK_NBYTES
    ):
        raise ValueError(
            f"blocks of {int(nbytes.min())} to {int(nbytes.max())} bytes from {int(bounds[0])} to {int(bounds[-1])}: they "
            f"must have 1 to {MAX_BLOCK_NBYTES} bytes and lie in the mask's {len(mask)}"
        )
