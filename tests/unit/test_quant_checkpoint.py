"""Names, shapes, groups and box maps of quantised checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import PlanError
from megasync.quant.blocks import check_box
from megasync.quant.checkpoint import QuantRule, describe, fused_group, select
from megasync.quant.formulas import formula, known_ids
from megasync.quant.rules import require_used
from megasync.schema import make_schema
from megasync.tiles import tile_grid
from megasync.types import Box, TensorSpec


def _spec(name: str, shape: tuple[int, ...] = (256, 512), dtype: str = "BF16", **more: object) -> TensorSpec:
    return TensorSpec(name, dtype, shape, layer=3, **more)  # type: ignore[arg-type]


def _rows(spec: TensorSpec, rule: QuantRule) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], bool]]:
    return [
        (m.spec.name, m.spec.dtype, m.spec.shape, m.spec.block, m.spec.frozen) for m in describe(spec, rule).members
    ]


def test_modelopt_nvfp4_names_and_shapes() -> None:
    rule = QuantRule("*", "nvfp4/te-2d@1", "modelopt", input_scale=True)
    assert _rows(_spec("model.layers.3.mlp.down_proj.weight", cut="last"), rule) == [
        ("model.layers.3.mlp.down_proj.weight", "U8", (256, 256), (16, 8), False),
        ("model.layers.3.mlp.down_proj.weight_scale", "F8_E4M3", (256, 32), (16, 1), False),
        ("model.layers.3.mlp.down_proj.weight_scale_2", "F32", (), (), False),
        ("model.layers.3.mlp.down_proj.input_scale", "F32", (), (), True),
    ]
    members = describe(_spec("a.o_proj.weight", cut="last"), rule).members
    assert {m.spec.layer for m in members} == {3}
    assert {m.spec.cut for m in members} == {"last"}
    assert {m.spec.group for m in members} == {"a.o_proj"}
    assert [m.spec.formula for m in members] == ["nvfp4/te-2d@1"] * 3 + [""]


def test_compressed_tensors_nvfp4_names_and_shapes() -> None:
    rule = QuantRule("*", "nvfp4/compressed-tensors-1d@1", "compressed-tensors", input_scale=True)
    assert _rows(_spec("m.w1.weight"), rule) == [
        ("m.w1.weight_packed", "U8", (256, 256), (1, 8), False),
        ("m.w1.weight_scale", "F8_E4M3", (256, 32), (1, 1), False),
        ("m.w1.weight_global_scale", "F32", (1,), (), False),
        ("m.w1.input_global_scale", "F32", (1,), (), True),
    ]
    assert describe(_spec("m.w1.weight"), rule).reciprocal


def test_fp8_names_and_shapes() -> None:
    odd = _spec("m.kv_b_proj.weight", (200, 300))
    assert _rows(odd, QuantRule("*", "fp8/deepgemm-128@1", "deepseek")) == [
        ("m.kv_b_proj.weight", "F8_E4M3", (200, 300), (128, 128), False),
        ("m.kv_b_proj.weight_scale_inv", "F32", (2, 3), (1, 1), False),
    ]
    ue8m0 = QuantRule("*", "fp8/deepgemm-128-ue8m0@1", "deepseek", scale_dtype="F8_E8M0")
    assert _rows(odd, ue8m0)[1] == ("m.kv_b_proj.weight_scale_inv", "F8_E8M0", (2, 3), (1, 1), False)
    channel = QuantRule("*", "fp8/channel@1", "compressed-tensors")
    assert _rows(odd, channel)[1] == ("m.kv_b_proj.weight_scale", "F32", (200, 1), (1, 1), False)
    assert _rows(odd, channel)[0][3] == (1, 300)
    tensor = QuantRule("*", "fp8/tensor@1", "modelopt", input_scale=True)
    assert [r[:3] for r in _rows(odd, tensor)] == [
        ("m.kv_b_proj.weight", "F8_E4M3", (200, 300)),
        ("m.kv_b_proj.weight_scale", "F32", ()),
        ("m.kv_b_proj.input_scale", "F32", ()),
    ]


def test_fused_partners_share_a_group() -> None:
    prefix = "model.layers.0.self_attn"
    assert {fused_group(f"{prefix}.{p}_proj.weight") for p in "qkv"} == {f"{prefix}.q_proj+k_proj+v_proj"}
    expert = "model.layers.1.mlp.experts.5"
    assert fused_group(f"{expert}.gate_proj.weight") == fused_group(f"{expert}.up_proj.weight")
    assert fused_group(f"{expert}.gate_proj.weight") != fused_group("model.layers.1.mlp.experts.6.up_proj.weight")
    assert fused_group("e.w1.weight") == fused_group("e.w3.weight") != fused_group("e.w2.weight")
    assert fused_group("a.q_a_proj.weight") == fused_group("a.kv_a_proj_with_mqa.weight")
    assert fused_group("head.weight") == "head"
    block = QuantRule("*", "fp8/deepgemm-128@1", "deepseek")
    groups = {describe(_spec(f"{prefix}.{p}_proj.weight"), block).group for p in "qk"}
    assert len(groups) == 2  # block scales are each weight's own


def test_case_39_mixed_formats_and_case_50_dtypes_are_kept() -> None:
    specs = [
        _spec("model.layers.3.mlp.experts.0.gate_proj.weight"),
        _spec("model.layers.3.mlp.experts.0.up_proj.weight"),
        _spec("model.layers.3.mlp.experts.0.down_proj.weight"),
        _spec("model.layers.3.mlp.gate.weight"),
        _spec("model.layers.3.mlp.gate.e_score_correction_bias", (64,), "F32"),
        _spec("model.layers.3.self_attn.o_proj.weight"),
        _spec("model.layers.3.input_layernorm.weight", (512,)),
    ]
    rules = [
        QuantRule("*.experts.*.weight", "nvfp4/te-2d"),
        QuantRule("*.o_proj.weight", "fp8/deepgemm-128", "deepseek"),
    ]
    chosen = select(specs, rules)
    assert sorted(chosen) == sorted(s.name for s in specs[:3]) + [specs[5].name]
    assert chosen[specs[0].name].group == chosen[specs[1].name].group != chosen[specs[2].name].group
    assert {chosen[s.name].formula.id for s in specs[:3]} == {"nvfp4/te-2d@1"}


def test_first_rule_wins_and_frozen_tensors_stay() -> None:
    specs = [_spec("a.o_proj.weight"), _spec("vision.o_proj.weight", frozen=True), _spec("b.o_proj.weight")]
    rules = [QuantRule("b.*", ""), QuantRule("*.weight", "nvfp4/te-1d")]
    assert list(select(specs, rules)) == ["a.o_proj.weight"]


def test_case_34_fused_modules_must_take_one_formula() -> None:
    specs = [_spec("m.gate_proj.weight"), _spec("m.up_proj.weight"), _spec("m.down_proj.weight")]
    with pytest.raises(PlanError, match=r"m\.gate_proj\+up_proj must take one formula.*unquantised"):
        select(specs, [QuantRule("*.gate_proj.weight", "nvfp4/te-2d")])
    with pytest.raises(PlanError, match=r"must take one formula"):
        select(specs, [QuantRule("*.gate_proj.weight", "nvfp4/te-2d"), QuantRule("*.up_proj.weight", "nvfp4/te-1d")])
    shared = select(specs, [QuantRule("*_proj.weight", "nvfp4/te-2d")])
    assert shared["m.gate_proj.weight"].group == shared["m.up_proj.weight"].group == "m.gate_proj+up_proj"


def test_every_refusal_is_listed() -> None:
    specs = [
        _spec("a.o_proj.weight", (16, 40)),
        _spec("b.experts.down_proj", (8, 16, 32)),
        _spec("c.o_proj.weight", dtype="F32"),
        _spec("d.o_proj.weight", aliases=("lm_head.weight",)),
        _spec("e.bias", (16, 16)),
    ]
    with pytest.raises(PlanError) as caught:
        select(specs, [QuantRule("*", "nvfp4/te-1d")])
    text = str(caught.value)
    assert text.startswith("5 weights cannot be quantised as asked")
    for part in ("40 columns", "matrices", "fp32 masters", "tied to lm_head.weight", "e.bias does not end in .weight"):
        assert part in text
    with pytest.raises(PlanError, match="no names for nvfp4"):
        describe(_spec("a.weight"), QuantRule("*", "nvfp4/te-1d", "deepseek"))
    with pytest.raises(PlanError, match="no powers of two"):
        describe(_spec("a.weight"), QuantRule("*", "fp8/te-128", "deepseek", scale_dtype="F8_E8M0"))
    with pytest.raises(PlanError, match=r"exists from a\.weight_scale"):
        select([_spec("a.weight"), _spec("a.weight_scale", (3,))], [QuantRule("a.weight", "nvfp4/te-1d")])
    with pytest.raises(ValueError, match="unknown quantisation formula"):
        select([_spec("a.weight")], [QuantRule("*", "nvfp4/nothing")])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"checkpoint": "gguf"}, "checkpoint 'gguf' is none of 'modelopt', 'compressed-tensors', 'deepseek'"),
        ({"scale_dtype": "BF16"}, "scale_dtype 'BF16' is none of 'F32', 'F8_E8M0'"),
        ({"formula": "fp8/nothing"}, "unknown quantisation formula 'fp8/nothing'"),
        ({"pattern": ""}, "needs a pattern"),
    ],
)
def test_rules_with_misspelt_names_are_refused(more: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantRule(**{"pattern": "*", "formula": "fp8/tensor"} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize("id", ["fp8/channel", "fp8/tensor", "fp8/te-tensor", "nvfp4/te-1d"])
def test_deepseek_names_scales_of_blocks_only(id: str) -> None:
    with pytest.raises(PlanError, match="checkpoint 'deepseek' has no names for"):
        describe(_spec("a.weight"), QuantRule("*", id, "deepseek"))


def test_rule_that_matches_a_tied_name_is_not_silent() -> None:
    tied = _spec("embed.weight", aliases=("lm_head.weight",))
    with pytest.raises(PlanError, match=r"embed\.weight is tied to lm_head\.weight: leave tied"):
        select([tied], [QuantRule("lm_head*", "nvfp4/te-1d")])
    assert not select([tied], [QuantRule("lm_head*", ""), QuantRule("*", "nvfp4/te-1d")])


def test_rules_that_select_nothing_are_listed() -> None:
    sources = [
        _spec("a.o_proj.weight"),
        _spec("b.q_proj.weight"),
        _spec("vision.x.weight", frozen=True),
        _spec("lm_head.weight"),
    ]
    rules = [
        QuantRule("lm_head*", ""),
        QuantRule("*.q_proj.weight", "nvfp4/compressed-tensors-1d", "compressed-tensors"),
        QuantRule("a.*", "fp8/te-128", "deepseek"),
        QuantRule("vision*", "nvfp4/te-1d"),
        QuantRule("nothing*", ""),
    ]
    made = select(sources, rules)
    specs = [m.spec for s in sources if s.name in made for m in made[s.name].members]
    specs += [s for s in sources if s.name not in made]
    require_used(rules, specs)
    idle = [QuantRule("*_proj", "fp8/tensor"), QuantRule("*_scale*", "fp8/tensor"), QuantRule("a.o*", "fp8/channel")]
    with pytest.raises(PlanError) as caught:
        require_used([*rules, *idle], specs)
    text = str(caught.value)
    assert text.startswith("3 quantisation rules select no weight of the run: '*_proj' (fp8/tensor); ")
    assert "'a.o*' (fp8/channel, all it matches is taken by rules before it)" in text


_CHECKPOINT = {"fp8/channel@1": "compressed-tensors", "fp8/deepgemm-128@1": "deepseek"}


@settings(max_examples=30, deadline=None)
@given(
    id=st.sampled_from(known_ids()),
    rows=st.integers(1, 3000),
    columns=st.integers(1, 200),
    cut=st.sampled_from(["row", "last"]),
)
def test_tiles_of_every_member_are_aligned_boxes_of_the_source(id: str, rows: int, columns: int, cut: str) -> None:
    """Each member's tiles cover the weight once, at block multiples, and map back to themselves."""
    f = formula(id)
    shape = (rows, columns * 16)
    weight = describe(_spec("m.x.weight", shape, cut=cut), QuantRule("*", id, _CHECKPOINT.get(id, "modelopt")))  # type: ignore[arg-type]
    make_schema("run", [m.spec for m in weight.members])
    for member in weight.members:
        grid = tile_grid(member.spec)
        seen = np.zeros(shape, dtype=np.uint8)
        for tile in range(grid.num_tiles):
            box = grid.box(tile)
            region = weight.source_box(member, box)
            check_box(region, shape, f, "m.x.weight")
            assert weight.member_box(member, region) == (box if member.spec.shape else Box((), ()))
            seen[tuple(slice(a, a + n) for a, n in zip(region.start, region.extent, strict=True))] += 1
        assert (seen == 1).all()


def test_scalar_members_stand_for_the_whole_weight() -> None:
    weight = describe(_spec("m.x.weight"), QuantRule("*", "nvfp4/te-1d"))
    whole = weight.members[2]
    assert weight.source_box(whole, Box((0,), (1,))) == Box((0, 0), (256, 512))
    assert weight.member_box(whole, Box((16, 0), (16, 512))) == Box((), ())
    encoding = describe(_spec("m.x.weight"), QuantRule("*", "nvfp4/te-1d", "compressed-tensors"))
    assert encoding.member_box(encoding.members[2], Box((16, 0), (16, 512))) == Box((0,), (1,))
