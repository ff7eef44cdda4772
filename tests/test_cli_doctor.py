"""`ortgraph doctor`: a sound set-up has no failure, and what goes wrong for people is found with its mend."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from typer.testing import CliRunner

from ortgraph.cli import app
from ortgraph.cli.doctor import Finding, _cuda_pool, _Need, _shared_memory, _unused_regions
from ortgraph.cli.proposal import instance_kind
from ortgraph.server import ROOT
from tests import toys
from tests.toys import F32, model

TRITON = ROOT / ".triton"


def run(*arguments: str) -> tuple[int, list[Finding]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert done.stderr == ""
    said = json.loads(done.stdout)
    findings = [Finding(**finding) for finding in said["findings"]]
    assert said["ok"] == (done.exit_code == 0)
    assert all(finding.mend for finding in findings if finding.level != "ok")
    return done.exit_code, findings


def about(findings: list[Finding], topic: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings if finding.topic == topic]


def repository(folder: Path, **models: tuple[str, onnx.ModelProto | None]) -> Path:
    for name, (config, made) in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if made is not None:
            toys.save(made, folder / name / "1")
    return folder


def server_folder(folder: Path, stub: bytes | None = None) -> Path:
    """The fetched server's files, linked one by one, with another stub."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tritonserver").symlink_to(TRITON / "bin" / "tritonserver")
    (folder / "lib").symlink_to(TRITON / "lib")
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    (folder / "backends" / "ortgraph").symlink_to(ROOT / "backends" / "ortgraph")
    target = backend / "triton_python_backend_stub"
    if stub is None:
        target.symlink_to(TRITON / "backends" / "python" / "triton_python_backend_stub")
    else:
        target.write_bytes(stub)
        target.chmod(0o755)
    return folder


def test_this_set_up_is_sound(tmp_path: Path) -> None:
    code, findings = run("-m", str(repository(tmp_path, toy=('backend: "ortgraph"', toys.encoder()))))
    assert code == 0, findings
    assert {finding.topic for finding in findings} >= {"packages", "GPU", "Triton", "stub", "model toy", "/dev/shm"}
    ((level, text),) = about(findings, "model toy")
    assert level == "ok"
    assert text.startswith("loads in ")


def test_the_text_ends_in_a_count(tmp_path: Path) -> None:
    bad = repository(tmp_path, broken=('backend: "ortgraph"', None))
    done = CliRunner().invoke(app, ["doctor", "-m", str(bad)])
    assert done.exit_code == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("failure"))
    assert line.split(None, 1)[1].startswith("model broken")
    assert "there is no file" in line
    assert done.stdout.splitlines()[-1].startswith("1 failures, ")


def newer_opset() -> onnx.ModelProto:
    node = helper.make_node("Neg", ["x"], ["y"])
    opset = [helper.make_opsetid("", 99)]
    return model([node], [("x", F32, ["n"])], [("y", F32, ["n"])], opset_imports=opset)


@pytest.mark.parametrize(
    ("config", "made", "said"),
    [
        ('backend: "ortgraph"', newer_opset(), "re-export the model with an older opset"),
        ('backend: "ortgraph"', None, "there is no file"),
        ('backend: "ortgraph" max_batch_size: 4', toys.grid(), "set max_batch_size: 0"),
        ('backend: "ortgraph" name: "other"', toys.affine(), "config.pbtxt names it 'other', but its folder is 'toy'"),
        ('backend: "ortgraph" instance_group [ { kind: KIND_GPU } ]', toys.affine(), "no usable NVIDIA GPU"),
        ('backend: "ortgraph" parameters { key: "bucket" value: { string_value: "n=1" } }', toys.affine(),
         "did you mean 'buckets'?"),
        ("backend: ortgraph", toys.affine(), "is not a config.pbtxt: 1:10"),
    ],
)  # fmt: skip
def test_a_model_that_will_not_load(tmp_path: Path, config: str, made: onnx.ModelProto | None, said: str) -> None:
    if "KIND_GPU" in config and instance_kind() == "GPU":
        pytest.skip("there is a GPU here")
    code, findings = run("-m", str(repository(tmp_path, toy=(config, made))))
    ((level, text),) = about(findings, "model toy")
    assert (code, level) == (1, "failure")
    assert said in text


def test_other_peoples_models_are_left_alone(tmp_path: Path) -> None:
    code, findings = run("-m", str(repository(tmp_path, theirs=('backend: "tensorrt"', None))))
    assert code == 0
    assert about(findings, "model theirs") == [("ok", "backend 'tensorrt': not ours, not looked at")]


def test_a_queue_policy_that_makes_the_batcher_pause_is_a_warning(tmp_path: Path) -> None:
    config = """backend: "ortgraph" max_batch_size: 4 dynamic_batching {
        default_queue_policy { max_queue_size: 8 } }"""
    code, findings = run("-m", str(repository(tmp_path, toy=(config, toys.affine()))))
    assert code == 0
    assert any(level == "warning" and "pause up to 500 ms" in text for level, text in about(findings, "model toy"))


def test_there_is_no_server(tmp_path: Path) -> None:
    code, findings = run("--triton", str(tmp_path))
    assert code == 1
    assert about(findings, "Triton") == [("failure", f"there is no bin/tritonserver in {tmp_path}")]


def test_a_stub_for_another_python(tmp_path: Path) -> None:
    """The most common of all: Triton's stub and the packages of different Pythons."""
    code, findings = run("--triton", str(server_folder(tmp_path / "triton", b"...libpython3.8.so.1.0...")))
    ((level, text),) = about(findings, "stub")
    assert (code, level) == (1, "failure")
    assert text.startswith("Triton's stub is built for Python 3.8, but the packages are Python 3.")


def test_a_stub_that_does_not_start(tmp_path: Path) -> None:
    script = b"#!/bin/sh\necho 'error while loading shared libraries: libb64.so.0d: cannot open' >&2\nexit 127\n"
    code, findings = run("--triton", str(server_folder(tmp_path / "triton", script)))
    ((level, text),) = about(findings, "stub")
    assert (code, level) == (1, "failure")
    assert "libb64.so.0d" in text


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    folder = server_folder(tmp_path / "triton")
    program = folder / "bin" / "tritonserver"
    program.unlink()
    shutil.copy(TRITON / "bin" / "tritonserver", program)  # a link would find the libraries beside what it points to
    (folder / "lib").unlink()
    code, findings = run("--triton", str(folder))
    assert code == 1
    assert any("the server does not start: " in text and "cannot open" in text for _, text in about(findings, "Triton"))


def test_a_server_without_our_backend(tmp_path: Path) -> None:
    folder = server_folder(tmp_path / "triton")
    (folder / "backends" / "ortgraph").unlink()
    code, findings = run("--triton", str(folder))
    assert code == 1
    assert ("failure", "the backend 'ortgraph' is not among the server's backends") in about(findings, "Triton")


def test_an_old_release_is_a_warning(tmp_path: Path) -> None:
    """server-8448: the fetched release; a newer container's is fine."""
    _, findings = run()
    assert about(findings, "Triton") == [
        ("warning", "release 24.10 can hang at very high concurrency (server issue 8448)")
    ]
    environment = {**os.environ, "NVIDIA_TRITON_SERVER_VERSION": "26.07"}
    command = [sys.executable, "-m", "ortgraph", "doctor", "--json", "--triton", str(server_folder(tmp_path / "new"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = [Finding(**finding) for finding in json.loads(done.stdout)["findings"]]
    assert about(found, "Triton") == [("ok", "release 26.07")]


def test_few_open_files_are_a_warning() -> None:
    command = ["bash", "-c", f"ulimit -n 512; exec {sys.executable} -m ortgraph doctor --json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [Finding(**finding) for finding in json.loads(done.stdout)["findings"]]
    assert about(found, "open files") == [("warning", "at most 512, so fewer connections than that")]


def test_memory_of_a_server_that_was_killed_is_found() -> None:
    """server-7481: regions stay in /dev/shm when a server is killed. One that a process maps is not among them."""
    left, used = (Path(f"/dev/shm/ortgraph_{os.getpid()}_test_of_doctor_{kind}") for kind in ("left", "used"))
    for region in (left, used):
        region.write_bytes(bytes(8192))
    try:
        with used.open("rb") as file, mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_READ):
            found = _unused_regions(Path("/dev/shm"))
            _, findings = run()
        assert left in found
        assert used not in found
        finding = next(finding for finding in findings if "that no process here uses" in finding.text)
        assert finding.level == "warning"
        assert f"/dev/shm/ortgraph_{os.getpid()}_*" in finding.mend
    finally:
        left.unlink()
        used.unlink()


def need(instances: int, batch_bytes: int, kind: str = "CPU") -> Any:
    return _Need("toy", kind, instances, batch_bytes, batch_bytes)


def test_shared_memory_and_the_cuda_pool_against_what_models_need() -> None:
    """server-3678, server-7148: too little /dev/shm; outputs that fill the CUDA pool come back empty."""
    sizes = os.statvfs("/dev/shm")
    free = sizes.f_frsize * sizes.f_bavail
    assert [f.level for f in _shared_memory([need(1, 1000)]) if "no process" not in f.text] == ["ok"]
    assert [f.level for f in _shared_memory([need(1, free * 3 // 4)]) if "no process" not in f.text] == ["warning"]
    assert [f.level for f in _shared_memory([need(2, free)]) if "no process" not in f.text] == ["failure"]
    assert list(_cuda_pool([need(9, 1 << 40)])) == []
    assert [f.level for f in _cuda_pool([need(2, 1 << 20, "GPU")])] == ["ok"]
    (found,) = _cuda_pool([need(2, 40 << 20, "GPU")])
    assert (found.level, found.mend) == (
        "warning",
        f"start Triton with --cuda-memory-pool-byte-size=0:{160 << 20}",
    )


def test_a_repository_that_is_none(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "-m", str(tmp_path / "gone")])
    assert (done.exit_code, done.stderr) == (1, f"error: model repository {tmp_path / 'gone'} is not a folder\n")
