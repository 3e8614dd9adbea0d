"""The kernel of bench_one_queue. Nothing of the library is timed here."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["old_address", "num"])
def differ_kernel(old_address, new_ptr, num, counts_ptr, STEP: tl.constexpr, STAGES: tl.constexpr):
    """Counts the 8-byte vectors that differ, a part by each program; old ones may lie in pinned host memory."""
    old_ptr = old_address.to(tl.pointer_type(tl.int64))
    program = tl.program_id(0)
    lane = tl.arange(0, STEP)
    total = 0
    for start in tl.range(program * STEP, num, tl.num_programs(0) * STEP, num_stages=STAGES):
        i = start + lane
        old = tl.load(old_ptr + i, mask=i < num, other=0)
        new = tl.load(new_ptr + i, mask=i < num, other=0)
        total += tl.sum((old != new).to(tl.int32), 0)
    tl.store(counts_ptr + program, total)
