"""What the benchmark of real deltas counts, against hand-made states; and its rows, on a training run of a few steps."""

from __future__ import annotations

import json
from dataclasses import replace
from math import comb, log2
from pathlib import Path

import numpy as np
import pytest

from launch.bench.bench_deltas import ALL_CODECS, MODELS, starts
from launch.bench.bench_payload import CODECS, PayloadBench, cases, published_nbytes
from launch.bench.deltas import BLOCK_NBYTES, amax_moves, changed_tiles, facts_of, keep, kept
from launch.bench.payload_cases import INPUTS, real_case
from launch.bench.report_deltas import HEADER, lines, phases
from launch.bench.report_rows import Results
from launch.bench.rows import RowWriter, read_rows
from launch.compose import compose
from megasync.codecs.dense import BLOCK_NBYTES as CODEC_BLOCK_NBYTES
from megasync.schema import make_schema
from megasync.types import WORD_DTYPES, TensorSpec
from megasync.versions.changes import cut_frames, mask_frame
from megasync.versions.encode import encode

ID, GROUP = "nvfp4/modelopt-1d@1", "layers.0.proj"
SPECS = [
    TensorSpec("norm", "BF16", (100,)),
    TensorSpec("layers.0.big.weight", "BF16", (3000, 512), 0),
    TensorSpec(f"{GROUP}.weight", "U8", (4, 16), 0, formula=ID, group=GROUP),
    TensorSpec(f"{GROUP}.weight_scale", "F8_E4M3", (4, 2), 0, formula=ID, group=GROUP),
    TensorSpec(f"{GROUP}.weight_scale_2", "F32", (), 0, formula=ID, group=GROUP),
]
SCHEMA = make_schema("bench", SPECS)


def states() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    old = {t.name: rng.integers(1, 200, t.shape).astype(WORD_DTYPES[t.word_nbytes]) for t in SCHEMA.tensors}
    return old, {n: np.array(w) for n, w in old.items()}


def by_id(words: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [words[t.name] for t in SCHEMA.tensors]


def test_facts_of_a_hand_made_delta() -> None:
    old, new = states()
    big = new["layers.0.big.weight"]
    big[0, :3] ^= 1  # a byte of each differs
    big[0, 3] ^= 0x0101  # both bytes
    big[2999, 511] ^= 1
    new["norm"][7] ^= 2
    new[f"{GROUP}.weight"][1, 4] ^= 0x10
    found = facts_of(SCHEMA, by_id(old), by_id(new))
    num_bf16 = 100 + 3000 * 512
    nbytes = 2 * num_bf16 + 64 + 8 + 4
    assert (found.nbytes, found.num_words, found.num_changed) == (nbytes, num_bf16 + 64 + 8 + 1, 7)
    assert found.words_ratio == 7 / found.num_words
    assert found.density == 8 / nbytes
    # BF16: six of n positions, values 1 (four times), 0x0101 and 2; U8: one of 64 positions, one value.
    value_bits = -(4 * log2(4 / 6) + 2 * log2(1 / 6))
    bits = log2(comb(num_bf16, 6)) + value_bits + log2(64)
    assert found.bound_nbytes == pytest.approx(bits / 8, rel=1e-9)


def test_segments_blocks_and_pages_are_counted_in_tiles() -> None:
    old, new = states()
    grid = SCHEMA.grids[SCHEMA.ids["layers.0.big.weight"]]
    words = grid.tile_words(np.arange(grid.num_tiles)).astype(int)
    num_segments = 4 + sum(-(-n // 65_536) for n in words)  # the four small tensors have one each
    num_blocks = 4 + sum(-(-2 * n // CODEC_BLOCK_NBYTES) for n in words)
    num_pages = 4 + sum(-(-2 * n // 4096) for n in words)
    new["layers.0.big.weight"][0] ^= 1  # 512 words: one segment, one block, a quarter of a page
    found = facts_of(SCHEMA, by_id(old), by_id(new))
    assert BLOCK_NBYTES == CODEC_BLOCK_NBYTES
    assert found.segments_ratio == pytest.approx(1 / num_segments)
    assert found.blocks_ratio == pytest.approx(1 / num_blocks)
    assert found.pages_ratio == pytest.approx(1 / num_pages)
    assert found.segment_changed == (0, 0, 0)
    new["layers.0.big.weight"][...] ^= 3
    for name in ("norm", f"{GROUP}.weight", f"{GROUP}.weight_scale", f"{GROUP}.weight_scale_2"):
        new[name] ^= 1
    full = facts_of(SCHEMA, by_id(old), by_id(new))
    assert (full.segments_ratio, full.blocks_ratio, full.pages_ratio, full.words_ratio) == (1, 1, 1, 1)
    whole = [65_536] * sum(words // 65_536) + [n % 65_536 for n in words if n % 65_536] + [100, 64, 8, 1]
    assert full.segment_changed == tuple(np.percentile(whole, (50, 20, 80)))


def test_an_unchanged_state_has_no_delta() -> None:
    old, new = states()
    found = facts_of(SCHEMA, by_id(old), by_id(new))
    assert (found.num_changed, found.density, found.bound_nbytes, found.blocks_ratio) == (0, 0, 0, 0)
    assert list(changed_tiles(SCHEMA, by_id(old), by_id(new))) == []


def test_amax_moves_are_counted_by_block() -> None:
    old, new = states()
    codes, scales = new[f"{GROUP}.weight"], new[f"{GROUP}.weight_scale"]
    codes[0, 0] ^= 1  # block (0, 0): codes only, two bytes
    codes[0, 7] ^= 1
    codes[1, 8] ^= 1  # block (1, 1): codes and scale
    scales[1, 1] ^= 1
    scales[3, 0] ^= 1  # block (3, 0): scale only
    found = amax_moves(SCHEMA, by_id(old), by_id(new))
    assert found is not None
    assert (found.codes_only_ratio, found.both_ratio, found.scale_only_ratio) == (1 / 8, 1 / 8, 1 / 8)
    assert (found.scales_ratio, found.codes_ratio, found.globals_ratio) == (2 / 8, 3 / 64, 0)
    new[f"{GROUP}.weight_scale_2"] ^= 1
    again = amax_moves(SCHEMA, by_id(old), by_id(new))
    assert again == replace(found, globals_ratio=1.0)
    plain = make_schema("bench", SPECS[:2])
    words = [old[t.name] for t in plain.tensors]
    assert amax_moves(plain, words, words) is None


def test_kept_masks_come_back(tmp_path: Path) -> None:
    old, new = states()
    new["layers.0.big.weight"][5, ::7] ^= 0x0103
    new[f"{GROUP}.weight_scale_2"] ^= 0x01020304
    keep(tmp_path / "real_x_y.npz", SCHEMA, by_id(old), by_id(new))
    schema, masks = kept(tmp_path / "real_x_y.npz")
    assert schema.digest == SCHEMA.digest
    for a, b, mask in zip(by_id(old), by_id(new), masks, strict=True):
        assert np.array_equal(a ^ b, mask)
    case = real_case(tmp_path / "real_x_y.npz")
    assert case.name == "real x y"
    for _ in range(2):  # equal at every call, in the tiles of the delta itself
        found = [(t.tensor_id, t.tile, t.positions.tolist(), (t.old ^ t.new).tolist()) for t in case.tiles()]
        changes = changed_tiles(SCHEMA, by_id(old), by_id(new))
        assert found == [(t.tensor_id, t.tile, t.positions.tolist(), (t.old ^ t.new).tolist()) for t in changes]
    assert case.bound_nbytes == pytest.approx(facts_of(SCHEMA, by_id(old), by_id(new)).bound_nbytes)


def test_the_inputs_are_real_cases_that_every_codec_carries() -> None:
    """Small enough for a repository; one of them through a codec, published and read back."""
    paths = sorted(INPUTS.glob("real_*.npz"))
    assert len(paths) >= 4
    assert sum(p.stat().st_size for p in paths) < 3_000_000
    (smallest,) = sorted(paths, key=lambda p: p.stat().st_size)[:1]
    case = real_case(smallest)
    frames = [mask_frame(case.schema, tiles) for tiles in cut_frames(case.schema, case.tiles())]
    payload, _ = published_nbytes(case.schema, encode(frames, "lz4+zstd"), "lz4+zstd", frames)
    assert case.bound_nbytes < payload < case.nbytes
    assert 0 < case.density < 0.01
    named = [c.name for c in cases(PayloadBench(nbytes=1 << 14, sweep=[], list_densities=[])) if c.name[:4] == "real"]
    assert named == [real_case(p).name for p in paths]
    assert all("bf16" in n or "nvfp4" in n for n in named)


def test_rows_of_other_cases_stay(tmp_path: Path) -> None:
    path = tmp_path / "payload-cpu.jsonl"
    with RowWriter(path, "payload") as out:
        first = out.add("A", nbytes_in=2, nbytes_out=1)
    with RowWriter(path, "payload", [first]) as out:
        out.add("real x", nbytes_in=2, nbytes_out=1)
        assert len(out.rows) == 1
    assert [r["case"] for r in read_rows(path)] == ["A", "real x"]


def test_deltas_of_a_phase_spread_over_it() -> None:
    assert starts(32, 16, 3) == [0, 8, 16]
    assert starts(32, 1, 3) == [0, 16, 31]
    assert starts(16, 16, 3) == [0]
    assert starts(8, 16, 3) == []


def test_models_of_the_benchmark_compose() -> None:
    for overrides in MODELS.values():
        assert compose(["parallel=single", *overrides]).parallel.ranks == 1


def delta_row(case: str, codec: str, ratio: float, **more: object) -> dict[str, object]:
    share = {"words_ratio": 0.01, "density": 0.005, "segment_p50": 3.0, "blocks_ratio": 1.0, "pages_ratio": 0.5}
    where = {"device": "d", "commit": "none", "stage": "deltas", "sample": 0}
    sizes = {"nbytes_in": 1000, "nbytes_out": 30, "bound_nbytes": 10.0, "payload_over_bound_ratio": ratio}
    return {"case": case, "codec": codec, **sizes, **share, **where, **more}


def test_the_table_shows_every_rate_once_and_every_span_at_the_lowest(tmp_path: Path) -> None:
    rows = []
    for model in ("wide", "moe"):
        for lr in (1e-4, 1e-6):
            for span in (1, 4):
                key = {"model": model, "export": "bf16", "lr": lr, "span": span}
                rows += [
                    delta_row(f"{model} {lr:g} {span}", c, r, **key) for c, r in (("sparse", 1.5), ("sparse", 1.1))
                ]
                rows += [delta_row(f"{model} {lr:g} {span}", "zstd", 2.0, **key)]
    (tmp_path / "deltas-cpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    results = Results(tmp_path)
    found = lines(results)
    assert [line[0] for line in found] == ["wide 0.0001 1", "wide 1e-06 1", "wide 1e-06 4", "moe 1e-06 1"]
    assert all(len(line) == len(HEADER) for line in found)
    assert found[0][1:] == ["1.000%", "0.500%", "3", "100%", "50%", "", "", "1.000", "3.000", "1.300", "2.000", "", ""]
    assert len(phases(results, model="moe", span=4)) == 2
    assert lines(Results(tmp_path / "none")) == []


def test_codecs_of_the_benchmark_end_with_the_rule() -> None:
    assert (*CODECS, "auto") == ALL_CODECS
