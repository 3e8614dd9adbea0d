"""Checks that anyone can run on their own layout, plan or adapter; the project's own tests use them too.

Plain functions that return when all is well and raise `ConformanceError` with what was expected and found. They need
real bytes, so they are for tests and for the start of an engine, not for the update itself. This module must import
nothing of megasync but ``errors`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from megasync.errors import FormatError, PlanError
from megasync.layout.encoding import decode_layouts, encode_layouts, layouts_digest
from megasync.layout.evaluate import gather, xor_
from megasync.layout.live import LoadFn, Specs, describe, storages_of
from megasync.layout.modes import Layout
from megasync.layout.plan import ProbedPlan
from megasync.layout.probe_draws import Draws
from megasync.layout.probe_patterns import random_tensor
from megasync.layout.probe_values import Ranges
from megasync.layout.prove import validate_all
from megasync.layout.rules import MAX_DIGITS
from megasync.layout.views import box_offsets

SPARSE_LIMIT = 1 << 20
"""Words of a record that are also evaluated one by one, as the sparse path does."""


class ConformanceError(AssertionError):
    """A layout, plan or adapter does not do what it says."""


def check_layout(
    layout: Layout,
    transform: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    finite: bool = False,
    seed: int = 0,
) -> None:
    """Checks a layout of one tensor against what the engine does to it; see `check_layouts`.

    Args:
        layout: The layout.
        transform: Canonical tensor of the layout's shape to live tensors by name.
        dtype: Canonical torch dtype.
        finite: Use no NaN and infinity patterns.
        seed: Seed of the random bytes.

    Raises:
        ConformanceError: They differ.
    """
    specs = {"tensor": (layout.shape, dtype)}
    check_layouts({"tensor": layout}, lambda w: transform(w["tensor"]), specs, finite=finite, seed=seed)


def check_layouts(
    layouts: Mapping[str, Layout], load_fn: LoadFn, specs: Specs, *, finite: bool = False, seed: int = 0
) -> None:
    """Checks layouts against a loader on random bytes.

    They must be provable; hold the loaded bytes, copies included, one by one and all at once, special values of each
    dtype among them; turn the live tensors of one checkpoint into those of another by their masks alone, padding
    included; and survive being written down.

    Args:
        layouts: Canonical name to layout, for every tensor of ``specs``.
        load_fn: Canonical tensors to live tensors; storages go by the name of their first live tensor.
        specs: Canonical name to extents and torch dtype.
        finite: Use no NaN and infinity patterns.
        seed: Seed of the random bytes.

    Raises:
        ConformanceError: Something differs; the message names the tensors.
    """
    if set(layouts) != set(specs):
        raise ConformanceError(f"layouts are of {sorted(layouts)}, the specs of {sorted(specs)}")
    rng = np.random.default_rng(seed)
    old, new = ({n: random_tensor(*s, rng, finite=finite) for n, s in specs.items()} for _ in range(2))
    live, target = (dict(load_fn({n: t.clone() for n, t in w.items()})) for w in (old, new))
    described = describe(live)
    try:
        validate_all(layouts, {r.storage: r.storage_nbytes for r in described})
    except PlanError as e:
        raise ConformanceError(f"the layouts cannot be proved: {e}") from e
    most = max((len(r.digits) for layout in layouts.values() for r in layout.records), default=0)
    if most > MAX_DIGITS:
        raise ConformanceError(f"a record has {most} digits, at most {MAX_DIGITS} are allowed")
    storages = {n: s.clone() for n, s in storages_of(live, described).items()}
    check_content(layouts, storages, old)
    for name, layout in layouts.items():
        _check_one_by_one(name, layout, storages, old[name])
        xor_(layout, storages, _slice_bytes(layout, old[name]) ^ _slice_bytes(layout, new[name]))
    for storage, expected in storages_of(target, describe(target)).items():
        odd = int((storages[storage] != expected).sum())
        if odd:
            raise ConformanceError(f"live storage {storage!r} differs from a fresh load in {odd} bytes after the masks")
    for draw in (d for f in ((True,) if finite else (True, False)) for d in Draws(specs, seed).specials(finite=f)):
        live = dict(load_fn({n: t.clone() for n, t in draw.tensors.items()}))
        try:
            check_content(layouts, storages_of(live, describe(live)), draw.tensors)
        except ConformanceError as e:
            raise ConformanceError(f"of {draw.kind}: {e}") from e
    _check_written(layouts)


def check_content(
    layouts: Mapping[str, Layout], storages: Mapping[str, torch.Tensor], canonical: Mapping[str, torch.Tensor]
) -> None:
    """Checks that live storages hold canonical tensors where the layouts say: the content proof before a first apply.

    Equal shapes prove nothing: an engine may keep the shape and reorder the bytes.

    Args:
        layouts: Canonical name to layout.
        storages: Storage name to uint8 ``[nbytes]`` over each whole storage, CPU, contiguous.
        canonical: Canonical name to whole tensor, CPU.

    Raises:
        ConformanceError: Tensors differ; all are named.
    """
    odd = []
    for name, layout in layouts.items():
        expected = _slice_bytes(layout, canonical[name])
        records = layout.leading()
        copies = [r for r in layout.records if r not in records]
        for group in (records, *((r,) for r in copies)):
            alone = replace(layout, records=tuple(replace(r, primary=True) for r in group), partial=True)
            try:
                held = gather(alone, _moved(alone, storages, expected))
                wrong = int((gather(alone, storages) != held).sum())
            except PlanError as e:
                raise ConformanceError(f"{name}: {e}") from e
            if wrong:
                odd.append(f"{name} in {sorted({r.storage for r in group})}: {wrong} of {expected.numel()} bytes")
    if odd:
        raise ConformanceError(
            "live bytes are not the canonical ones, so the layout is not the engine's: " + "; ".join(odd)
        )


def check_plan(
    plan: ProbedPlan,
    load_fn: LoadFn,
    specs: Specs,
    *,
    any_bytes: bool = True,
    values: Ranges | tuple[float, float] | None = None,
    seed: int = 0,
) -> None:
    """Checks a probed plan against a loader: verification, use, refusal and writing down.

    Masks of all that is mapped must make the live tensors of a fresh load, computed ones included.

    Args:
        plan: The plan.
        load_fn: The loader, under the plan's names.
        specs: Its canonical tensors.
        any_bytes: As in `probe`.
        values: As in `probe`.
        seed: Seed of the random bytes.

    Raises:
        ConformanceError: Something differs.
    """
    try:
        plan.verify_on(load_fn, specs, any_bytes=any_bytes, values=values, seed=seed)
        plan.validate()
    except PlanError as e:
        raise ConformanceError(f"the plan does not hold: {e}") from e
    specs = dict(plan.specs)
    draws = Draws(specs, seed + 1, values=values)
    old, new = draws.random(), draws.random()
    masks = {n: _xor(old[n], new[n]) for n in sorted(plan.mapped)}
    # Loaded first: a loader may fill the same live tensors at every call.
    target = load_fn({n: (new if n in plan.mapped else old)[n].clone() for n in specs})
    expected_live = {n: _bytes(t.detach()).clone() for n, t in target.items() if n not in plan.unstable}
    fresh = load_fn({n: t.clone() for n, t in old.items()})
    before = {n: _bytes(t.detach()).clone() for n, t in fresh.items()}
    plan.xor_(fresh, masks)
    for name, expected in expected_live.items():
        if not torch.equal(_bytes(fresh[name].detach()), expected):
            raise ConformanceError(f"live tensor {name} is not that of a fresh load after the masks")
    got = plan.gather(fresh)
    for name in plan.mapped:
        layout = plan.layouts[name]
        if not layout.partial and not torch.equal(_bytes(got[name]), _slice_bytes(layout, new[name])):
            raise ConformanceError(f"{name}: the canonical bytes read back after its mask are not the new ones")
    plan.xor_(fresh, masks)
    for name, expected in before.items():
        if not torch.equal(_bytes(fresh[name].detach()), expected):
            raise ConformanceError(f"live tensor {name}: applying the masks twice does not restore it")
    for name in plan.unmapped:
        try:
            plan.xor_(fresh, {name: _xor(old[name], new[name])})
        except PlanError:
            continue
        raise ConformanceError(f"{name} is not mapped, but its mask was applied")
    if ProbedPlan.decode(plan.encode()).digest != plan.digest:
        raise ConformanceError("the plan read back from its encoding has another digest")


def check_read(name: str, flip: Callable[[], None], observe: Callable[[], bytes]) -> None:
    """Checks that the engine computes with a live tensor: flip, observe, flip back.

    A live tensor may be a shadow that nobody reads, because the kernel holds a packed copy; no shape and no content
    shows it.

    Args:
        name: Name of the live tensor, for the message.
        flip: XORs a fixed mask into it; the second call restores it.
        observe: What the engine computes (logits, tokens), as bytes; must be deterministic.

    Raises:
        ConformanceError: The observation is not repeatable, does not change with the flip, or does not come back.
    """
    before = observe()
    if observe() != before:
        raise ConformanceError(f"{name}: two observations of unchanged weights differ; observe something deterministic")
    flip()
    try:
        during = observe()
    finally:
        flip()
    if during == before:
        raise ConformanceError(
            f"{name}: flipping its bits changes nothing: the engine computes with a copy. Map that copy, or refuse the engine"
        )
    if observe() != before:
        raise ConformanceError(f"{name}: flipping its bits back does not restore the observation")


def _check_one_by_one(name: str, layout: Layout, storages: Mapping[str, torch.Tensor], canonical: torch.Tensor) -> None:
    """The sparse path: every word's offset, from its coordinates, finds that word."""
    words = canonical.reshape(layout.shape).contiguous().reshape(-1).view(torch.uint8).numpy()
    for r in layout.records:
        if r.num_units > SPARSE_LIMIT:
            continue
        data = storages[r.storage].numpy()
        source = np.stack((words & 15, words >> 4), -1).reshape(-1) if r.unit == "nibble" else words
        place = np.stack((data & 15, data >> 4), -1).reshape(-1) if r.unit == "nibble" else data
        wide = f"<u{r.word_nbytes}"
        source, place = source.view(wide), place[: place.size // r.word_nbytes * r.word_nbytes].view(wide)
        for coords, _ in box_offsets(r):
            inside, offsets = r.offsets(coords)
            expected = source[np.ravel_multi_index(coords, r.shape)]
            if not inside.all() or not np.array_equal(place[offsets], expected):
                raise ConformanceError(f"{name}: offsets of record {r} do not find its words")


def _check_written(layouts: Mapping[str, Layout]) -> None:
    data = encode_layouts(layouts)
    try:
        back = decode_layouts(data)
    except FormatError as e:
        raise ConformanceError(f"the layouts cannot be read back from their encoding: {e}") from e
    if back != dict(sorted(layouts.items())) or layouts_digest(back) != layouts_digest(layouts):
        raise ConformanceError("the layouts read back from their encoding are others")


def _moved(layout: Layout, storages: Mapping[str, torch.Tensor], words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Empty storages with the words where the layout puts them."""
    out = {n: torch.zeros_like(storages[n]) for n in layout.storages if n in storages}
    xor_(layout, out, words)
    return out


def _slice_bytes(layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    cut = tensor.reshape(layout.shape)[tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))]
    return _bytes(cut)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _xor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (_bytes(a) ^ _bytes(b)).view(a.dtype).reshape(a.shape)
