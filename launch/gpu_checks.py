"""Refuses settings of launch/gpu_megatron.py that cannot work, before Megatron is imported: all faults, each with what to do.

Called by every rank, between Hydra and the process group. Imports nothing of Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.bench.places import emptied_fault, trace_fault
from megasync.config import GatherKind

if TYPE_CHECKING:
    from launch.gpu_megatron import GpuMegatron

LEAST_BLOCKS = 4
"""Of timed blocks, where there are any: the first of either kind is not counted."""


def faults_of(config: GpuMegatron, world_size: int, local_rank: int, num_devices: int) -> list[str]:
    """What cannot work.

    Args:
        config: Settings, each within its own bounds.
        world_size: Ranks that were started.
        local_rank: Number of this one on its host.
        num_devices: CUDA devices of this host; 0 for the CPU shim.
    """
    c, tp = config, config.tp
    faults: list[str] = []
    if world_size % tp:
        faults.append(
            f"tp={tp} does not divide the {world_size} rank(s) that were started: start a multiple of it, torchrun "
            f"--nproc-per-node {tp * max(1, world_size // tp)} -m launch.gpu_megatron tp={tp}, or give another tp"
        )
    for name, size in (("num_heads", c.num_heads), ("ffn_hidden_size", c.ffn_hidden_size)):
        if size % tp:
            faults.append(f"{name}={size} is not a multiple of tp={tp}: change one of them")
    if c.num_groups % tp and tp % c.num_groups:  # fewer groups than ranks are held by several of them
        faults.append(f"num_groups={c.num_groups} is neither a multiple of tp={tp} nor divides it: change one of them")
    if c.num_heads % c.num_groups:
        faults.append(f"num_heads={c.num_heads} is not a multiple of num_groups={c.num_groups}: change one of them")
    if c.head_dim % 2:
        faults.append(f"head_dim={c.head_dim}: rotary positions turn pairs, so it must be even")
    if 0 < c.blocks < LEAST_BLOCKS:
        faults.append(
            f"blocks={c.blocks}: the first block that publishes and the first that does not are left out of the medians, so "
            f"give at least {LEAST_BLOCKS}, or 0 to time nothing"
        )
    if num_devices and local_rank >= num_devices:
        faults.append(f"rank {local_rank} of this host has no GPU, there are {num_devices}: start one rank a GPU")
    if not num_devices:
        if c.gather is GatherKind.NCCL:
            faults.append("gather=nccl needs CUDA devices, and torch finds none: take gather=gloo or gather=direct")
        if c.trace:
            faults.append(f"trace={c.trace}: a trace is of what runs on a GPU, and torch finds none: leave trace out")
    elif c.trace and (fault := trace_fault("trace=", c.trace)):
        faults.append(fault)
    if fault := emptied_fault("folder=", c.folder, "follower.json"):
        faults.append(fault)
    return faults
