"""The ``megasync`` command with empty names, as an unset variable of a shell gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megasync.tools.cli import main


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["apply", "{v0}", "--sink", "{s}", "--out", ""], "--out is empty, expected a new directory"),
        (["apply", "", "--sink", "{s}", "--out", "{o}"], "BASE_DIR is empty, expected a checkpoint's"),
        (["apply", "{v0}", "--sink", "", "--out", "{o}"], "the sink is empty, expected a directory or a URL"),
        (["apply", "{v0}", "--sink", "{s}", "--out", "{o}", "--run", ""], "--run is empty, expected a run's name"),
        (["diff", "", "{v1}", "--sink", "{s}"], "BASE_DIR is empty"),
        (["diff", "{v0}", "", "--sink", "{s}"], "NEW_DIR is empty"),
        (["diff", "{v0}", "{v1}", "--sink", ""], "the sink is empty"),
        (["diff", "{v0}", "{v1}", "--sink", "{s}", "--run", ""], "--run is empty"),
        (["inspect", ""], "the sink is empty"),
        (["verify", ""], "the sink is empty"),
        (["inspect", "{s}", "--run", ""], "--run is empty"),
        (["verify", "{s}", "--run", ""], "--run is empty"),
    ],
)
def test_an_empty_name_is_a_wrong_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    words: str,
) -> None:
    """An empty path is no working directory: here that is one where each of these calls would find something."""
    here = tmp_path / "here"
    here.mkdir()
    save_file({"w": torch.zeros(300)}, here / "model.safetensors")
    monkeypatch.chdir(here)
    for version in range(2):
        (tmp_path / f"v{version}").mkdir()
        save_file({"w": torch.arange(300.0) + version}, tmp_path / f"v{version}" / "model.safetensors")
    places = {"v0": tmp_path / "v0", "v1": tmp_path / "v1", "s": tmp_path / "s", "o": tmp_path / "o"}
    calls = [a.format(**places) for a in argv]
    assert main(calls) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err
    status = main([*calls, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (status, said["error"]) == (2, "ValueError")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "v0", "v1"]
    assert [p.name for p in here.iterdir()] == ["model.safetensors"]
