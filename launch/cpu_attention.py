"""Core attention in plain torch, for the CPU shim: causal, with context parallelism and any head sizes.

Megatron's local attention refuses context parallelism and expects equal key and value heads. This one gathers keys and
values over the context-parallel group and masks by global position. Used by launch/cpu_shim.py only; not fast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class CpuCoreAttention(torch.nn.Module):
    """Causal attention over ``[sequence, batch, heads, head size]`` tensors.

    Args:
        config: Unused; part of Megatron's signature, as are the layer number and further keywords.
        layer_number: Unused.
        softmax_scale: Scale of the scores; ``1 / sqrt(query head size)`` when None.
        **kwargs: ``attn_mask_type``, ``attention_type``, ``cp_comm_type``, ``k_channels``, ``v_channels``, ...: unused.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend to all earlier positions of the whole sequence.

        Args:
            query: ``[s, b, heads, d]``, this rank's part of the sequence in Megatron's zigzag order.
            key: ``[s, b, groups, d]``.
            value: ``[s, b, groups, dv]``.
            attention_mask: Ignored: always causal.
            **kwargs: Ignored.

        Returns:
            ``[s, b, heads * dv]``.
        """
        size, rank, length = self.cp_group.size(), self.cp_group.rank(), query.shape[0]
        if size > 1:
            key, value = _GatherSequence.apply(key, self.cp_group), _GatherSequence.apply(value, self.cp_group)
        here = zigzag_positions(rank, size, length)
        there = torch.cat([zigzag_positions(r, size, length) for r in range(size)])
        context = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=here[:, None] >= there[None, :],
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return context.permute(2, 0, 1, 3).reshape(length, query.shape[1], -1)


def zigzag_positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Global positions of a context-parallel rank's tokens: chunks ``rank`` and ``2 * size - 1 - rank``.

    Args:
        rank: Rank in the context-parallel group.
        size: Ranks of the group; the sequence has twice as many chunks.
        length: Tokens per rank.

    Returns:
        int64 ``[length]``.
    """
    if size == 1:
        return torch.arange(length)
    half = length // 2
    return torch.cat([torch.arange(half) + c * half for c in (rank, 2 * size - 1 - rank)])


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; backward sums the gradients of all ranks and keeps the own part.

    Own, since torch's differentiable all_gather fails in backward for a gloo sub-group.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
