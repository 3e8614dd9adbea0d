"""One rank's share of the model-like list in host memory, on both ends, for benchmarks on one core.

The trainer owns 32 of 256 experts of every layer and an eighth of the attention; the engine holds the same tensors in its
own layout (stacks, interleaved gate and up, swizzled scales), as ``workload`` lays them out. Before it: workload. After
it: bench_cpu. Must not import a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from launch.bench.workload import Shape, engine_rank, model_specs
from megasync.layout.modes import Layout, Remap
from megasync.receiver.engine import TORCH_DTYPES, Engine, Tensors
from megasync.schema import Schema
from megasync.types import WORD_DTYPES, TensorSpec

LAYER = Shape(num_layers=1, num_dense=0, num_experts=32, heads=8, vocabulary=1024)
"""A layer's share of one of eight ranks that split a layer."""

_ROWS_NBYTES = 1 << 20


def share(nbytes: int) -> Shape:
    """As many layers as come nearest to ``nbytes``; fewer experts where that is less than a layer."""
    one = sum(t.nbytes for t in model_specs(LAYER) if t.layer == 0)
    if nbytes >= one:
        return replace(LAYER, num_layers=round(nbytes / one))
    return replace(LAYER, num_experts=max(1, int(LAYER.num_experts * nbytes / one)))


def nbytes_of(shape: Shape) -> int:
    """Bytes of a list of weights."""
    return sum(t.nbytes for t in model_specs(shape))


def is_weight(spec: TensorSpec) -> bool:
    """Whether the article's generator touches a tensor: weights, but neither block scales nor the router."""
    return spec.name.endswith(".weight") and not spec.name.endswith(".mlp.gate.weight")


def random_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A tensor of random bytes that depend on its name and the seed alone."""
    data = np.frombuffer(np.random.default_rng([seed, *spec.name.encode()]).bytes(spec.nbytes), np.uint8).copy()
    return torch.from_numpy(data).view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def live_words(tensor: torch.Tensor) -> np.ndarray:
    """Words of a contiguous CPU tensor, flat, writable."""
    return tensor.view(torch.uint8).numpy().reshape(-1).view(WORD_DTYPES[tensor.element_size()])


class HostEngine(Engine):
    """An engine that holds the share in host memory, in its own layout.

    Args:
        shape: From ``share``.
    """

    name = "bench"

    def __init__(self, shape: Shape) -> None:
        placed, storages = engine_rank(shape, 1, 0)
        self._layouts = {
            p.spec.name: Layout(p.spec.shape, p.spec.word_nbytes, p.start, p.stop, (p.record,)) for p in placed
        }
        # numpy asks for huge pages, torch does not: with small ones every few words cost a walk of the page table.
        self._live = {name: torch.from_numpy(np.zeros(nbytes, np.uint8)) for name, nbytes in storages.items()}

    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        """See ``Engine.layouts``."""
        return self._layouts

    def tensors(self) -> Tensors:
        """See ``Engine.tensors``."""
        return self._live

    def load(self, name: str, words: np.ndarray) -> None:
        """Load the whole of one canonical tensor, as a cold start would.

        Args:
            name: Canonical name.
            words: ``<u{w}``, canonical shape.
        """
        (record,) = self._layouts[name].records
        live = self._live[record.storage].numpy().view(words.dtype)
        rows = max(1, _ROWS_NBYTES // words[:1].nbytes)
        for at in range(0, len(words), rows):
            _put(record, live, words[at : at + rows], at)


def _put(record: Remap, live: np.ndarray, words: np.ndarray, first_row: int) -> None:
    index = np.indices(words.shape).reshape(words.ndim, -1)
    index[0] += first_row
    live[record.local_offsets(list(index))] = words.reshape(-1)
