"""The ``megasync`` command on checkpoints on disk, through its own entry point."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megasync.tools.cli import main
from megasync.types import Box
from megasync.versions.checkpoint import Checkpoint, header_bytes

DTYPES: list[tuple[str, str, tuple[int, ...]]] = [
    ("a.f32", "F32", (33, 5)),
    ("a.f64", "F64", (7,)),
    ("a.i64", "I64", (300, 41)),
    ("a.bool", "BOOL", (19,)),
    ("a.f8", "F8_E4M3", (64, 65)),
    ("a.f8b", "F8_E5M2", (3, 4, 5, 6)),
    ("a.e8", "F8_E8M0", (128,)),
    ("a.bf16", "BF16", (1003, 257)),
    ("a.f16", "F16", (2, 2)),
    ("a.u16", "U16", (9,)),
    ("a.u32", "U32", (9,)),
    ("a.u64", "U64", (9,)),
    ("a.c64", "C64", (9,)),
    ("a.f4", "F4", (6, 32)),
    ("a.scalar", "F32", ()),
    ("a.empty", "BF16", (0, 8)),
    ("model.layers.3.mlp.down_proj.weight", "BF16", (256, 4096)),
]
BITS = {
    "F4": 4,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "U32": 32,
}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * BITS.get(dtype, 64) // 8


def write(path: Path, seed: int, changed: float = 0.0) -> None:
    """Every dtype in two files; ``changed`` of the bytes differ from the seed's."""
    path.mkdir()
    rng = np.random.default_rng(seed)
    flips = np.random.default_rng(seed + 1000)
    index: dict[str, str] = {}
    for part, tensors in enumerate((DTYPES[:9], DTYPES[9:])):
        name = f"model-{part + 1:05d}-of-00002.safetensors"
        data = b""
        for tensor, dtype, shape in tensors:
            raw = rng.integers(0, 2 if dtype == "BOOL" else 256, nbytes(dtype, shape), dtype=np.uint8)
            chosen = flips.random(len(raw)) < changed
            raw[chosen] ^= 1
            data += raw.tobytes()
            index[tensor] = name
        header = header_bytes([(t, d, s, nbytes(d, s)) for t, d, s in tensors], {"format": "pt"})
        (path / name).write_bytes(header + data)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text("{}")


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    status = main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


def same(a: Path, b: Path) -> bool:
    return all((a / f.name).read_bytes() == f.read_bytes() for f in b.iterdir())


@pytest.mark.parametrize("codec", ["sparse", "snappy+zstd", "auto"])
def test_case_74_every_dtype_round_trips_through_diff_and_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    write(tmp_path / "v0", 0)
    write(tmp_path / "v1", 0, 0.01)
    write(tmp_path / "v2", 0, 0.7)
    sink = tmp_path / "sink"
    for base, new, version in (("v0", "v1", 1), ("v1", "v2", 2)):
        status, result = run(capsys, "diff", tmp_path / base, tmp_path / new, "--sink", sink, "--codec", codec)
        assert status == 0
        assert (result["version"], result["base_version"]) == (version, version - 1)
    status, result = run(capsys, "apply", tmp_path / "v0", "--sink", sink, "--out", tmp_path / "out2")
    assert (status, result["version"], result["num_applied"]) == (0, 2, 2)
    assert same(tmp_path / "out2", tmp_path / "v2")
    status, result = run(capsys, "apply", tmp_path / "v0", "--sink", sink, "--out", tmp_path / "out1", "--version", 1)
    assert status == 0
    assert same(tmp_path / "out1", tmp_path / "v1")
    status, result = run(capsys, "apply", tmp_path / "out1", "--sink", sink, "--out", tmp_path / "again")
    assert (status, result["base_version"]) == (0, 1)
    assert same(tmp_path / "again", tmp_path / "v2")
    status, report = run(capsys, "verify", sink)
    assert (status, report["good"], report["runs"][0]["versions"]) == (0, True, [0, 1, 2])
    status, facts = run(capsys, "inspect", sink)
    assert [v["what"] for v in facts["runs"][0]["versions"]] == ["checkpoint", "delta", "delta"]
    assert main(["inspect", str(sink)]) == 0
    assert "payload_nbytes" in capsys.readouterr().out


def test_the_same_checkpoint_gives_an_empty_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "v0", 0)
    status, result = run(capsys, "diff", tmp_path / "v0", tmp_path / "v0", "--sink", tmp_path / "s")
    assert (status, result["version"], result["num_changed"], result["payload_nbytes"]) == (0, 1, 0, 0)
    status, result = run(capsys, "apply", tmp_path / "v0", "--sink", tmp_path / "s", "--out", tmp_path / "o")
    assert status == 0
    assert same(tmp_path / "o", tmp_path / "v0")


def test_a_wrong_base_is_refused_with_both_roots_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        write(tmp_path / f"v{i}", 0, i * 0.01)
    run(capsys, "diff", tmp_path / "v0", tmp_path / "v1", "--sink", tmp_path / "s")
    status, result = run(capsys, "diff", tmp_path / "v0", tmp_path / "v2", "--sink", tmp_path / "s")
    assert (status, result["error"]) == (1, "BaseMismatchError")
    status, result = run(capsys, "apply", tmp_path / "v2", "--sink", tmp_path / "s", "--out", tmp_path / "o")
    assert (status, result["error"]) == (1, "BaseMismatchError")
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize("what", ["flip", "cut", "gone"])
def test_damaged_payloads_are_found_and_never_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    write(tmp_path / "v0", 0)
    write(tmp_path / "v1", 0, 0.01)
    run(capsys, "diff", tmp_path / "v0", tmp_path / "v1", "--sink", tmp_path / "s")
    (payload,) = (tmp_path / "s").rglob("payload-*")
    payload.chmod(0o644)
    data = bytearray(payload.read_bytes())
    if what == "flip":
        data[len(data) // 2] ^= 4
        payload.write_bytes(data)
    elif what == "cut":
        payload.write_bytes(data[:-1])
    else:
        payload.unlink()
    status, report = run(capsys, "verify", tmp_path / "s")
    assert status == 1
    assert report["runs"][0]["faults"]
    status, _ = run(capsys, "apply", tmp_path / "v0", "--sink", tmp_path / "s", "--out", tmp_path / "o")
    assert status != 0
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["diff", "{v0}", "{other}", "--sink", "{s}"], 1, "not one model"),
        (["diff", "{v0}", "{nothing}", "--sink", "{s}"], 1, "no safetensors files"),
        (["diff", "{v0}", "{v0}", "--sink", "{s}", "--run", "../x"], 2, "run name"),
        (["apply", "{v0}", "--sink", "{s}", "--out", "{v0}"], 1, "exists"),
        (["apply", "{v0}", "--sink", "{s}", "--out", "{o}"], 1, "no publication"),
        (["verify", "{s}"], 2, "holds no run"),
        (["inspect", "ftp://x"], 2, "ftp"),
    ],
)
def test_wrong_calls_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], status: int, message: str
) -> None:
    write(tmp_path / "v0", 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "s").mkdir()
    save_file({"x": torch.zeros(3)}, tmp_path / "other" / "model.safetensors")
    places = {n: tmp_path / n for n in ("v0", "other", "nothing", "s", "o")}
    found, result = run(capsys, *(a.format(**places) for a in argv))
    assert found == status
    assert message in result["message"]


def test_wrong_flags_exit_with_2() -> None:
    for argv in ([], ["diff"], ["nonsense"], ["diff", "a", "b", "--sink", "s", "--codec", "zip"]):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2


def test_broken_safetensors_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "v0", 0)
    for i, damage in enumerate(
        (lambda d: d[:-1], lambda d: d[:4], lambda d: b"\xff" * 8 + d[8:], lambda d: d[:20] + b"x" + d[21:])
    ):
        broken = tmp_path / f"b{i}"
        shutil.copytree(tmp_path / "v0", broken)
        file = broken / "model-00001-of-00002.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        status, result = run(capsys, "diff", tmp_path / "v0", broken, "--sink", tmp_path / "s")
        assert status == 1, result
    (tmp_path / "v0" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../v1/x.safetensors"}}')
    status, result = run(capsys, "diff", tmp_path / "v0", tmp_path / "v0", "--sink", tmp_path / "s")
    assert "not in the directory" in result["message"]


def test_boxes_of_a_checkpoint_are_views_of_the_file(tmp_path: Path) -> None:
    data = torch.arange(6 * 10 * 7, dtype=torch.int32).reshape(6, 10, 7)
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "x": data}, tmp_path / "m.safetensors")
    with Checkpoint(tmp_path) as c:
        box = c.box("x", Box((2, 3, 1), (3, 4, 5)))
        np.testing.assert_array_equal(box, data[2:5, 3:7, 1:6].numpy().view(np.uint32))
        assert not box.flags.writeable


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from megasync.tools.cli import main
status = main(sys.argv[1:])
# Not ru_maxrss: that survives exec, so it would tell of the process that started this one.
high = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
print("peak", int(high.split()[1]) * 1024)
sys.exit(status)
"""


@pytest.mark.timeout(300)
def test_case_62_65_eight_gigabytes_under_a_limit_of_one(tmp_path: Path) -> None:
    """A tensor above 4 GiB and 8 GB in all, as sparse files; the process may not even map more than 1 GiB."""
    tensors = [("big", "U8", (5 << 30,), 5 << 30), ("layers.0.w", "BF16", (48, 32768, 1024), 3 << 30)]
    header = header_bytes(tensors)
    for name in ("v0", "v1"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as f:
            f.write(header)
            f.truncate(len(header) + (8 << 30))
    places = np.random.default_rng(0).integers(0, 8 << 30, 5000)
    places[0], places[1] = (5 << 30) - 1, 8 * (1 << 30) - 1
    with (tmp_path / "v1" / "model.safetensors").open("r+b") as f:
        for at in np.unique(places).tolist():
            f.seek(len(header) + at)
            f.write(b"\x5a")
    environment = {"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    for argv in (
        ["diff", tmp_path / "v0", tmp_path / "v1", "--sink", tmp_path / "s"],
        ["apply", tmp_path / "v0", "--sink", tmp_path / "s", "--out", tmp_path / "out"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, *map(str, argv)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.rsplit("peak", 1)[1]) < 400 << 20, done.stdout
    with (
        (tmp_path / "out" / "model.safetensors").open("rb") as a,
        (tmp_path / "v1" / "model.safetensors").open("rb") as b,
    ):
        for at in places[:200].tolist():
            a.seek(len(header) + at)
            b.seek(len(header) + at)
            assert a.read(1) == b.read(1) == b"\x5a"
