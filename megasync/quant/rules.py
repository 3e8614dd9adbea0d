"""Rules of what is quantised, and how: which canonical names take which formula in which checkpoint's form.

Comes before ``quant.checkpoint``, which applies them to a model. Must import nothing above quant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from megasync.errors import PlanError
from megasync.quant.formulas import formula
from megasync.types import TensorSpec

Checkpoint = Literal["modelopt", "compressed-tensors", "deepseek"]
ScaleDtype = Literal["F32", "F8_E8M0"]

PACKED = ".weight_packed"
"""How the codes of compressed-tensors' NVFP4 weights end."""


@dataclass(frozen=True, slots=True)
class QuantRule:
    """Which weights take which formula. The first rule whose pattern matches a canonical name, or a tied one's, wins.

    Attributes:
        pattern: Shell-style pattern over canonical names, ``*`` matching dots too.
        formula: Formula id, or empty to leave the matching tensors as they are.
        checkpoint: Whose names and shapes the tensors take.
        scale_dtype: ``F8_E8M0`` stores power-of-two block scales as bytes; ``F32`` otherwise.
        input_scale: The checkpoint has static activation scales; they enter the schema as frozen tensors.
    """

    pattern: str
    formula: str
    checkpoint: Checkpoint = "modelopt"
    scale_dtype: ScaleDtype = "F32"
    input_scale: bool = False

    def __post_init__(self) -> None:
        """Refuses names that there are not.

        Raises:
            ValueError: An unknown formula, checkpoint or scale dtype, or an empty pattern.
        """
        if self.formula:
            formula(self.formula)
        for what, given, names in (
            ("checkpoint", self.checkpoint, get_args(Checkpoint)),
            ("scale_dtype", self.scale_dtype, get_args(ScaleDtype)),
        ):
            if given not in names:
                raise ValueError(f"rule {self.pattern!r}: {what} {given!r} is none of {', '.join(map(repr, names))}")
        if not self.pattern:
            raise ValueError("a rule needs a pattern over canonical names; '*' matches all")

    def matches(self, spec: TensorSpec) -> bool:
        """Whether the pattern matches a tensor by its name or by one that it is tied to."""
        return any(fnmatchcase(n, self.pattern) for n in (spec.name, *spec.aliases))


def require_used(rules: Sequence[QuantRule], specs: Iterable[TensorSpec]) -> None:
    """Refuse rules that ask for a formula and select no weight of the whole run: it would go out unquantised.

    Args:
        rules: As given to ``select``, which sees the weights of one rank only.
        specs: Every tensor of the run (all ranks'), as quantised exporters describe them.

    Raises:
        PlanError: Listing the rules, and whether earlier ones took all that they match.
    """
    used: set[int] = set()
    taken: set[int] = set()
    for spec in specs:
        if spec.group and not spec.name.endswith((".weight", PACKED)):
            continue  # made beside the codes of a weight, of a name that no rule was given
        source = replace(spec, name=spec.name.removesuffix("_packed")) if spec.name.endswith(PACKED) else spec
        matching = [k for k, r in enumerate(rules) if r.matches(source)]
        used.update(matching[:1])
        taken.update(matching[1:])
    idle = [
        f"{r.pattern!r} ({r.formula}{', all it matches is taken by rules before it' if k in taken else ''})"
        for k, r in enumerate(rules)
        if r.formula and k not in used
    ]
    if idle:
        raise PlanError(
            f"{len(idle)} quantisation rules select no weight of the run: {'; '.join(idle[:20])}. What they were meant for "
            "would be published unquantised: correct the patterns, which are matched against canonical names, or leave the "
            "rules out"
        )
