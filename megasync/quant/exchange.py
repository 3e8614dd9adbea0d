"""The one exchange of quantised export: every amax of the run, reduced with MAX in a single collective.

Between the amax pass and the quantising pass. The vector has one entry per atomic group of the schema, in sorted
order, so every rank has the same vector whatever it holds; 60,000 groups are 240 KB. Must import nothing above
kernels.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def exchange_amax(values: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, float]:
    """Reduce amaxes over a group.

    Args:
        values: float32 ``[n]``, >= 0, any device: this rank's amax of each group of tensors, 0 where it owns nothing,
            +inf or NaN where it met NaN or infinity.
        group: Process group of all ranks that own parts, used by nothing else at that moment; None: this rank is alone.

    Returns:
        The reduced vector, float32 ``[n]`` on the same device, +inf where any rank met NaN or infinity; and the seconds
        that the exchange took, from when this rank's own values were ready (waiting for slower ranks included).

    *Collective*: every rank of ``group`` must call, at the same point, with the same n.
    *Stream*: the current stream; synchronised before the exchange so that the time is the exchange's own.
    """
    # Before the reduction: backends differ in what MAX makes of NaN.
    clean = torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf)
    if clean.is_cuda:
        torch.cuda.current_stream(clean.device).synchronize()
    start = time.perf_counter()
    if group is None or not clean.numel():
        return clean, 0.0
    on_host = dist.get_backend(group) == "gloo"
    vector = clean.cpu() if on_host else clean
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    reduced = vector.to(values.device) if on_host else vector
    if reduced.is_cuda:
        torch.cuda.current_stream(reduced.device).synchronize()
    return reduced, time.perf_counter() - start
