"""`ortgraph` and `ortgraph fetch`, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ortgraph.cli.fetch import PACKAGE
from ortgraph.server import ROOT

WHEEL = "nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_x86_64.whl"


def ortgraph(*arguments: str, wheels: Path) -> subprocess.CompletedProcess[str]:
    """Run the command where pip sees the wheels of one folder and nothing else."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "ortgraph", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_help_lists_the_commands_and_shows_examples(tmp_path: Path):
    done = ortgraph("--help", wheels=tmp_path)
    assert done.returncode == 0
    assert "serve" in done.stdout
    assert "fetch" in done.stdout
    assert "Example: ortgraph serve" in ortgraph("serve", "--help", wheels=tmp_path).stdout


def test_a_second_fetch_downloads_nothing(tmp_path: Path):
    done = ortgraph("fetch", "--folder", str(ROOT / ".triton"), wheels=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fetch_without_a_network_says_so_and_leaves_nothing(tmp_path: Path):
    target = tmp_path / "made" / "triton"
    done = ortgraph("fetch", "--folder", str(target), wheels=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot download {PACKAGE}: ")
    assert done.stderr.endswith("check the network and pip's index\n")
    assert list(target.parent.iterdir()) == []


def test_a_wheel_with_another_hash_is_refused_and_the_old_server_stays(tmp_path: Path):
    wheels, target = tmp_path / "wheels", tmp_path / "triton"
    wheels.mkdir()
    (wheels / WHEEL).write_bytes(b"not the wheel that was pinned")
    target.mkdir()
    (target / "fetched.txt").write_text("another version\n")
    done = ortgraph("fetch", "--folder", str(target), wheels=wheels)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert (target / "fetched.txt").read_text() == "another version\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["triton", "wheels"]
