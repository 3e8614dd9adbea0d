"""Naming tables, as data: from Megatron's global keys to Hugging Face checkpoint names.

A rule maps one key pattern to the canonical tensors that lie in it and says how their rows are laid out. The Megatron
adapter looks every leaf of ``sharded_state_dict()`` up here, before anything is planned; names_hf.py holds the tables
of model families. Tables are plain values: ``LLAMA.extended(Rule(...))`` is a new one. Imports no torch, no Megatron.

Patterns are Megatron's own keys with ``{layer}`` after ``layers.`` and ``{expert}`` after ``experts.experts.``. In the
names, ``{layer}`` is the Hugging Face layer: the global one, or ``num_layers + i`` in MTP layer ``i``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megasync.types import CutAxis

Rows = Literal["plain", "qkv", "gated", "vocab", "latent"]
"""How the canonical tensors lie in the rows (axis 0) of the global Megatron tensor.

plain
    One tensor, the same rows.
qkv
    Per query group: the query rows of its heads, then one head of key rows, then one of value rows.
gated
    The named tensors one after the other, in equal parts (gate, up).
vocab
    Rows beyond the real vocabulary are padding, which no checkpoint has.
latent
    One tensor; a fused MLA down projection may claim tensor-parallel shards where every rank holds all rows.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One key pattern and the canonical tensors in it.

    Attributes:
        key: Megatron's global key, with ``{layer}`` and ``{expert}`` for the indices.
        names: Canonical names, in the order of their rows; none for a leaf that no checkpoint has.
        rows: How they lie in the rows.
        cut: Which axis the tile grid bands first: the one that engines shard.
    """

    key: str
    names: tuple[str, ...]
    rows: Rows = "plain"
    cut: CutAxis = "row"

    def __post_init__(self) -> None:
        if self.rows == "qkv" and len(self.names) != 3:
            raise ValueError(
                f"rule {self.key}: qkv rows hold 3 tensors (query, key, value), {len(self.names)} are named"
            )
        if self.rows in ("plain", "vocab", "latent") and len(self.names) > 1:
            raise ValueError(f"rule {self.key}: {self.rows} rows hold one tensor, {len(self.names)} are named")


@dataclass(frozen=True, slots=True)
class Key:
    """A global key, taken apart.

    Attributes:
        pattern: The key with placeholders for its indices.
        layer: Index after ``layers.``, or None.
        expert: Index after ``experts.experts.``, or None.
        part: 0 or 1 where Megatron stores the halves of a gated tensor under keys of their own (``_w``, ``_v``).
    """

    pattern: str
    layer: int | None = None
    expert: int | None = None
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a key leads.

    Attributes:
        names: Canonical names, in the order of their rows.
        rows: How they lie in the rows of this very leaf.
        cut: Cut axis of their tile grids.
        layer: Hugging Face layer, -1 for none.
    """

    names: tuple[str, ...]
    rows: Rows
    cut: CutAxis
    layer: int


@dataclass(frozen=True)
class NameTable:
    """The rules of a model family.

    Attributes:
        name: For messages and configuration.
        rules: Later rules win over earlier ones with the same pattern.
        embedding: Megatron's key of the word embedding.
        tied_output: Canonical name that a tied embedding also has, "" for none.
        mtp_embedding: Name of the embedding's copy in an MTP layer, as some checkpoints store it, "" for none.
        mtp_output: Name of the output layer's copy in an MTP layer, "" for none.
        zero_centered_norms: Checkpoints of the family store norm weights minus one, as Megatron may hold them.
        keep_global_names: Tensors that no rule maps keep Megatron's global name and layout instead of being refused.
    """

    name: str
    rules: tuple[Rule, ...]
    embedding: str = "embedding.word_embeddings.weight"
    tied_output: str = "lm_head.weight"
    mtp_embedding: str = ""
    mtp_output: str = ""
    zero_centered_norms: bool = False
    keep_global_names: bool = False

    def extended(self, *rules: Rule, name: str = "") -> NameTable:
        """A table with more rules, which win over those it has.

        Args:
            *rules: Rules to add.
            name: Name of the new table; the old one's with ``+`` when empty.

        Returns:
            The new table.
        """
        return replace(self, rules=(*self.rules, *rules), name=name or f"{self.name}+")

    def find(self, key: Key, num_layers: int) -> Target | None:
        """Where a key leads.

        Args:
            key: The key, taken apart.
            num_layers: Decoder layers of the model, without MTP layers.

        Returns:
            The target, with no names for a leaf to leave out; None when no rule fits.
        """
        rule = self._by_pattern.get(key.pattern)
        if rule is None:
            if not self.keep_global_names:
                return None
            suffix = ("", "_w", "_v")[0 if key.part is None else 1 + key.part]
            rule = Rule(key.pattern + suffix, (key.pattern + suffix,), cut=_usual_cut(key.pattern))
            key = replace(key, part=None)
        layer = -1 if key.layer is None else key.layer
        if layer >= 0 and key.pattern.startswith("mtp.") and not self.keep_global_names:
            layer += num_layers
        names = tuple(n.format(layer=layer, expert=key.expert) for n in rule.names)
        if key.part is None or not names:
            return Target(names, rule.rows, rule.cut, layer)
        if rule.rows != "gated" or key.part >= len(names):
            return None
        return Target((names[key.part],), "plain", rule.cut, layer)

    def aliases(self, num_layers: int, num_mtp_layers: int, tied: bool) -> dict[str, tuple[str, ...]]:
        """Further checkpoint names of the embedding and the output layer.

        Args:
            num_layers: Decoder layers, without MTP layers.
            num_mtp_layers: MTP layers.
            tied: The output layer shares the embedding.

        Returns:
            Canonical name to its aliases; only names that have some.
        """
        if self.keep_global_names:
            return {}
        mtp = range(num_layers, num_layers + num_mtp_layers)
        embedding = [self.mtp_embedding.format(layer=i) for i in mtp if self.mtp_embedding]
        output = [self.mtp_output.format(layer=i) for i in mtp if self.mtp_output]
        if tied:
            embedding = [n for n in (self.tied_output,) if n] + embedding + output
            output = []
        found = self._by_pattern.get(self.embedding)
        names = ((found.names[0] if found and found.names else "", embedding), (self.tied_output, output))
        return {name: tuple(others) for name, others in names if name and others}

    @cached_property
    def _by_pattern(self) -> dict[str, Rule]:
        return {r.key: r for r in self.rules}


def take_apart(key: str, axes: Iterable[int] = ()) -> Key | None:
    """Take a global key apart: replace its indices, wherever Megatron keeps them, by placeholders.

    Layer and expert index stand in the key, or in leading axes of the tensor when Megatron stacks equal layers.

    Args:
        key: Global key of a leaf.
        axes: Offsets on the leaf's leading axes, which are indices and no part of the local tensor.

    Returns:
        The parts; None when a leading axis is neither a layer nor an expert.
    """
    offsets = list(axes)
    pattern: list[str] = []
    layer: int | None = None
    expert: int | None = None
    segments = key.split(".")
    for at, segment in enumerate(segments):
        before = segments[at - 1] if at else ""
        after_experts = before == "experts" and at > 1 and segments[at - 2] == "experts"
        if segment.isdecimal() and before == "layers" and layer is None:
            layer = int(segment)
        elif segment.isdecimal() and after_experts and expert is None:
            expert = int(segment)
        else:
            if before == "layers" and layer is None and offsets:
                layer = offsets.pop(0)
                pattern.append("{layer}")
            elif after_experts and expert is None and offsets:
                expert = offsets.pop(0)
                pattern.append("{expert}")
            pattern.append(segment)
            continue
        pattern.append("{layer}" if before == "layers" else "{expert}")
    if offsets:
        return None
    part = {"_w": 0, "_v": 1}.get(pattern[-1][-2:]) if pattern[-1][:-2] in ("weight", "bias") else None
    if part is not None:
        pattern[-1] = pattern[-1][:-2]
    return Key(".".join(pattern), layer, expert, part)


def _usual_cut(pattern: str) -> CutAxis:
    """Row-parallel projections are banded along their columns."""
    return "last" if pattern.endswith(("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")) else "row"


PASSTHROUGH = NameTable("passthrough", (), zero_centered_norms=True, keep_global_names=True)
"""Every tensor keeps Megatron's global name, rows and values, padding included; layers and experts are split up."""
