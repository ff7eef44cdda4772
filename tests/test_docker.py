"""What can be said of the container files without a Docker engine."""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib.metadata import requires
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ortgraph.server import ROOT

DOCKER = ROOT / "docker"
PYTHON = {"26.07": "3.12"}  # of the official image, by its release


def instructions(name: str) -> list[list[str]]:
    """The words after each instruction of this name, without its own options."""
    lines = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [
        [word for word in line.split()[1:] if name == "RUN" or not word.startswith("--")]
        for line in lines
        if line.split()[:1] == [name]
    ]


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PYTHON[release[1]] in SpecifierSet(project["requires-python"])


def pins(path: Path) -> dict[tuple[str, str], frozenset[str]]:
    """Each pinned version, with its marker, to its hashes."""
    entries = re.split(r"\n(?=\S)", path.read_text().strip())
    return {
        (name, marker.strip()): frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry))
        for entry in entries
        for name, marker in re.findall(r"^([a-z0-9-]+==[^\s;]+)([^\\]*)", entry)
    }


def test_the_serving_packages_are_those_of_the_lock():
    locked, pinned = pins(ROOT / "requirements.lock"), pins(DOCKER / "requirements.txt")
    assert pinned
    assert all(pinned.values())
    assert pinned.items() <= locked.items()
    made = runpy.run_path(str(DOCKER / "pin.py"))["serving_pins"]((ROOT / "requirements.lock").read_text())
    assert (DOCKER / "requirements.txt").read_text() == made, "run: python docker/pin.py"


def test_the_serving_packages_are_complete():
    """With --require-hashes pip takes nothing that is not listed."""
    pinned = {name.split("==")[0] for name, _ in pins(DOCKER / "requirements.txt")}
    needed, seen = ["onnxruntime-gpu", "numpy", "cuda-bindings", "setuptools"], set()
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
        assert service["healthcheck"]["test"][:2] == ["CMD", "curl"]
        model = re.search(r"/v2/models/\$\{HEALTH_MODEL:-(\w+)}/ready$", service["healthcheck"]["test"][-1])
        assert model
        assert (ROOT / "model_repository" / model[1] / "config.pbtxt").is_file()
        assert service["stop_grace_period"]
        assert service["volumes"] == ["${MODELS:-../model_repository}:/models:ro"]
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


def test_the_packages_come_from_the_python_that_the_stub_takes():
    """The stub takes the packages of the first python3 on PATH: nothing is installed before the environment is that."""
    text = (DOCKER / "Dockerfile").read_text()
    folder = next(parts[-1] for parts in instructions("RUN") if "venv" in parts)
    assert 0 < text.index(f"ENV PATH={folder}/bin:$PATH") < text.index("pip install")


def test_the_server_does_not_run_as_root():
    assert instructions("USER")[-1] == ["triton-server"]
