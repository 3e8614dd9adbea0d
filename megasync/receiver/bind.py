"""Binding: an engine's layouts checked against the run's schema, once, before anything is fetched.

Every tensor of the schema is held, shadowed or excluded by name; every word has one primary place, proven by
arithmetic; every place is live memory that is remembered (identity). Comes after the Engine port, before stage. Must
not import fetch, stage or apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

import msgspec
import numpy as np
import torch

from megasync.errors import PlanError, SchemaMismatchError
from megasync.kernels.records import storage_bytes
from megasync.layout.compose import arrange, with_copies
from megasync.layout.modes import Layout, Remap
from megasync.layout.prove import validate_all
from megasync.manifest import Manifest
from megasync.receiver.claims import Claims, Mirror, check_coverage, coverage, mirrors, slices
from megasync.receiver.engine import Derivation, Engine, Tensors
from megasync.receiver.identity import StorageMark, check_alive, mark_all
from megasync.receiver.leads import Held
from megasync.receiver.shadow import Shadows, plan_shadows
from megasync.receiver.votes import vote
from megasync.schema import Schema
from megasync.tiles import strides
from megasync.types import WORD_DTYPES, Box

_SHOWN = 50


@dataclass
class Binding:
    """One engine rank bound to a run's schema.

    Attributes:
        engine: The engine.
        schema: The run's schema.
        held: By tensor id: tensors of which this rank holds words, shadows included. Storages of records are keys of
            ``storages``.
        storages: uint8 ``[n]`` over each whole live storage, by name; two names of one memory are one entry.
        shadows: The canonical shadows.
        excluded: Tensor id to reason: no rank of the engine holds it.
        group_ids: int64, ascending: tensors that the engine's ranks hold together, whole.
        marks: Identity of every live tensor that is written or derived.
        mirrors: Replicas of whole slices, the same on every rank.
        made: What backends made once from this binding, by a name of theirs.
    """

    engine: Engine
    schema: Schema
    held: dict[int, Held]
    storages: dict[str, torch.Tensor]
    shadows: Shadows
    excluded: dict[int, str]
    group_ids: np.ndarray
    marks: dict[str, StorageMark]
    mirrors: tuple[Mirror, ...]
    _needed: np.ndarray = field(repr=False)
    _views: dict[tuple[str, int], np.ndarray] = field(default_factory=dict, repr=False)
    made: dict[str, object] = field(default_factory=dict, repr=False)

    def words(self, storage: str, word_nbytes: int) -> np.ndarray:
        """A CPU storage as words, ``<u{word_nbytes}``, writable; a tail shorter than a word is left out."""
        found = self._views.get((storage, word_nbytes))
        if found is None:
            raw = self.storages[storage].numpy()
            found = raw[: raw.size // word_nbytes * word_nbytes].view(WORD_DTYPES[word_nbytes])
            self._views[storage, word_nbytes] = found
        return found

    def needs(self, tensor_ids: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """Whether this rank holds words of tiles, bool ``[T]``."""
        out: np.ndarray = self._needed[self.schema.first_tile[tensor_ids] + tiles]
        return out

    def only(self, tensor_ids: Iterable[int]) -> Binding:
        """The same rank, as if it held nothing but some tensors: for backends that share the work by device."""
        chosen = set(tensor_ids)
        held = {i: h for i, h in self.held.items() if i in chosen}
        names = {r.storage for h in held.values() for r in h.layout.records}
        needed = self._needed & np.repeat(
            np.isin(np.arange(len(self.schema.tensors)), list(chosen)), np.diff(self.schema.first_tile)
        )
        storages = {n: s for n, s in self.storages.items() if n in names}
        return replace(self, held=held, storages=storages, _needed=needed, _views={}, made={})

    def frames_of(self, manifest: Manifest) -> np.ndarray:
        """Numbers of the frames that touch tiles of this rank's slices, ascending."""
        table = manifest.frames
        found = self.made.get("frames of")
        if isinstance(found, tuple) and found[0] is table:
            return cast(np.ndarray, found[1])
        ids, tiles = table.tiles
        bounds = table.tile_bounds
        needed = np.zeros(len(table), dtype=bool)
        for first, last in strides(bounds):
            here = slice(int(bounds[first]), int(bounds[last]))
            tile_needed = self.needs(ids[here], tiles[here])
            needed[first:last] = np.logical_or.reduceat(tile_needed, bounds[first:last] - bounds[first])
        frames = np.flatnonzero(needed)
        self.made["frames of"] = table, frames  # asked for several times while a version is staged
        return frames

    def replica_id(self, tensor_id: int) -> int:
        """The id under which sums of words that are replicas here are kept apart from primaries."""
        return tensor_id + len(self.schema.tensors)

    def check_alive(self) -> None:
        """See ``identity.check_alive``."""
        check_alive(self.marks, self.engine.tensors())

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the live storages, shadows left out."""
        return {s.device for n, s in self.storages.items() if n not in self.shadows.storages}

    def slice_nbytes(self) -> int:
        """Canonical bytes that this rank holds."""
        return sum(h.layout.slice_nbytes for h in self.held.values())


def bind(engine: Engine, schema: Schema, *, shadow_limit_nbytes: int) -> Binding:
    """Check and remember where everything lies. *Collective* over the engine's ranks.

    Args:
        engine: This rank's engine.
        schema: The run's schema.
        shadow_limit_nbytes: Host bytes that canonical shadows may take.

    Returns:
        The binding; shadows are allocated but not seeded.

    Raises:
        SchemaMismatchError: The engine's tensors have another shape or word size: another model.
        PlanError: Names that do not resolve, places that overlap (outputs of derivations too) or leave their storage,
            words nobody holds: all listed.
        MemoryPlanError: The shadows do not fit.
        RankFailedError: One of these on any rank, where the engine has several.
    """
    with vote(engine, f"binding {engine.name} to run {schema.run!r}") as ballot:
        tensors = engine.tensors()
        held, excluded = _resolve(schema, engine.layouts(schema), engine.excluded(schema))
        groups = _check_derivations(schema, engine.derivations(schema), excluded)
        shadows = plan_shadows(schema, groups, held, shadow_limit_nbytes)
        names = {r.storage for x in held.values() for r in x.records} | {n for d in groups for n in d.outputs}
        if lost := sorted(names - tensors.keys()):
            raise PlanError(f"{engine.name} has no live tensor called {', '.join(lost[:_SHOWN])}")
        storages, key_of = _storages(tensors, names)
        held = {i: _renamed(x, key_of) for i, x in held.items()}
        shadows.held.update({i: held[i] for i in shadows.held})
        layouts = {i: x for i, x in (held | shadows.layouts).items() if x.records}
        storages |= shadows.storages
        sizes = {n: s.numel() for n, s in storages.items()}
        written = {schema.tensors[i].name: x for i, x in layouts.items()}
        validate_all(written | _outputs(groups, tensors, key_of), sizes)
        leads = {i: Held.of(schema.tensors[i].name, x) for i, x in layouts.items()}
        ballot.data = msgspec.msgpack.encode(Claims(coverage(schema, layouts).astype("<i8").tobytes(), slices(leads)))
        marks = mark_all(tensors, names)
    claims = [msgspec.msgpack.decode(b, type=Claims) for b in ballot.result]
    check_coverage(schema, np.sum([np.frombuffer(c.words, "<i8") for c in claims], axis=0), excluded, engine)
    group = np.array([i for i in range(len(schema.tensors)) if i not in excluded], dtype=np.int64)
    needed = _needed_tiles(schema, layouts)
    return Binding(engine, schema, leads, storages, shadows, excluded, group, marks, mirrors(claims), needed)


def _resolve(
    schema: Schema, named: Mapping[str, Layout], excluded: Mapping[str, str]
) -> tuple[dict[int, Layout], dict[int, str]]:
    """Layouts and exclusions by tensor id; everything that does not resolve or fit is listed."""
    unknown = sorted(n for n in (*named, *excluded) if n not in schema.ids)
    if unknown:
        raise PlanError(
            f"run {schema.run!r} has no tensors called {', '.join(unknown[:_SHOWN])} ({len(unknown)} in all): the engine "
            "names them; nothing was touched. Correct the adapter's names or use the run of this model"
        )
    wrong: list[str] = []
    held: dict[int, Layout] = {}
    for name, layout in named.items():
        i = schema.ids[name]
        spec = schema.tensors[i]
        if layout.shape != (spec.shape or (1,)) or layout.word_nbytes != spec.word_nbytes:
            wrong.append(
                f"{name}: engine {list(layout.shape)} of {layout.word_nbytes}-byte words, run {list(spec.shape)} of "
                f"{spec.word_nbytes} ({spec.dtype})"
            )
        elif i in held:
            # Two names of one tensor (tied embeddings): the second is the same memory or one more copy.
            held[i] = held[i] if held[i].records == layout.records else with_copies(held[i], layout)
        else:
            held[i] = layout
    if wrong:
        raise SchemaMismatchError(
            f"{len(wrong)} tensors of the engine are not those of run {schema.run!r} (schema {schema.digest.hex()}): "
            + "; ".join(wrong[:_SHOWN])
            + ": another model; nothing was touched"
        )
    out = {schema.ids[n]: why for n, why in excluded.items()}
    if both := sorted(schema.tensors[i].name for i in held.keys() & out.keys()):
        raise PlanError(f"the engine both holds and excludes {', '.join(both[:_SHOWN])}")
    return held, out


def _check_derivations(schema: Schema, groups: object, excluded: Mapping[int, str]) -> list[Derivation]:
    found: list[Derivation] = list(groups)  # type: ignore[call-overload]
    unknown = sorted({n for d in found for n in d.inputs if n not in schema.ids})
    if unknown:
        raise PlanError(f"derivations read {', '.join(unknown[:_SHOWN])}, which run {schema.run!r} does not have")
    gone = sorted({n for d in found for n in d.inputs if schema.ids[n] in excluded})
    if gone:
        raise PlanError(f"derivations read {', '.join(gone[:_SHOWN])}, which the engine excludes")
    outputs = [n for d in found for n in d.outputs]
    twice = sorted({n for n in outputs if outputs.count(n) > 1}) if len(set(outputs)) != len(outputs) else []
    if twice:
        raise PlanError(f"{', '.join(twice[:_SHOWN])} are outputs of two derivations: a group spans all its inputs")
    return found


def _outputs(groups: Iterable[Derivation], tensors: Tensors, key_of: Mapping[str, str]) -> dict[str, Layout]:
    """Where derivations write, as layouts, so that the same proof keeps them apart from what XOR writes and each other."""
    out: dict[str, Layout] = {}
    for d in groups:
        for name in d.outputs:
            tensor = tensors[name]
            size = tensor.element_size()
            parts = max(size // 8, 1)  # complex128 is two words
            shape, steps = (*tensor.shape, parts), (*(s * parts for s in tensor.stride()), 1)
            base = int(tensor.storage_offset()) * parts
            if (stuck := [a for a, n in enumerate(shape) if n > 1 and not steps[a]]) and tensor.numel():
                raise PlanError(
                    f"derivation {d.name}: its output {name} is expanded along axis {stuck[0]} (stride 0), so that several "
                    "elements are one place of memory: nothing can be written there. Give the tensor under it"
                )
            whole = arrange(shape, word_nbytes=size // parts)
            out[f"{name} (output of derivation {d.name})"] = whole.to(key_of[name], base=base, strides=steps)
    return out


def _storages(tensors: Mapping[str, torch.Tensor], names: set[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Whole storages by the first name of each memory, and the key of every name."""
    by_memory: dict[tuple[torch.device, int], str] = {}
    storages: dict[str, torch.Tensor] = {}
    key_of: dict[str, str] = {}
    for name in sorted(names):
        tensor = tensors[name].detach()
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            raise PlanError(f"live tensor {name} has no plain memory (device {tensor.device}, layout {tensor.layout})")
        memory = (tensor.device, tensor.untyped_storage().data_ptr())
        if memory[1] == 0:  # empty: every such storage has address 0
            key_of[name] = name
            storages[name] = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            continue
        key_of[name] = by_memory.setdefault(memory, name)
        if key_of[name] == name:
            storages[name] = storage_bytes(tensor)
    _check_disjoint(storages)
    return storages, key_of


def _check_disjoint(storages: Mapping[str, torch.Tensor]) -> None:
    """Two storages must not share memory under different start addresses: proofs look at one storage at a time."""
    spans = sorted((s.data_ptr(), s.data_ptr() + s.numel(), str(s.device), n) for n, s in storages.items() if s.numel())
    for (_, stop, device, name), (start, _, other_device, other) in pairwise(spans):
        if start < stop and device == other_device:
            raise PlanError(
                f"live tensors {name} and {other} share memory under two storages: give views of one storage"
            )


def _renamed(layout: Layout, key_of: Mapping[str, str]) -> Layout:
    """Records by the key of their memory; a copy that is the same memory as another record is left out."""
    kept: dict[Remap, Remap] = {}
    for r in layout.records:
        moved = replace(r, storage=key_of[r.storage])
        kept.setdefault(replace(moved, primary=True), moved)
    return replace(layout, records=tuple(kept.values()))


def _needed_tiles(schema: Schema, layouts: Mapping[int, Layout]) -> np.ndarray:
    first = schema.first_tile
    needed = np.zeros(int(first[-1]), dtype=bool)
    for i, x in layouts.items():
        needed[first[i] + schema.grids[i].tiles_of(Box(x.start, x.slice_shape))] = True
    return needed
