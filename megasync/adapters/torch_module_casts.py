"""Casts: live tensors that hold canonical ones, stacked or re-laid, in a wider float dtype.

The derivation builds the live tensor in the canonical dtype through the layout algebra, then casts it; it is turned
around by casting back. Used by ``torch_module``. Must not import an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from megasync.adapters.torch_module_sketch import Sketch
from megasync.errors import PlanError
from megasync.layout.chain import row_major
from megasync.layout.evaluate import gather, xor_
from megasync.layout.modes import Layout
from megasync.receiver.engine import Derivation, Tensors
from megasync.receiver.shadow import is_widening, narrowed

_SCRATCH = "scratch"


def cast_group(live: str, tensor: torch.Tensor, sketches: Sequence[Sketch], source: torch.dtype) -> Derivation:
    """The derivation of one live tensor.

    Args:
        live: Its name.
        tensor: The live tensor.
        sketches: What it is made of: canonical tensors of one dtype that together fill it.
        source: Their dtype.

    Raises:
        PlanError: The cast loses bits.
    """
    names = tuple(dict.fromkeys(p.name for s in sketches for p in s.parts))
    if not is_widening(source, tensor.dtype):
        raise PlanError(
            f"{live} is live {tensor.dtype}, canonical {', '.join(names[:8])} {source}: such a cast loses bits or is none, "
            "so what the engine computes with is not the published weight; load it in its own dtype"
        )
    shape, device, wide = tuple(tensor.shape), tensor.device, tensor.dtype
    layouts: dict[str, Layout] = {}
    for p in (p for s in sketches for p in s.parts):
        if p.name in layouts or p.start != (0,) * len(p.shape) or p.stop != p.shape:
            raise PlanError(
                f"{live}: {p.name} is only partly or twice in it and cast besides; write a derivation for it"
            )
        layouts[p.name] = p.layout(_SCRATCH, 0, row_major(shape) or (1,))
    nbytes = prod(shape) * source.itemsize

    def derive(x: Tensors) -> Tensors:
        scratch = torch.zeros(nbytes, dtype=torch.uint8)
        for name, layout in layouts.items():
            xor_(layout, {_SCRATCH: scratch}, x[name].contiguous().reshape(-1).view(torch.uint8).cpu())
        return {live: scratch.view(source).view(shape).to(device=device, dtype=wide)}

    def recover(tensors: Tensors) -> Tensors:
        plain = narrowed(tensors[live].cpu(), source).contiguous().reshape(-1).view(torch.uint8)
        return {name: gather(layout, {_SCRATCH: plain}).view(source) for name, layout in layouts.items()}

    return Derivation(f"cast of {live}", names, (live,), derive, recover)
