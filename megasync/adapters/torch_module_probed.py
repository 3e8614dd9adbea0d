"""A torch module as an engine whose layouts a probe found: what an engine's own loader does, instead of rules for it.

Before it: `layout.probe` on a throw-away copy, with the engine's loader. After it: the applier, which proves the plan by
content before its first write. Must not import an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.errors import PlanError
from megasync.layout.live import Specs, describe
from megasync.layout.modes import Layout
from megasync.layout.plan import ProbedPlan
from megasync.receiver.engine import TORCH_DTYPES, Derivation
from megasync.schema import Schema

_SHOWN = 50


def probe_specs(schema: Schema) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `layout.probe` wants to know of the tensors of a run.

    Args:
        schema: The run's schema.

    Returns:
        Canonical name to extents and torch dtype.
    """
    return {t.name: (t.shape, TORCH_DTYPES[t.dtype]) for t in schema.tensors}


class ProbedEngine(TorchModuleEngine):
    """A module whose weights are live, with a probed plan for where they lie.

    Args:
        module: With loaded weights, on CPU or CUDA.
        plan: Of a loader whose live tensors are the parameters and buffers of such a module under their names.
        derivations: For live tensors that the plan says are computed (``plan.sources`` names what from): a canonical
            tensor that masks alone cannot update is taken where each live tensor computed from it is an output of a
            derivation that reads it. Where the loader also moves it somewhere the derivation reads it from there; else
            the receiver keeps a shadow, seeded by ``recover`` or ``seed``. A subclass may override `derivations`.
        **more: Arguments of `TorchModuleEngine`.
    """

    name = "probed module"

    def __init__(
        self, module: torch.nn.Module, plan: ProbedPlan, *, derivations: Sequence[Derivation] = (), **more: Any
    ) -> None:
        super().__init__(module, **more)
        self.plan = plan
        self._derivations = tuple(derivations)

    def derivations(self, schema: Schema) -> Sequence[Derivation]:
        """See ``Engine.derivations``: those given."""
        return self._derivations

    def _make_plan(self, schema: Schema) -> tuple[dict[str, Layout], tuple[Derivation, ...]]:
        """The plan's layouts of the run's tensors, and the derivations.

        Raises:
            PlanError: Tensors that the plan does not know, knows otherwise, or could not map and no derivation reads;
                live tensors that are not those of the plan; live weights that nothing reaches.
        """
        groups = tuple(self.derivations(schema))
        excluded = self.excluded(schema)
        empty = {t.name for t in schema.tensors if not t.num_words}
        wanted: Specs = {n: s for n, s in probe_specs(schema).items() if n not in excluded and n not in empty}
        elsewhere = self.plan.absent if self.num_ranks > 1 else ()
        names = [n for n in wanted if n not in elsewhere]
        odd = [n for n in names if not self._knows(n, *wanted[n])]
        stale = {n: self._stale(n, groups) for n in names if n in self.plan.unmapped}
        refused = [f"{n} ({self.plan.unmapped[n]}{why})" for n, why in stale.items() if why is not None]
        layouts = {n: self.plan.layouts[n] for n in names if n in self.plan.layouts and stale.get(n) is None}
        faults = [
            f"{what}: {', '.join(found[:_SHOWN])}"
            for what, found in (
                ("tensors that the plan does not know, or knows with another shape or dtype", odd),
                ("tensors that no mask can update", refused),
                ("live tensors that are not those of the plan", self._changed(layouts)),
                ("live weights that no tensor of the run reaches", self._missed(layouts, groups)),
            )
            if found
        ]
        if faults:
            raise PlanError(
                f"{self.name} does not fit run {schema.run!r}: {'. '.join(faults)}. Nothing was touched; probe this "
                "engine's loader with the run's tensors, and give derivations of what is computed"
            )
        return layouts, groups

    def _stale(self, name: str, groups: Sequence[Derivation]) -> str | None:
        """None where derivations follow everything that is computed from a tensor; else what they leave out, for the
        message.
        """
        mine = [d for d in groups if name in d.inputs]
        followed = {n for d in mine for n in d.outputs}
        computed = [live for live, sources in self.plan.sources.items() if name in sources]
        lost = [n for n in computed if n not in followed]
        if mine and not lost:
            return None
        return f"; derivations that read it leave out {lost}" if mine else ""

    def _knows(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        spec = self.plan.specs.get(name)
        return spec is not None and spec[0] == shape and spec[1].itemsize == dtype.itemsize

    def _changed(self, layouts: dict[str, Layout]) -> list[str]:
        """Live tensors of the plan's storages that are other ones here."""
        needed = {r.storage for layout in layouts.values() for r in layout.records}
        planned = [r for r in self.plan.live if r.storage in needed]
        tensors = self.tensors()
        now = {r.name: r for r in describe({r.name: tensors[r.name] for r in planned if r.name in tensors})}
        return [r.name for r in planned if now.get(r.name) != r]

    def _missed(self, layouts: dict[str, Layout], groups: Sequence[Derivation]) -> list[str]:
        """Weights whose storage no layout writes to, and that no derivation gives."""
        needed = {r.storage for layout in layouts.values() for r in layout.records}
        reached = {r.name for r in self.plan.live if r.storage in needed} | {n for d in groups for n in d.outputs}
        return self._unreached(self.tensors(), reached & self.tensors().keys())
