"""The rank side of the exporter tests: train a layout, export it, and dump raw parameters for the independent oracle."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from megasync.types import Box, TensorSpec
from tests.distributed.harness import preload

PRELOADS = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)
TOKENS = (torch.arange(32).view(2, 16) * 7) % 90


def preload_megatron() -> None:
    """Import Megatron in the warm process, once for all ranks of all tests."""
    preload(*PRELOADS)


@dataclass(frozen=True)
class Case:
    """A layout to train and export. Sizes are keywords of TinyModel, Layout and Training.

    ``tables`` are exported with one after the other; ``hf`` names the Hugging Face model that must agree, "" for none.
    """

    table: str
    model: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    hf: str = ""
    num_steps: int = 2
    metadata: dict[str, Any] | None = None
    swaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A piece, with its bytes copied out."""

    name: str
    box: Box
    data: torch.Tensor
    volatile: bool
    chunk: int


@dataclass(frozen=True)
class Raw:
    """A parameter or buffer under a name that is unique in the whole model, and how it is cut, if it is."""

    name: str
    data: torch.Tensor
    rank: int
    dim: int


@dataclass(frozen=True)
class Report:
    """What one rank has to tell about one case."""

    specs: list[TensorSpec]
    parts: list[Part]
    raws: list[Raw]
    logits: torch.Tensor | None
    swapped: dict[str, list[Part]]
    settle_s: float


def quiet_megatron() -> None:
    """Install the CPU shim and silence what Megatron says about missing CUDA extensions."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from launch import cpu_shim

    cpu_shim.install()


def run_cases(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Report]:
    """Train and export each case in one process group."""
    quiet_megatron()
    return {name: run_case(case) for name, case in cases.items()}


def run_case(case: Case) -> Report:
    """Train and export one case."""
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training
    from megasync.adapters.megatron import KEYS_METADATA, MegatronExporter
    from megasync.adapters.names_hf import table

    model = TinyModel(**case.model)
    run = build(model, Layout(**case.layout), Training(**case.training))
    for _ in range(case.num_steps):
        run.train_step()
    metadata = KEYS_METADATA if case.metadata is None else case.metadata
    names = table(case.table)
    exporter = MegatronExporter(run.chunks, names, vocab_size=model.vocab_size, metadata=metadata)
    settle_s = exporter.settle()
    report = Report(
        specs=exporter.specs(),
        parts=copy_parts(exporter),
        raws=[r for chunk in run.chunks for r in raw_tensors(chunk)],
        logits=run.logits(TOKENS) if case.hf else None,
        swapped={
            s: copy_parts(MegatronExporter(run.chunks, swapped_table(names, s), vocab_size=model.vocab_size))
            for s in case.swaps
        },
        settle_s=settle_s,
    )
    exporter.check_alive()
    run.destroy()
    return report


def copy_parts(exporter: Any) -> list[Part]:
    """The pieces of an exporter with their present bytes."""
    return [Part(p.name, p.box, p.data.clone(), p.volatile, p.chunk) for p in exporter.pieces()]


def swapped_table(names: Any, swap: str) -> Any:
    """A table with two of its tensors swapped: a mistake that only values can show."""
    rules = []
    for rule in names.rules:
        if swap == "gate-up" and rule.rows == "gated":
            rules.append(type(rule)(rule.key, rule.names[::-1], rule.rows, rule.cut))
        if swap == "q-k" and rule.rows == "qkv":
            q, k, v = rule.names
            rules.append(type(rule)(rule.key, (k, q, v), rule.rows, rule.cut))
    return names.extended(*rules)


def raw_tensors(chunk: Any) -> list[Raw]:
    """Parameters and buffers of a chunk by global name, from module numbers and Megatron's parameter attributes.

    Uses neither ``sharded_state_dict`` nor anything of megasync.
    """
    from megatron.core import parallel_state as ps

    while hasattr(chunk, "module"):
        chunk = chunk.module
    renames: dict[str, str] = {}
    for path, module in chunk.named_modules():
        if hasattr(module, "layer_number") and path.startswith("decoder.layers.") and path.count(".") == 2:
            renames[path + "."] = f"decoder.layers.{module.layer_number - 1}."
    raws: list[Raw] = []
    for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
        full = name
        for old, new in renames.items():
            if full.startswith(old):
                full = new + full[len(old) :]
                break
        rank, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
        if ".local_experts." in full:
            head, _, tail = full.partition(".local_experts.")
            index, _, rest = tail.partition(".")
            num_local = chunk.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
            number = int(index) + num_local * ps.get_expert_model_parallel_rank()
            full = f"{head}.local_experts.{number}.{rest}"
            rank, size = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
        cut = size > 1 and getattr(tensor, "tensor_model_parallel", False)
        raws.append(Raw(full, tensor.detach().clone(), rank, tensor.partition_dim if cut else -1))
    return raws
