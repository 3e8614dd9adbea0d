"""The demo's proof: a plain full gather of the trainer's weights, and the SHA-256 that both sides compare.

This is the slow way that megasync replaces, written without anything of it: every rank sends all its parameters, rank 0
joins the shards along the dimension that Megatron marked, takes fused tensors apart and rounds to BF16. Supports dense
and mixture-of-experts GPT models in tensor, pipeline, context, data and expert parallel layouts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class _Shard:
    """A local parameter under its global name: which part it is, of how many, along which dimension (-1: whole)."""

    name: str
    shape: tuple[int, ...]
    dim: int
    part: int


class FullGather:
    """Gathers full checkpoints of a model to rank 0. *Collective*: every rank makes it and calls it.

    Args:
        chunks: Model chunks of this rank.
        num_groups: Key and value heads.
        head_dim: Size of a head.
        vocab_size: Vocabulary without padding.
        tied: Whether the output layer is the embedding.
    """

    def __init__(
        self, chunks: Sequence[Any], *, num_groups: int, head_dim: int, vocab_size: int, tied: bool = False
    ) -> None:
        self._num_groups, self._head_dim, self._vocab_size, self._tied = num_groups, head_dim, vocab_size, tied
        self._local = [entry for chunk in chunks for entry in _shards_of(chunk)]
        told: list[list[_Shard]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, [shard for shard, _ in self._local])
        self._by_rank = told
        self._room = max(sum(torch.Size(s.shape).numel() for s in shards) for shards in told)
        self._nbytes = 0

    def __call__(self) -> dict[str, torch.Tensor] | None:
        """The weights as they are now.

        Returns:
            BF16 tensors by Hugging Face name on rank 0, None elsewhere.
        """
        mine = torch.zeros(self._room, dtype=torch.bfloat16)
        flat = torch.cat([tensor.detach().flatten() for _, tensor in self._local])
        mine[: flat.numel()] = flat
        first = dist.get_rank() == 0
        parts = [torch.empty_like(mine) for _ in self._by_rank] if first else None
        # As bytes: not every gloo knows BF16.
        dist.gather(mine.view(torch.uint8), [p.view(torch.uint8) for p in parts] if parts else None, dst=0)
        if parts is None:
            return None
        whole: dict[str, torch.Tensor] = {}
        for name, copies in self._sorted(parts).items():
            whole |= self._converted(name, _joined(name, copies))
        if self._tied and (copy := whole.pop("lm_head.weight", None)) is not None:
            # With pipeline stages the last one has its own copy of the embedding.
            _require_equal("output_layer.weight", copy, whole["model.embed_tokens.weight"])
        return whole

    def _sorted(self, parts: list[torch.Tensor]) -> dict[str, list[tuple[_Shard, torch.Tensor]]]:
        found: dict[str, list[tuple[_Shard, torch.Tensor]]] = {}
        for flat, shards in zip(parts, self._by_rank, strict=True):
            sizes = [torch.Size(s.shape).numel() for s in shards]
            for shard, data in zip(shards, flat[: sum(sizes)].split(sizes), strict=True):
                found.setdefault(shard.name, []).append((shard, data.view(shard.shape)))
        return found

    def _converted(self, name: str, t: torch.Tensor) -> dict[str, torch.Tensor]:
        """A global Megatron tensor as Hugging Face tensors."""
        if name in _OUTER:
            return {_OUTER[name]: t[: self._vocab_size] if name != "decoder.final_layernorm.weight" else t}
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        assert found is not None, name
        at, rest = f"model.layers.{found[1]}", found[2]
        if rest in _INNER:
            return {f"{at}.{_INNER[rest]}": t}
        if rest == "self_attention.linear_qkv.weight":
            # One block a group: its query heads, then a key head, then a value head.
            blocks = t.view(self._num_groups, -1, self._head_dim, t.shape[1])
            q, k, v = blocks[:, :-2], blocks[:, -2], blocks[:, -1]
            named = zip("qkv", (q, k, v), strict=True)
            return {f"{at}.self_attn.{n}_proj.weight": x.reshape(-1, t.shape[1]) for n, x in named}
        expert = re.match(r"mlp\.experts\.local_experts\.(\d+)\.", rest)
        mlp = f"{at}.mlp.experts.{expert[1]}" if expert else f"{at}.mlp"
        if rest.endswith("linear_fc2.weight"):
            return {f"{mlp}.down_proj.weight": t}
        assert rest.endswith("linear_fc1.weight"), name
        gate, up = t.chunk(2)
        return {f"{mlp}.gate_proj.weight": gate, f"{mlp}.up_proj.weight": up}


class DeviceGather(FullGather):
    """The same where the weights are on GPUs: every rank gathers over NCCL and keeps the result on its GPU.

    Args are those of ``FullGather``.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model, without what ranks hold twice and without padding; after the first call."""
        return self._nbytes

    def __call__(self) -> dict[str, torch.Tensor]:
        """The weights as they are now, on every rank."""
        device = self._local[0][1].device
        mine = torch.zeros(self._room, dtype=torch.bfloat16, device=device)
        flat = torch.cat([tensor.detach().flatten() for _, tensor in self._local])
        mine[: flat.numel()] = flat
        parts = [torch.empty_like(mine) for _ in self._by_rank]
        dist.all_gather([p.view(torch.uint8) for p in parts], mine.view(torch.uint8))
        whole: dict[str, torch.Tensor] = {}
        for name, copies in self._sorted(parts).items():
            whole |= self._converted(name, _joined(name, copies))
        self._nbytes = sum(t.nbytes for t in whole.values())
        return whole


_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_INNER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def sha256_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in name order.

    Args:
        tensors: CPU tensors by name.

    Returns:
        Hexadecimal digits.
    """
    sha = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach()
        sha.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        sha.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _shards_of(chunk: Any) -> list[tuple[_Shard, torch.Tensor]]:
    """The parameters of a chunk under names that are unique in the whole model."""
    from megatron.core import parallel_state as ps

    while hasattr(chunk, "module"):
        chunk = chunk.module
    global_layers = {
        f"{path}.": f"decoder.layers.{module.layer_number - 1}."
        for path, module in chunk.named_modules()
        if re.fullmatch(r"decoder\.layers\.\d+", path)
    }
    found: list[tuple[_Shard, torch.Tensor]] = []
    for path, tensor in chunk.named_parameters():
        local = next((p for p in global_layers if path.startswith(p)), "")
        name = global_layers.get(local, "") + path[len(local) :]
        part, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
        if (expert := re.search(r"(?<=local_experts\.)\d+", name)) is not None:
            num_local = chunk.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
            number = int(expert[0]) + num_local * ps.get_expert_model_parallel_rank()
            name = name[: expert.start()] + str(number) + name[expert.end() :]
            part, size = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
        cut = size > 1 and getattr(tensor, "tensor_model_parallel", False)
        found.append((_Shard(name, tuple(tensor.shape), tensor.partition_dim if cut else -1, part), tensor))
    return found


def _joined(name: str, copies: list[tuple[_Shard, torch.Tensor]]) -> torch.Tensor:
    """One tensor from the shards of all ranks; replicas must be equal."""
    dim = copies[0][0].dim
    by_part: dict[int, torch.Tensor] = {}
    for shard, data in copies:
        first = by_part.setdefault(shard.part if dim >= 0 else 0, data)
        _require_equal(name, first, data)
    parts = [by_part[i] for i in sorted(by_part)]
    if dim >= 0 and "linear_fc1" in name:
        # Each shard is its part of the gate, then its part of the up projection.
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[i] for i in range(2) for h in halves])
    return torch.cat(parts, dim=dim) if dim >= 0 else parts[0]


def _require_equal(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if not torch.equal(one, other):
        raise RuntimeError(f"{name}: ranks that should hold the same weights differ")
