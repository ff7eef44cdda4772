"""What can be said of the container files without a Docker engine."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from ortgraph.server import ROOT

DOCKER = ROOT / "docker"
PYTHON = {"26.07": "3.12"}  # of the official image, by its release


def instructions(name: str) -> list[list[str]]:
    lines = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [line.split()[1:] for line in lines if line.split()[:1] == [name]]


def test_everything_that_is_copied_exists_and_is_not_ignored():
    allowed = [
        line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    sources = [source for parts in instructions("COPY") for source in parts[:-1]]
    assert "src" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == rule or source.startswith(f"{rule}/") for rule in allowed), source


def test_the_images_python_is_one_we_support():
    (image,) = instructions("FROM")[0]
    release = re.fullmatch(r"nvcr\.io/nvidia/tritonserver:(\d\d\.\d\d)-py3", image)
    assert release
    assert PYTHON[release[1]] in ("3.11", "3.12", "3.13")


def test_the_serving_packages_are_complete_and_those_of_the_lock():
    """requirements.txt is what pin.py makes, and holds all that the package needs to serve."""
    before = (DOCKER / "requirements.txt").read_text()
    pinned = set(re.findall(r"^([a-z0-9-]+)==", before, re.M))
    subprocess.run([sys.executable, str(DOCKER / "pin.py")], check=True)
    assert (DOCKER / "requirements.txt").read_text() == before
    needed, seen = ["onnxruntime-gpu", "numpy", "cuda-bindings"], set()
    while needed:
        name = needed.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed.append(requirement.name.lower().replace("_", "-"))
    assert seen <= pinned, seen - pinned


def test_compose_has_both_profiles_with_what_triton_needs():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert {service["profiles"][0] for service in services.values()} == {"cpu", "gpu"}
    for service in services.values():
        assert service["shm_size"] == "1gb"
        assert service["ulimits"] == {"memlock": -1, "stack": 64 << 20}
        assert service["healthcheck"]["test"][-1].endswith("/v2/health/ready")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert (
            DOCKER / service["build"]["context"] / service["build"]["dockerfile"]
        ).resolve() == DOCKER / "Dockerfile"
    devices = services["triton-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
    assert "deploy" not in services["triton-cpu"]


def test_the_backend_lies_where_triton_looks_for_it():
    target = next(Path(parts[-1]) for parts in instructions("COPY") if parts[0].startswith("backends/"))
    assert target == Path("/opt/tritonserver/backends/ortgraph/model.py")
