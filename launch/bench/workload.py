"""The model-like list that the benchmarks run on: a mixture of experts in packed 4-bit, at any scale.

GLM-5-like shapes: 78 layers, the first three dense, 256 routed experts of hidden 6144 and inner 2048 in packed 4-bit
with one scale byte for 16 elements, multi-head latent attention, shared experts, embeddings and head in BF16: 445 GB.
One tensor-parallel rank of an engine holds it in stacks: gate and up interleaved by 64 rows, block scales interleaved
and then in the 128x4 swizzle. One trainer rank of 64 owns a 64th of the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megasync.layout.modes import Digit, Remap
from megasync.tiles import tile_grid
from megasync.types import CutAxis, TensorSpec

Storages = dict[str, int]
"""Bytes of each live storage by name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; the defaults are the full one.

    Attributes:
        num_layers: Layers.
        num_dense: Leading layers with a dense MLP.
        num_experts: Routed experts of the others.
        hidden: Hidden size.
        inner: Inner size of an expert.
        dense_inner: Inner size of the dense MLP.
        heads: Attention heads.
        q_rank: Rank of the query compression.
        kv_rank: Rank of the key-value compression, without the 64 rotary columns.
        vocabulary: Rows of embedding and head.
    """

    num_layers: int = 78
    num_dense: int = 3
    num_experts: int = 256
    hidden: int = 6144
    inner: int = 2048
    dense_inner: int = 12288
    heads: int = 64
    q_rank: int = 2048
    kv_rank: int = 512
    vocabulary: int = 154_880

    def scaled(self, ratio: float) -> Shape:
        """About ``ratio`` of the bytes: fewer layers, then fewer experts; shapes of tensors stay."""
        layers = max(self.num_dense + 1, round(self.num_layers * ratio))
        left = ratio * self.num_layers / layers
        experts = max(8, round(self.num_experts * min(1.0, left)) // 8 * 8)
        return replace(self, num_layers=layers, num_experts=experts, vocabulary=max(1024, int(self.vocabulary * left)))


@dataclass(frozen=True, slots=True)
class Placed:
    """One canonical tensor on one engine rank.

    Attributes:
        spec: The tensor.
        start: Start of the rank's slice, in words.
        stop: End of the slice.
        record: Where the slice lies.
    """

    spec: TensorSpec
    start: tuple[int, ...]
    stop: tuple[int, ...]
    record: Remap


def model_specs(shape: Shape) -> list[TensorSpec]:
    """Every tensor of the model in checkpoint order."""
    return [spec for spec, _, _ in _tensors(shape)]


def _tensors(m: Shape) -> Iterator[tuple[TensorSpec, str, int]]:
    """Each tensor with what it is and its expert (0 where none)."""

    def make(name: str, dtype: str, rows: int, cols: int, layer: int, cut: CutAxis = "row") -> TensorSpec:
        return TensorSpec(name, dtype, (rows, cols) if cols else (rows,), layer, cut)

    yield make("model.embed_tokens.weight", "BF16", m.vocabulary, m.hidden, -1), "rows", 0
    for layer in range(m.num_layers):
        at = f"model.layers.{layer}."
        yield make(at + "input_layernorm.weight", "BF16", m.hidden, 0, layer), "whole", 0
        attn = at + "self_attn."
        yield make(attn + "q_a_proj.weight", "BF16", m.q_rank, m.hidden, layer), "rows", 0
        yield make(attn + "q_b_proj.weight", "BF16", m.heads * 256, m.q_rank, layer), "rows", 0
        yield make(attn + "kv_a_proj_with_mqa.weight", "BF16", m.kv_rank + 64, m.hidden, layer), "rows", 0
        yield make(attn + "kv_b_proj.weight", "BF16", m.heads * 448, m.kv_rank, layer), "rows", 0
        yield make(attn + "o_proj.weight", "BF16", m.hidden, m.heads * 256, layer, "last"), "columns", 0
        yield make(at + "post_attention_layernorm.weight", "BF16", m.hidden, 0, layer), "whole", 0
        dense = layer < m.num_dense
        mlp, inner = (at + "mlp.", m.dense_inner) if dense else (at + "mlp.shared_experts.", m.inner)
        yield make(mlp + "gate_proj.weight", "BF16", inner, m.hidden, layer), "rows", 0
        yield make(mlp + "up_proj.weight", "BF16", inner, m.hidden, layer), "rows", 0
        yield make(mlp + "down_proj.weight", "BF16", m.hidden, inner, layer, "last"), "columns", 0
        if dense:
            continue
        yield make(at + "mlp.gate.weight", "BF16", m.num_experts, m.hidden, layer), "whole", 0
        for e in range(m.num_experts):
            ex = f"{at}mlp.experts.{e}."
            for half in ("gate", "up"):
                yield make(f"{ex}{half}_proj.weight", "U8", m.inner, m.hidden // 2, layer), half, e
                yield (
                    make(f"{ex}{half}_proj.weight_scale", "F8_E4M3", m.inner, m.hidden // 16, layer),
                    half + "_scale",
                    e,
                )
            yield make(f"{ex}down_proj.weight", "U8", m.hidden, m.inner // 2, layer, "last"), "down", e
            yield (
                make(f"{ex}down_proj.weight_scale", "F8_E4M3", m.hidden, m.inner // 16, layer, "last"),
                "down_scale",
                e,
            )
    yield make("model.norm.weight", "BF16", m.hidden, 0, -1), "whole", 0
    yield make("lm_head.weight", "BF16", m.vocabulary, m.hidden, -1), "rows", 0


def engine_rank(m: Shape, tp: int, rank: int) -> tuple[list[Placed], Storages]:
    """The model on one tensor-parallel rank of an engine.

    Args:
        m: Sizes.
        tp: Tensor-parallel size; divides heads, inner sizes and vocabulary.
        rank: The rank.

    Returns:
        Every tensor with its place, and the bytes of each storage.
    """
    storages: Storages = {}
    placed = []
    inner = m.inner // tp
    for spec, kind, expert in _tensors(m):
        full = spec.shape
        axis = 1 if kind in ("columns", "down", "down_scale") else 0
        start, stop = [0] * len(full), list(full)
        if kind != "whole":
            size = full[axis] // tp
            start[axis], stop[axis] = rank * size, (rank + 1) * size
        local = tuple(b - a for a, b in zip(start, stop, strict=True))
        stack = f"layers.{spec.layer}."
        cols = local[-1]
        digits: list[tuple[int, int, int, int]]
        if kind in ("gate", "up"):  # up first, in groups of 64 rows
            storage, one = stack + "w13", 2 * inner * cols
            base = expert * one + (64 * cols if kind == "gate" else 0)
            digits = [(0, 64, 1, cols), (0, 0, 64, 128 * cols), (1, 0, 1, 1)]
        elif kind in ("gate_scale", "up_scale"):  # the same, and then 128x4
            storage, one = stack + "w13_scale", 2 * inner * cols
            base = expert * one + (8 if kind == "gate_scale" else 0)
            digits = [(0, 32, 1, 16), (0, 2, 32, 4), (0, 0, 64, 128 * cols), (1, 4, 1, 1), (1, 0, 4, 512)]
        elif kind == "down":
            storage, one = stack + "w2", full[0] * cols
            base, digits = expert * one, [(0, 0, 1, cols), (1, 0, 1, 1)]
        elif kind == "down_scale":
            storage, one = stack + "w2_scale", full[0] * cols
            base = expert * one
            digits = [(0, 32, 1, 16), (0, 4, 32, 4), (0, 0, 128, 128 * cols), (1, 4, 1, 1), (1, 0, 4, 512)]
        else:
            storage, base = spec.name, 0
            digits = [(i, 0, 1, int(np.prod(local[i + 1 :]))) for i in range(len(full))]
            one = int(np.prod(local))
        if m.num_experts and kind in ("gate", "up", "gate_scale", "up_scale", "down", "down_scale"):
            storages[storage] = m.num_experts * one
        else:
            storages[storage] = one * spec.word_nbytes
        record = Remap(
            full,
            tuple(start),
            tuple(stop),
            tuple(start),
            local,
            tuple((i,) for i in range(len(full))),
            tuple(Digit(*d) for d in digits),
            base,
            "word",
            spec.word_nbytes,
            storage,
            True,
        )
        placed.append(Placed(spec, tuple(start), tuple(stop), record))
    return placed, storages


def slice_tiles(placed: list[Placed]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tiles that a rank's slices meet: index of the tensor, starts and extents, all int64 (two axes)."""
    cache: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    tensors, starts, extents = [], [], []
    for i, p in enumerate(placed):
        key = (p.spec.shape, p.spec.word_nbytes, p.spec.cut, p.start, p.stop)
        if key not in cache:
            grid = tile_grid(p.spec)
            first, size = grid.boxes(np.arange(grid.num_tiles))
            meets = ((first < np.array(p.stop)) & (first + size > np.array(p.start))).all(axis=1)
            first, size = first[meets], size[meets]
            pad = 2 - first.shape[1]
            cache[key] = (np.pad(first, ((0, 0), (pad, 0))), np.pad(size, ((0, 0), (pad, 0)), constant_values=1))
        first, size = cache[key]
        tensors.append(np.full(len(first), i, dtype=np.int64))
        starts.append(first)
        extents.append(size)
    return np.concatenate(tensors), np.concatenate(starts), np.concatenate(extents)


def owner_share(m: Shape, num_owners: int, owner: int) -> list[tuple[TensorSpec, np.ndarray]]:
    """What one of ``num_owners`` trainer ranks owns: experts by number, the tiles of other tensors in turn.

    Returns:
        Tensors with the numbers of the tiles owned.
    """
    out = []
    turn = 0
    for spec, kind, expert in _tensors(m):
        num = tile_grid(spec).num_tiles
        if kind in ("rows", "columns", "whole"):
            tiles = np.arange(num)[(np.arange(num) + turn) % num_owners == owner]
            turn += num
        else:
            tiles = np.arange(num) if expert % num_owners == owner else np.zeros(0, dtype=np.int64)
        if len(tiles):
            out.append((spec, tiles))
    return out
