"""Discovers layouts by probing: feeds an engine's own loader with coded tensors and reads where the codes land.

No rule about the engine is used. The plan that comes out is verified on random bytes, names every canonical tensor
that is not merely moved, and every live tensor that is computed. Probe one layer at a time: a word costs some 20 bytes
of host memory while its codes are read. Before it comes an adapter with a load function on a throw-away copy; after it
`ProbedPlan`. This module must import nothing of megasync but ``errors`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megasync.errors import PlanError
from megasync.layout.live import LoadFn, Specs
from megasync.layout.modes import Layout, Unit
from megasync.layout.plan import ProbedPlan
from megasync.layout.probe_codes import Reader, Round, nibble_round, word_round
from megasync.layout.probe_fit import NoFitError, fit
from megasync.layout.probe_loads import Loads, mismatched, sources_of
from megasync.layout.probe_merge import layout_of
from megasync.layout.probe_patterns import PACKED, dtype_name, ramp_tensors, random_tensor
from megasync.layout.prove import validate, validate_all


def probe(load_fn: LoadFn, specs: Specs, *, num_draws: int = 2, any_bytes: bool = True, seed: int = 0) -> ProbedPlan:
    """Finds where a loader puts canonical tensors.

    Args:
        load_fn: Takes canonical tensors (name to CPU tensor, contiguous, new at every call), loads them as the engine
            does, post-processing included, and returns the live tensors by name: any dtype, device and strides, the
            same ones or new ones at every call. Called some fifteen times.
        specs: Canonical name to extents and torch dtype of every tensor that ``load_fn`` takes.
        num_draws: Draws of random bytes, of each kind, that the plan is verified on.
        any_bytes: Verify on NaN and infinity patterns too. Switch off only for a loader that cannot take them; the plan
            is then exact for finite values.
        seed: Seed of the random bytes.

    Returns:
        The plan; look at ``unmapped`` before use.

    Raises:
        ValueError: A dtype cannot be probed.
        PlanError: The loader failed, or returned other tensors from one call to the next.
    """
    for _, dtype in specs.values():
        dtype_name(dtype)
    rng = np.random.default_rng(seed)
    loads = Loads(load_fn)
    layouts, reasons = _discover(loads, specs, word_round(specs), specs)
    packed = {n: s for n, s in specs.items() if n not in layouts and dtype_name(s[1]) in PACKED}
    if packed:
        fixed = {n: random_tensor(*s, rng, finite=True) for n, s in specs.items()}
        more, why = _discover(loads, packed, nibble_round(packed), specs, fixed)
        layouts |= more
        reasons |= {n: w for n, w in why.items() if w or n not in reasons}
    layouts = {n: layouts[n] for n in specs if n in layouts}
    validate_all(layouts, loads.nbytes)
    draws = [(ramp_tensors(specs, falling=f, per_tensor=t), True) for f in (False, True) for t in (False, True)]
    for finite in [True] * num_draws + [False] * (num_draws if any_bytes else 0):
        draws.append(({n: random_tensor(*s, rng, finite=finite) for n, s in specs.items()}, finite))
    for canonical, finite in draws:
        for name in mismatched(layouts, loads.run(canonical), canonical):
            reasons[name] = (
                "value transform: the loader moves codes but changes other values"
                if finite
                else "value transform: the loader moves finite values but rewrites NaN or infinity patterns"
            )
            del layouts[name]
    computed, unstable = sources_of(loads, layouts, specs, rng)
    return _plan(loads, specs, layouts, reasons, computed, unstable)


def _discover(
    loads: Loads, specs: Specs, codes: Round, all_specs: Specs, fixed: Mapping[str, torch.Tensor] | None = None
) -> tuple[dict[str, Layout], dict[str, str]]:
    """Runs the passes of a round and fits what was read; reasons are empty where nothing was found at all."""
    reader = Reader(codes)
    targets = {t.name: t for t in codes.targets}
    for index in range(max(codes.num_passes, 1)):
        tensors = {}
        for name, (shape, dtype) in all_specs.items():
            if name in targets:
                tensors[name] = codes.tensor(targets[name], index)
            elif fixed is not None:
                tensors[name] = fixed[name]
            else:
                tensors[name] = torch.empty(shape, dtype=dtype)
        reader.take(index, loads.run(tensors))
    found = reader.found()
    layouts: dict[str, Layout] = {}
    reasons: dict[str, str] = {}
    for name, (shape, dtype) in specs.items():
        if name not in targets:
            layouts[name] = Layout(tuple(shape), dtype.itemsize, (0,) * len(shape), tuple(shape), ())
            continue
        try:
            layout = _fitted(tuple(shape) or (1,), dtype, found[name], loads, nibbles=codes.nibbles)
            if layout is None:
                reasons[name] = ""
                continue
            validate(layout, loads.nbytes)
            layouts[name] = layout
        except NoFitError as e:
            reasons[name] = f"moved, but {e}"
        except PlanError as e:
            reasons[name] = f"moved, but the places cannot be proved: {e}"
    return layouts, reasons


def _fitted(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    found: Mapping[str, tuple[np.ndarray, np.ndarray]],
    loads: Loads,
    *,
    nibbles: bool,
) -> Layout | None:
    """The layout of one tensor from all storages it was found in."""
    units = (*shape[:-1], shape[-1] * 2 * dtype.itemsize) if nibbles else shape
    word_nbytes = 1 if nibbles else dtype.itemsize
    copies = []
    for storage in loads.nbytes:
        if storage not in found:
            continue
        atoms, offsets = loads.readable(*found[storage], storage, 0 if nibbles else dtype.itemsize)
        unit: Unit = "nibble" if nibbles else "word"
        copies += fit(units, atoms, offsets, storage=storage, unit=unit, word_nbytes=word_nbytes)
    return layout_of(shape, dtype.itemsize, copies) if copies else None


def _plan(
    loads: Loads,
    specs: Specs,
    layouts: dict[str, Layout],
    reasons: Mapping[str, str],
    computed: Mapping[str, tuple[str, ...]],
    unstable: tuple[str, ...],
) -> ProbedPlan:
    """Joins layouts, reasons and computed live tensors into a plan."""
    empty = tuple(r.name for r in loads.described if 0 in r.shape)
    feeds: dict[str, list[str]] = {}
    for live, sources in computed.items():
        for name in sources:
            feeds.setdefault(name, []).append(live)
    unmapped: dict[str, str] = {}
    absent: list[str] = []
    for name in specs:
        if name in feeds:
            why = reasons.get(name) or "value transform"
            if name in layouts:
                why = "moved, but also the source of a value transform"
            unmapped[name] = f"{why}; live tensors computed from it: {feeds[name]}"
        elif name not in layouts:
            lost = f"; live tensors without elements: {list(empty)}" if empty else ""
            if not reasons.get(name):
                absent.append(name)
            unmapped[name] = reasons.get(name) or (
                f"no live tensor depends on it: another rank's, dropped, or kept in an opaque handle{lost}"
            )
    derived = {
        live: f"computed from {list(sources)}" if sources else "changes, but with no single canonical tensor"
        for live, sources in computed.items()
    }
    return ProbedPlan(
        specs={n: (tuple(s), d) for n, (s, d) in specs.items()},
        layouts=layouts,
        live=loads.described,
        unmapped=unmapped,
        derived=derived,
        empty=empty,
        absent=tuple(absent),
        unstable=unstable,
    )
