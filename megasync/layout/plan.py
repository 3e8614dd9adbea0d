"""A probed plan: the layouts of one engine's live tensors, what could not be mapped, and their use.

`probe` makes it. It reads canonical bytes back out of live tensors, applies canonical masks in place, is saved under
its digest, and is verified on other layers before it is used there. It refuses live tensors that are not those it was
made for. This module must import nothing of megasync but ``errors``, ``digest`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megasync.digest import XXH3_128, content_digest
from megasync.errors import FormatError, PlanError
from megasync.layout.evaluate import gather, xor_
from megasync.layout.live import LiveTensor, LoadFn, Specs, bound
from megasync.layout.modes import Layout
from megasync.layout.plan_document import decode_plan, encode_plan
from megasync.layout.probe_draws import Draws
from megasync.layout.probe_loads import checked_specs
from megasync.layout.probe_values import Ranges
from megasync.layout.probe_verify import disagreement
from megasync.layout.prove import validate_all

SUFFIX = ".layouts"


@dataclass(frozen=True)
class ProbedPlan:
    """Where the canonical tensors of a loader lie in its live tensors.

    Attributes:
        specs: Canonical name to extents and torch dtype.
        layouts: Canonical name to layout, for every tensor whose bytes are moved; also for those that a live tensor is
            computed from besides (they are in ``unmapped`` too).
        live: What the live tensors were.
        unmapped: Canonical names that a mask alone does not update, with the reason: value transforms, dropped tensors.
        derived: Live tensors that are computed from canonical ones, with the reason.
        sources: Those live tensors again, with the canonical names that each is computed from, all of which are in
            ``unmapped``; all names where they could not be told.
        empty: Live tensors without elements: the engine keeps their data elsewhere.
        absent: Those of ``unmapped`` that no live tensor depends on: another rank's, dropped, or kept in an opaque
            handle. Only the ranks together can tell; every canonical tensor must be held by one.
        unstable: Live tensors with bytes that differ between equal loads (uninitialised padding).
    """

    specs: Specs
    layouts: Mapping[str, Layout]
    live: tuple[LiveTensor, ...]
    unmapped: Mapping[str, str]
    derived: Mapping[str, str]
    empty: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """xxh3-128 of `encode`, in hexadecimal."""
        return content_digest(self.encode(), XXH3_128).hex()

    def gather(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reads the canonical tensors back out of the live ones.

        Args:
            live: Live tensors by name, as the loader returned them.

        Returns:
            Canonical name to tensor of the canonical dtype and of the extents of the rank's slice, new memory on the
            device of the live tensors. Words that the rank does not hold are 0.

        Raises:
            PlanError: The live tensors are not those of the plan.
        """
        storages = bound(live, self.live, self._storages(self.layouts))
        out = {}
        for name, layout in self.layouts.items():
            shape, dtype = self.specs[name]
            extents = layout.slice_shape if shape else ()
            out[name] = gather(layout, storages).view(dtype).reshape(extents)
        return out

    def xor_(
        self, live: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor], *, skip_absent: bool = False
    ) -> None:
        """Applies canonical masks to the live tensors in place.

        Args:
            live: Live tensors by name; written in place, addresses kept.
            masks: Canonical name to ``old XOR new``: any dtype of the canonical word size, extents of the whole tensor
                or of the rank's slice, on the device of the live tensors. Names left out do not change.
            skip_absent: Leave out masks of ``absent`` tensors; for a rank whose peers are known to hold them.

        Raises:
            ValueError: A mask has other extents or another word size than its tensor.
            PlanError: A mask is of an unmapped or unknown tensor, or the live tensors are not those of the plan;
                nothing was written.
        """
        if skip_absent:
            masks = {n: m for n, m in masks.items() if n not in self.absent}
        refused = [f"{n}: {self.unmapped.get(n, 'not in the plan')}" for n in masks if n not in self.mapped]
        if refused:
            raise PlanError(f"masks cannot be applied, nothing was touched: {'; '.join(refused)}")
        cut = {name: self._cut(name, mask) for name, mask in masks.items()}
        storages = bound(live, self.live, self._storages(masks))
        for name, mask in cut.items():
            xor_(self.layouts[name], storages, mask)

    @property
    def mapped(self) -> frozenset[str]:
        """Canonical names that a mask updates exactly."""
        return frozenset(self.layouts) - frozenset(self.unmapped)

    def validate(self) -> None:
        """Proves the layouts again, as after reading them from a file.

        Raises:
            PlanError: See `prove.validate_all`; or a layout is of another tensor than the specs say.
        """
        for name, layout in self.layouts.items():
            spec = self.specs.get(name)
            if spec is None or (spec[0] or (1,)) != layout.shape or spec[1].itemsize != layout.word_nbytes:
                raise PlanError(f"layout of {name} is of {layout.shape} x {layout.word_nbytes} B, the plan says {spec}")
        validate_all(self.layouts, {r.storage: r.storage_nbytes for r in self.live})

    def verify_on(
        self,
        load_fn: LoadFn,
        specs: Specs,
        *,
        num_draws: int = 2,
        any_bytes: bool = True,
        values: Ranges | tuple[float, float] | None = None,
        seed: int = 1,
    ) -> None:
        """Checks that the plan holds for another loader, such as that of another layer.

        Args:
            load_fn: The other loader, as in `probe`, under the names of this plan (see `renamed`).
            specs: Its canonical tensors.
            num_draws: Draws of random bytes, of each kind, besides those of special values.
            any_bytes: As in `probe`.
            values: As in `probe`.
            seed: Seed of the random bytes.

        Raises:
            PlanError: Names, shapes or dtypes differ, live tensors differ, a tensor does not land where the plan says,
                live bytes that the plan does not know change with the canonical tensors, or a live tensor that is
                computed changes with tensors that the plan takes masks of.
        """
        specs = checked_specs(specs)
        if dict(self.specs) != specs:
            odd = sorted(n for n in self.specs.keys() | specs.keys() if self.specs.get(n) != specs.get(n))
            raise PlanError(f"the plan is of other canonical tensors: {odd[:8]} differ; probe this layer itself")
        draws = Draws(specs, seed, values=values, any_bytes=any_bytes)
        noisy = frozenset(self.unstable) - frozenset(self.derived)
        wrong, moved = disagreement(load_fn, draws, num_draws, self.layouts, self.live, noisy)
        wrong |= moved - set(self.derived)
        if self.derived and self.mapped:
            # Only what masks are taken of changes: then nothing but the layouts' bytes may.
            still = {n: t for n, t in draws.leveled(0.25, 0.75).items() if n not in self.mapped}
            stale = disagreement(load_fn, draws, num_draws, self.layouts, self.live, noisy, still)[1]
            if stale:
                raise PlanError(
                    f"live tensors {sorted(stale)} are computed from tensors that the plan takes masks of: masks would "
                    "leave them stale; probe this layer itself"
                )
        if wrong:
            raise PlanError(f"the plan does not hold here: {sorted(wrong)} differ from it; probe this layer itself")

    def renamed(self, canonical: Callable[[str], str], live: Callable[[str], str]) -> ProbedPlan:
        """The same plan under other names, for another layer of equal shapes.

        Args:
            canonical: New canonical name of an old one.
            live: New live name of an old one.

        Returns:
            The plan; verify it on the other layer before use.

        Raises:
            ValueError: Two names become one.
        """
        for names, rename in ((self.specs, canonical), ([r.name for r in self.live], live)):
            if len({rename(n) for n in names}) < len(names):
                raise ValueError(f"names of the plan become equal under the new naming: {sorted(names)[:8]}")
        layouts = {
            canonical(name): replace(layout, records=tuple(replace(r, storage=live(r.storage)) for r in layout.records))
            for name, layout in self.layouts.items()
        }
        return ProbedPlan(
            specs={canonical(n): s for n, s in self.specs.items()},
            layouts=layouts,
            live=tuple(replace(r, name=live(r.name), storage=live(r.storage)) for r in self.live),
            unmapped={canonical(n): why for n, why in self.unmapped.items()},
            derived={live(n): why for n, why in self.derived.items()},
            sources={live(n): tuple(canonical(s) for s in found) for n, found in self.sources.items()},
            empty=tuple(live(n) for n in self.empty),
            absent=tuple(canonical(n) for n in self.absent),
            unstable=tuple(live(n) for n in self.unstable),
        )

    def encode(self) -> bytes:
        """Writes the plan down; equal plans have equal bytes."""
        return encode_plan(
            specs=self.specs,
            layouts=self.layouts,
            live=self.live,
            unmapped=self.unmapped,
            derived=self.derived,
            sources=self.sources,
            empty=self.empty,
            absent=self.absent,
            unstable=self.unstable,
        )

    @staticmethod
    def decode(data: bytes) -> ProbedPlan:
        """Reads what `encode` wrote, from anywhere, and proves it.

        Args:
            data: The bytes.

        Returns:
            The plan.

        Raises:
            FormatError: The bytes are not exactly one plan.
            PlanError: Its layouts do not hold together.
        """
        plan = ProbedPlan(**decode_plan(data))
        plan.validate()
        return plan

    def save(self, folder: Path) -> Path:
        """Writes the plan into a folder under its digest.

        Args:
            folder: Existing folder.

        Returns:
            The file, ``<digest>.layouts``.
        """
        path = folder / f"{self.digest}{SUFFIX}"
        path.write_bytes(self.encode())
        return path

    @staticmethod
    def load(path: Path) -> ProbedPlan:
        """Reads a saved plan.

        Args:
            path: A file that `save` wrote; its name is the digest.

        Returns:
            The plan.

        Raises:
            FormatError: The bytes are not those of the name, or no plan.
            PlanError: Its layouts do not hold together.
        """
        data = path.read_bytes()
        found = content_digest(data, XXH3_128).hex()
        if path.name != found + SUFFIX:
            raise FormatError(f"plan file {path.name} holds bytes of digest {found}: it was changed; probe again")
        return ProbedPlan.decode(data)

    def _storages(self, names: Mapping[str, object]) -> frozenset[str]:
        return frozenset(s for n in names for s in self.layouts[n].storages)

    def _cut(self, name: str, mask: torch.Tensor) -> torch.Tensor:
        """The bytes of a mask over the rank's slice."""
        layout, (shape, dtype) = self.layouts[name], self.specs[name]
        if mask.dtype.itemsize != dtype.itemsize or tuple(mask.shape) not in (tuple(shape), layout.slice_shape):
            raise ValueError(
                f"mask of {name} is {tuple(mask.shape)} x {mask.dtype}; expected {tuple(shape)}, or the slice "
                f"{layout.slice_shape}, of {dtype.itemsize}-byte words"
            )
        if tuple(mask.shape) == tuple(shape) and shape:
            mask = mask[tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))]
        return mask.contiguous().reshape(-1).view(torch.uint8)
