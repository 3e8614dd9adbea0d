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
from megasync.layout.probe_draws import Draw, Draws
from megasync.layout.probe_fit import NoFitError, fit
from megasync.layout.probe_loads import Loads, checked_specs, covered_bytes, mismatched
from megasync.layout.probe_merge import layout_of, without
from megasync.layout.probe_patterns import PACKED, dtype_name
from megasync.layout.probe_sources import Computed, sources_of
from megasync.layout.probe_values import Ranges
from megasync.layout.prove import validate, validate_all


def probe(
    load_fn: LoadFn,
    specs: Specs,
    *,
    num_draws: int = 2,
    any_bytes: bool = True,
    values: Ranges | tuple[float, float] | None = None,
    seed: int = 0,
) -> ProbedPlan:
    """Finds where a loader puts canonical tensors.

    Args:
        load_fn: Takes canonical tensors (name to CPU tensor, contiguous, new at every call), loads them as the engine
            does, post-processing included, and returns the live tensors by name: any dtype, device and strides, the
            same ones or new ones at every call. Called some twenty times for plain moves, some forty where a tensor
            has few words (each must see every special value of its dtype), more where something is computed.
        specs: Canonical name to extents and torch dtype (or its name) of every tensor that ``load_fn`` takes.
        num_draws: Draws of random bytes, of each kind, that the plan is verified on, besides those of special values:
            zeros of both signs, subnormals, limits, powers of two, infinities, NaN.
        any_bytes: Verify on NaN and infinity patterns too. Switch off only for a loader that cannot take them; the plan
            is then exact for finite values.
        values: Lowest and highest value, by canonical name or for every float tensor, for a loader that raises on
            others (a scale must be positive, it says); the plan is then exact for values inside.
        seed: Seed of the random bytes.

    Returns:
        The plan; look at ``unmapped`` before use.

    Raises:
        TypeError: A spec is no pair of extents and a dtype.
        ValueError: A dtype cannot be probed, or a range is none.
        PlanError: The loader failed, or returned other tensors from one call to the next.
    """
    specs = checked_specs(specs)
    draws = Draws(specs, seed, values=values, any_bytes=any_bytes)
    loads = Loads(load_fn)
    layouts, reasons = _discover(loads, specs, word_round(specs, draws.alphabets), specs)
    packed = {n: s for n, s in specs.items() if n not in layouts and dtype_name(s[1]) in PACKED}
    if packed:
        more, why = _discover(loads, packed, nibble_round(packed), specs, draws.random())
        layouts |= more
        reasons |= {n: w for n, w in why.items() if w or n not in reasons}
    layouts = {n: layouts[n] for n in specs if n in layouts}
    validate_all(layouts, loads.nbytes)
    for draw in draws.verification(num_draws):
        storages = loads.draw(draw)
        looked_at = {n: x for n, x in layouts.items() if n in draw.fresh}
        for name, wrong in mismatched(looked_at, storages, draw.tensors).items():
            # A computed tensor may hold words of the tensor by chance: the rest is still a move.
            rest = without(layouts[name], wrong)
            if rest is None:
                reasons[name] = _changed_values(draw)
                del layouts[name]
            else:
                layouts[name] = rest
    places = loads.changed_live(covered_bytes(layouts, loads.nbytes))
    computed = sources_of(loads, draws, places, num_draws)
    for name in _moved_by_bytes(loads, draws, computed):
        if name not in layouts and not reasons.get(name):
            reasons[name] = (
                "its bytes are moved, but not as whole words: inside them (a byte swap), to places between them (an odd "
                "address), or in an order that depends on their values"
            )
    return _plan(loads, specs, layouts, reasons, computed)


def _changed_values(draw: Draw) -> str:
    if not draw.finite:
        return "value transform: the loader moves finite values but rewrites NaN or infinity patterns"
    if draw.special:
        return "value transform: the loader moves most values but rewrites some of the zeros, subnormals or limits"
    return "value transform: the loader moves codes but changes other values"


def _moved_by_bytes(loads: Loads, draws: Draws, computed: Computed) -> set[str]:
    """Tensors from which alone a live tensor is computed that holds the same bytes, each as often."""
    sole = {live: found[0] for live, found in computed.sources.items() if len(found) == 1}
    if not sole:
        return set()
    storage_of = {r.name: r.storage for r in loads.described}
    canonical = draws.random()
    storages = loads.run(canonical, "random finite values")
    out = set()
    for live, name in sole.items():
        counts = np.bincount(canonical[name].reshape(-1).view(torch.uint8).numpy(), minlength=256)
        found = np.bincount(storages[storage_of[live]], minlength=256)
        # Padding is zeros. Of a few bytes any could be there by chance.
        if np.count_nonzero(counts) > 2 and (found[1:] == counts[1:]).all() and found[0] >= counts[0]:
            out.add(name)
    return out


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
            layouts[name] = Layout(shape, dtype.itemsize, (0,) * len(shape), shape, ())
            continue
        try:
            layout = _fitted(shape or (1,), dtype, found[name], loads, nibbles=codes.nibbles)
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
    loads: Loads, specs: Specs, layouts: dict[str, Layout], reasons: Mapping[str, str], computed: Computed
) -> ProbedPlan:
    """Joins layouts, reasons and computed live tensors into a plan."""
    empty = tuple(r.name for r in loads.described if 0 in r.shape)
    feeds: dict[str, list[str]] = {}
    for live, sources in computed.sources.items():
        for name in sources:
            feeds.setdefault(name, []).append(live)
    lost = [live for live, sources in computed.sources.items() if not sources]
    unmapped: dict[str, str] = {}
    absent: list[str] = []
    for name in specs:
        if name in feeds:
            why = reasons.get(name) or "value transform"
            if name in layouts:
                why = "moved, but also the source of a value transform"
            unmapped[name] = f"{why}; live tensors computed from it: {feeds[name]}"
        elif lost:
            unmapped[name] = f"live tensors change for a reason that was not found, it may be this tensor: {lost}"
        elif name not in layouts:
            hidden = f"; live tensors without elements: {list(empty)}" if empty else ""
            if computed.unstable:
                hidden += (
                    f"; live tensors that differ between equal loads, whatever they hold: {list(computed.unstable)}"
                )
            if not reasons.get(name):
                absent.append(name)
            unmapped[name] = reasons.get(name) or (
                f"no live tensor depends on it: another rank's, dropped, or kept in an opaque handle{hidden}"
            )
    derived = {
        live: f"computed from {list(sources)}" if sources else "changes, from no canonical tensor that could be told"
        for live, sources in computed.sources.items()
    }
    return ProbedPlan(
        specs=specs,
        layouts=layouts,
        live=loads.described,
        unmapped=unmapped,
        derived=derived,
        sources={live: found or tuple(specs) for live, found in computed.sources.items()},
        empty=empty,
        absent=tuple(absent),
        unstable=computed.unstable,
    )
