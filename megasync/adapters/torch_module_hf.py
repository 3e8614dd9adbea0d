"""Models of Hugging Face transformers (version 5) as engines.

Since version 5 the live module is not the checkpoint: experts are stacked and fused, names differ. transformers
describes that as conversions; here its own conversions run on sketches instead of tensors, so that layouts follow
whatever the installed version does, and binding proves the result by content. Must not import an engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.adapters.torch_module_sketch import Sketch
from megasync.errors import MissingPackageError, PlanError
from megasync.schema import Schema


class TransformersEngine(TorchModuleEngine):
    """A ``transformers`` model whose weights are live; arguments are those of `TorchModuleEngine`.

    Canonical names that the model class itself ignores when it loads (a draft head that it has no code for) are
    excluded with that reason.

    Raises:
        TypeError: An argument of another kind, such as a state_dict for the module.
        MissingPackageError: transformers 5 is not installed.
    """

    name = "transformers model"

    def __init__(self, module: torch.nn.Module, **more: Any) -> None:
        super().__init__(module, **more)
        try:
            from transformers import conversion_mapping, core_model_loading
        except ImportError as e:
            raise MissingPackageError(
                "transformers 5 is needed to follow its conversions: pip install 'transformers>=5'"
            ) from e
        self._loading = core_model_loading
        self._conversions = conversion_mapping.get_model_conversion_mapping(module)

    def excluded(self, schema: Schema) -> Mapping[str, str]:
        """See ``Engine.excluded``."""
        out = dict(super().excluded(schema))
        patterns = list(getattr(self.module, "_keys_to_ignore_on_load_unexpected", None) or [])
        for spec in schema.tensors:
            if spec.name not in out and any(re.search(p, spec.name) for p in patterns):
                out[spec.name] = f"{type(self.module).__name__} ignores it when it loads"
        return out

    def sketch(self, schema: Schema) -> tuple[dict[str, list[Sketch]], list[str]]:
        """See ``TorchModuleEngine.sketch``; rules come first, then transformers' conversions."""
        loading = self._loading
        renamings = [t for t in self._conversions if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in self._conversions if isinstance(t, loading.WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        state = self.module.state_dict(keep_vars=True)
        excluded = self.excluded(schema)
        found: dict[str, list[Sketch]] = {}
        lost: list[str] = []
        gathered: dict[str, Any] = {}
        for spec in sorted(schema.tensors, key=lambda t: loading.dot_natural_key(t.name)):
            if spec.name in excluded or not spec.num_words:
                continue
            whole = Sketch.of(spec.name, spec.shape, spec.word_nbytes)
            rule = next((r for rule in self.rules if (r := rule(spec)) is not None), None)
            if rule is not None:
                found.setdefault(rule[0], []).append(rule[1](whole))
                continue
            reached = False
            for name in (spec.name, *spec.aliases):
                target, pattern = self._target(name, renamings, converters, state)
                if target not in state:
                    continue
                reached = True
                if pattern is None:
                    found.setdefault(target, []).append(whole)
                    continue
                converter = gathered.setdefault(target, deepcopy(by_pattern[pattern]))
                converter.add_tensor(target, name, pattern, whole)
            if not reached:
                lost.append(spec.name)
        for target, converter in gathered.items():
            for name, value in self._convert(target, converter).items():
                if name not in state:
                    lost.append(f"{value.names()} (as {name})")
                    continue
                found.setdefault(name, []).append(value)
        return found, lost

    def _target(self, name: str, renamings: Any, converters: Any, state: Mapping[str, Any]) -> tuple[str, str | None]:
        """Live name and matched converter pattern of a checkpoint name, by transformers' own rule."""
        prefix = getattr(self.module, "base_model_prefix", "")
        target, pattern = self._loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = self._loading.rename_source_key(name, [], [], prefix, state)
        return target, pattern

    def _convert(self, target: str, converter: Any) -> dict[str, Sketch]:
        try:
            made = converter.convert(target, model=self.module, config=self.module.config)
        except PlanError:
            raise
        except Exception as e:
            raise PlanError(
                f"the conversions of {type(self.module).__name__} for {target} cannot be followed: {e}. Give its tensors "
                "rules, or exclude them"
            ) from e
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}
