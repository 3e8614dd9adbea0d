"""Quantised export over real ranks: shards and replicas give the bytes of the whole weights, NaN stops every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megasync.errors import NonFiniteError, ReplicaDriftError
from megasync.quant import nvfp4
from megasync.quant.checkpoint import QuantRule
from megasync.quant.exchange import exchange_amax
from megasync.quant.formulas import formula
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import make_plan
from megasync.trainer.quantised import QuantisedExporter
from megasync.trainer.regions import match_regions
from megasync.trainer.replicas import check_replicas, check_sources
from megasync.types import Box, TensorSpec
from tests.distributed.harness import run_ranks
from tests.golden.quant_inputs import bell

SHAPES = {
    "m.self_attn.q_proj.weight": (512, 256),
    "m.self_attn.k_proj.weight": (128, 256),
    "m.self_attn.v_proj.weight": (128, 256),
    "m.self_attn.o_proj.weight": (256, 512),
}
RULE = QuantRule("*", "nvfp4/te-2d")


def _weights() -> dict[str, torch.Tensor]:
    return {
        n: torch.from_numpy(bell(*shape, seed) * 0.02 * (seed + 1)).to(torch.bfloat16)
        for seed, (n, shape) in enumerate(SHAPES.items())
    }


def _shard(shape: tuple[int, int], name: str, tp: int) -> Box:
    """Half of the rows, or of the columns of the row-parallel projection."""
    rows, columns = shape
    if "o_proj" in name:
        return Box((0, tp * columns // 2), (rows, columns // 2))
    return Box((tp * rows // 2, 0), (rows // 2, columns))


class ShardExporter(Exporter):
    """One of two tensor-parallel shards of the weights."""

    def __init__(self, tp: int) -> None:
        self._pieces = []
        for name, w in _weights().items():
            box = _shard(SHAPES[name], name, tp)
            at = tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))
            self._pieces.append(Piece(name, box, w[at].clone()))

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(n, "BF16", s, cut="last" if "o_proj" in n else "row") for n, s in SHAPES.items()]

    def pieces(self) -> list[Piece]:
        return self._pieces


def _owned(exporter: QuantisedExporter, rank: int) -> list[Piece]:
    """What the real ownership plan gives this rank, and the regions that masking would read."""
    schema, holdings = exchange("run", exporter, dist.group.WORLD)
    plan = make_plan(schema, holdings)
    pieces = exporter.own(plan.owned(rank).named_boxes(), schema.tensors)
    regions = match_regions(schema, plan, rank, pieces)
    assert len(regions) == len(pieces)
    report = check_replicas(schema, holdings, exporter.pieces(), dist.group.WORLD)
    assert report.num_unread > 0  # quantised bytes lie with their owner alone
    sources = check_sources("run", exporter, dist.group.WORLD)
    assert sources is not None
    assert sources.num_boxes > 0
    assert sources.num_unread == 0
    return pieces


def _export(rank: int, world_size: int) -> tuple[list[tuple[str, Box, torch.Tensor]], float, float]:
    exporter = QuantisedExporter(ShardExporter(rank % 2), [RULE], group=dist.group.WORLD)
    owned = _owned(exporter, rank)
    took = exporter.settle()
    return [(p.name, p.box, p.data.clone()) for p in owned], took, exporter.exchange_s


def _one_rank_has_nan(rank: int, world_size: int) -> str:
    inner = ShardExporter(rank % 2)
    exporter = QuantisedExporter(inner, [RULE], group=dist.group.WORLD)
    owned = _owned(exporter, rank)
    if rank == 1:
        name = next(p.name for p in owned if p.name.endswith(".weight"))
        # A NaN that this rank is the only one to look at, since only the owner of the codes reads the weights.
        piece = next(p for p in inner.pieces() if p.name == name)
        piece.data.fill_(float("nan"))
    with pytest.raises(ReplicaDriftError, match=r"ranks? 1 "):  # the check of replicas sees it in the sources
        check_sources("run", exporter, dist.group.WORLD)
    with pytest.raises(NonFiniteError) as caught:
        exporter.settle()
    return str(caught.value)


def _reduce(rank: int, world_size: int) -> list[float]:
    values = torch.tensor([float(rank), 3.0 - rank, float("nan") if rank == 2 else 0.5, 0.0])
    reduced, took = exchange_amax(values, dist.group.WORLD)
    assert took > 0
    return reduced.tolist()


def test_shards_and_replicas_give_the_bytes_of_the_whole(tmp_path: Path) -> None:
    results = run_ranks(_export, 4, tmp_path)
    f = formula(RULE.formula)
    weights = _weights()
    got: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for pieces, took, exchange_s in results:
        assert 0 < exchange_s <= took
        for name, box, data in pieces:
            rows, columns = SHAPES[name.removesuffix("_scale").removesuffix("_scale_2")]
            width = {"t": columns // 2, "e": columns // 16, "2": 0}[name[-1]]
            shape = (rows, width) if width else ()
            at = tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))
            got.setdefault(name, torch.zeros(shape, dtype=data.dtype))[at] = data
            seen.setdefault(name, torch.zeros(shape, dtype=torch.int32))[at] += 1
    names = list(SHAPES)
    for group in (names[:3], names[3:]):
        amax = torch.stack([nvfp4.amax(weights[n]) for n in group]).amax()
        for name in group:
            q = nvfp4.quantize(weights[name], amax, f)
            assert torch.equal(got[name], q.codes)
            assert torch.equal(got[name + "_scale"], q.scales)
            assert (seen[name] == 1).all()
            assert (seen[name + "_scale"] == 1).all()
            assert torch.equal(got[name + "_scale_2"], q.global_scale)
            assert int(seen[name + "_scale_2"]) == 1


def test_nan_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    texts = run_ranks(_one_rank_has_nan, 4, tmp_path)
    assert len(set(texts)) == 1
    assert "NaN or infinity" in texts[0]


def test_exchange_is_max_and_nan_becomes_infinity(tmp_path: Path) -> None:
    for result in run_ranks(_reduce, 3, tmp_path):
        assert result == [2.0, 3.0, float("inf"), 0.0]
    alone, took = exchange_amax(torch.tensor([1.0, float("nan")]), None)
    assert alone.tolist() == [1.0, float("inf")]
    assert took == 0.0
