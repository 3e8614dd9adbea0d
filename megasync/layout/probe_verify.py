"""Compares a plan with what another loader does.

Before it comes a plan; after it ``ProbedPlan.verify_on``. This module must import nothing of megasync but ``errors``
and ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megasync.errors import PlanError
from megasync.layout.live import LiveTensor, LoadFn
from megasync.layout.modes import Layout
from megasync.layout.probe_draws import Draws
from megasync.layout.probe_loads import Loads, covered_bytes, mismatched
from megasync.layout.probe_sources import Noise


def disagreement(
    load_fn: LoadFn,
    draws: Draws,
    num_draws: int,
    layouts: Mapping[str, Layout],
    live: tuple[LiveTensor, ...],
    noisy: frozenset[str],
    still: Mapping[str, torch.Tensor] | None = None,
) -> tuple[set[str], set[str]]:
    """What a loader does otherwise than layouts say.

    Args:
        load_fn: The loader.
        draws: Draws of its canonical tensors.
        num_draws: Draws of random bytes, of each kind.
        layouts: Canonical name to layout.
        live: What the live tensors must be.
        noisy: Live tensors that are known to differ between equal loads.
        still: Canonical tensors that stay the same in all loads.

    Returns:
        Canonical names that are not where the layouts say; live names that change elsewhere, and not by themselves.

    Raises:
        PlanError: The live tensors are others, or the loader failed.
    """
    loads = Loads(load_fn)
    wrong: set[str] = set()
    first: dict[str, torch.Tensor] = {}
    for draw in draws.verification(num_draws):
        canonical = {**draw.tensors, **(still or {})}
        first = first or canonical
        storages = loads.run(canonical, draw.kind)
        if loads.described != live:
            raise PlanError(
                "the live tensors are not those of the plan: other names, shapes or strides; probe this layer"
            )
        wrong |= set(mismatched({n: x for n, x in layouts.items() if n in draw.fresh}, storages, canonical))
    places = loads.changed_live(covered_bytes(layouts, loads.nbytes))
    places = {name: place for name, place in places.items() if name not in noisy}
    if not places:
        return wrong, set()
    noise = Noise(loads, places)
    noise.learn(first)
    return wrong, set(noise.left())
