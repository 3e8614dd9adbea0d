"""Any torch module as an engine: live parameters and buffers by name, rules for those that lie otherwise.

Names of the run are looked up among the module's parameters and persistent buffers; what has the same shape and dtype
is an identity layout, what the module keeps in a wider float dtype is a canonical shadow and a cast. Everything that
does not resolve is listed at plan time. Before it comes a module with loaded weights; after it the applier.
``torch_module_hf`` adds what transformers' own loader does. Must not import an engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition

import torch

from megasync.adapters.arguments import kind_of, listed, pattern, require_callable, require_module
from megasync.adapters.torch_module_casts import cast_group
from megasync.adapters.torch_module_sketch import Sketch
from megasync.errors import PlanError, RetryError, TaintedError
from megasync.layout.modes import Layout
from megasync.receiver.engine import TORCH_DTYPES, Derivation, Engine, Tensors
from megasync.schema import Schema
from megasync.types import Box, TensorSpec

Rule = Callable[[TensorSpec], tuple[str, Callable[[Sketch], Sketch]] | None]
"""For a canonical tensor: the live name it goes to and what the engine did to it, or None where the rule does not
apply."""

_SHOWN = 50
_BYTES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def rename(pattern: str, replacement: str) -> Rule:
    """A rule for tensors that only have another name: a regular expression for the whole canonical name."""
    compiled = re.compile(pattern)

    def rule(spec: TensorSpec) -> tuple[str, Callable[[Sketch], Sketch]] | None:
        match = compiled.fullmatch(spec.name)
        return None if match is None else (match.expand(replacement), lambda s: s)

    return rule


class TorchModuleEngine(Engine):
    """A module whose weights are live.

    Forward passes run inside ``serving()``: an update waits for the ones that run and keeps new ones out.

    Args:
        module: With loaded weights, on CPU or CUDA.
        rules: For canonical tensors that do not lie under their own name as they are; the first that applies wins.
        exclude: Regular expressions of canonical names that the module does not load on purpose, with the reason.
        local: Regular expressions of live names that no publication reaches on purpose (an adapter, a value head).
        seed: Canonical words by name and box, for casts that cannot be turned around.
        observe: Output for a fixed input, for the self-test.
        pause_timeout_s: Longest wait for running forward passes.

    Raises:
        TypeError: An argument of another kind (a state_dict for the module, a text for a list of them).
        ValueError: A text that is no regular expression.
    """

    name = "torch module"

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        rules: Sequence[Rule] = (),
        exclude: Mapping[str, str] | None = None,
        local: Sequence[str] = (),
        seed: Callable[[str, Box], torch.Tensor | None] | None = None,
        observe: Callable[[], bytes] | None = None,
        pause_timeout_s: float = 60.0,
    ) -> None:
        who = type(self).__name__
        require_module(who, module)
        if not isinstance(exclude, Mapping | None):
            raise TypeError(
                f"{who} got {kind_of(exclude)} for exclude, expected a mapping: give each regular expression with the reason"
            )
        for name, given in (("seed", seed), ("observe", observe)):
            if given is not None:
                require_callable(who, name, given)
        self.module = module
        self.rules = listed(who, "rules", rules, "functions")
        self.exclude = {pattern(who, "exclude", p): why for p, why in (exclude or {}).items()}
        self.local = tuple(pattern(who, "local", p) for p in listed(who, "local", local, "regular expressions"))
        self.pause_timeout_s = pause_timeout_s
        self.version = -1
        self._seed, self._observe = seed, observe
        self._turn = Condition()
        self._running = 0
        self._paused = False
        self._tainted = ""
        self._planned: tuple[Schema, dict[str, Layout], tuple[Derivation, ...]] | None = None

    def tensors(self) -> Tensors:
        """Parameters and all buffers by name; tied ones under each of their names."""
        named: dict[str, torch.Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        named |= dict(self.module.named_buffers(remove_duplicate=False))
        return named

    def saved_names(self) -> set[str]:
        """Live names that belong to the weights: parameters and persistent buffers. Caches that are computed from the
        configuration (rotary tables) are not among them.
        """
        return {n for n, t in self.module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}

    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        """See ``Engine.layouts``."""
        return self._plan(schema)[0]

    def derivations(self, schema: Schema) -> Sequence[Derivation]:
        """See ``Engine.derivations``: one cast a live tensor."""
        return self._plan(schema)[1]

    def excluded(self, schema: Schema) -> Mapping[str, str]:
        """See ``Engine.excluded``."""
        out = {}
        for spec in schema.tensors:
            why = next((why for p, why in self.exclude.items() if p.fullmatch(spec.name)), None)
            if why is not None:
                out[spec.name] = why
        return out

    def seed(self, name: str, box: Box) -> torch.Tensor | None:
        """See ``Engine.seed``."""
        return None if self._seed is None else self._seed(name, box)

    def observe(self) -> bytes | None:
        """See ``Engine.observe``."""
        return None if self._observe is None else self._observe()

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Hold the weights as they are for a forward pass (or several that must see one version).

        Yields:
            The version of the weights, -1 before an applier has joined.

        Raises:
            TaintedError: The weights are in an unknown state.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._paused or self._tainted)
            if self._tainted:
                raise TaintedError(f"{self.name} must not serve: {self._tainted}")
            self._running += 1
        try:
            yield self.version
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify_all()

    def pause(self) -> None:
        """See ``Engine.pause``: waits for ``serving`` blocks to end; new ones wait for ``resume``.

        Raises:
            RetryError: They do not end, and go on. Called inside ``serving`` by the same thread it waits for itself.
        """
        with self._turn:
            self._paused = True
            if not self._turn.wait_for(lambda: not self._running, self.pause_timeout_s):
                self._paused = False
                self._turn.notify_all()
                raise RetryError(
                    f"{self.name}: forward passes did not end within {self.pause_timeout_s} s, nothing was touched: raise "
                    "pause_timeout_s, and do not update inside serving()"
                )
        for device in {t.device for t in self.tensors().values() if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def resume(self, version: int) -> None:
        """See ``Engine.resume``."""
        with self._turn:
            self.version, self._paused = version, False
            self._turn.notify_all()

    def holds(self, version: int) -> None:
        """See ``Engine.holds``."""
        with self._turn:
            self.version = version

    def quarantine(self, reason: str) -> None:
        """See ``Engine.quarantine``: ``serving`` raises from now on."""
        with self._turn:
            self._tainted = reason
            self._turn.notify_all()

    def sketch(self, schema: Schema) -> tuple[dict[str, list[Sketch]], list[str]]:
        """What each live tensor is made of, and what does not resolve.

        Args:
            schema: The run's schema.

        Returns:
            Sketches by live name, and canonical names that lead nowhere.
        """
        saved = self.saved_names()
        found: dict[str, list[Sketch]] = {}
        lost: list[str] = []
        excluded = self.excluded(schema)
        for spec in schema.tensors:
            if spec.name in excluded or not spec.num_words:
                continue
            whole = Sketch.of(spec.name, spec.shape, spec.word_nbytes)
            rule = next((r for rule in self.rules if (r := rule(spec)) is not None), None)
            targets = [(rule[0], rule[1](whole))] if rule else [(n, whole) for n in (spec.name, *spec.aliases)]
            known = [(n, s) for n, s in targets if n in saved]
            for name, sketch in known:
                found.setdefault(name, []).append(sketch)
            if not known:
                lost.append(spec.name)
        return found, lost

    def _plan(self, schema: Schema) -> tuple[dict[str, Layout], tuple[Derivation, ...]]:
        if self._planned is None or self._planned[0] is not schema:
            self._planned = (schema, *self._make_plan(schema))
        return self._planned[1], self._planned[2]

    def _make_plan(self, schema: Schema) -> tuple[dict[str, Layout], tuple[Derivation, ...]]:
        tensors = self.tensors()
        found, lost = self.sketch(schema)
        faults = [f"names that lead to no live tensor: {', '.join(lost[:_SHOWN])}"] if lost else []
        layouts: dict[str, Layout] = {}
        groups: list[Derivation] = []
        wrong: list[str] = []
        for live, sketches in found.items():
            tensor = tensors[live]
            dtypes = {schema.tensors[schema.ids[p.name]].dtype for s in sketches for p in s.parts}
            source = TORCH_DTYPES[next(iter(dtypes))]
            shapes = {tuple(s.shape) for s in sketches}
            if tensor.numel() == 0 or shapes != {tuple(tensor.shape)} or len(dtypes) != 1:
                wrong.append(
                    f"{live} is live {tensor.dtype}{list(tensor.shape)}, made of {sorted(dtypes)} {sorted(shapes)}"
                )
            elif tensor.dtype == source or (tensor.dtype in _BYTES and tensor.element_size() == source.itemsize):
                for part in (p for s in sketches for p in s.parts):
                    place = part.layout(live, int(tensor.storage_offset()), tensor.stride() or (1,))
                    layouts[part.name] = _joined(layouts.get(part.name), place)
            else:
                groups.append(cast_group(live, tensor, sketches, source))
        if wrong:
            faults.append(f"other shapes or dtypes: {'; '.join(wrong[:_SHOWN])}")
        if stale := self._unreached(tensors, set(found)):
            faults.append(f"live weights that no tensor of the run reaches: {', '.join(stale[:_SHOWN])}")
        if faults:
            raise PlanError(f"{self.name} does not fit run {schema.run!r}: {'. '.join(faults)}. Nothing was touched")
        return layouts, tuple(groups)

    def _unreached(self, tensors: Tensors, reached: set[str]) -> list[str]:
        """Weights that would keep their old values for ever; tied names are reached through any of them."""
        memory = {tensors[n].data_ptr() for n in reached}
        return [
            n
            for n in sorted(self.saved_names() - reached)
            if tensors[n].numel()
            and tensors[n].data_ptr() not in memory
            and not any(p.fullmatch(n) for p in self.local)
        ]


def _joined(have: Layout | None, more: Layout) -> Layout:
    """One layout of a canonical tensor that goes to several live ones: boxes side by side, or copies of the first."""
    if have is None:
        return more
    same = (have.start, have.stop) == (more.start, more.stop)
    start = tuple(min(a, b) for a, b in zip(have.start, more.start, strict=True))
    stop = tuple(max(a, b) for a, b in zip(have.stop, more.stop, strict=True))
    records = more.records if not same else tuple(replace(r, primary=False) for r in more.records)
    return replace(have, start=start, stop=stop, records=(*have.records, *records))
