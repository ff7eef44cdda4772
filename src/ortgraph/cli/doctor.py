"""`ortgraph doctor`: what must fit for the server to run and the models to load, each finding with its mend."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime as ort
import typer
from packaging.requirements import Requirement

from ..engine import Engine
from ..errors import LoadError, OrtgraphError
from ..server import START_TIMEOUT_S, Installation, ServerError
from . import pbtxt
from .console import console
from .files import CommandError, load_model, reported
from .inspect import memory_of, of_directory
from .progress import Step, steps
from .proposal import instance_kind

Repository = Annotated[
    Path | None,
    typer.Option("--model-repository", "-m", help="Also check that its models load, and what they need."),
]
Triton = Annotated[
    Path | None,
    typer.Option(help="The server's folder, with bin/, lib/ and backends/. By default the one that fetch made."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

OK, WARNING, FAILURE = "ok", "warning", "failure"
_FETCHED = {"nvidia-pytriton==0.7.0": (24, 10)}  # wheel -> Triton's release
_FIXED_IN = (25, 4)  # server issue 8448: a hang at high concurrency
_CUDA_VERSION = 13000  # what onnxruntime-gpu 1.27 and later are built for
_CUDA_POOL_BYTES = 64 << 20  # --cuda-memory-pool-byte-size
_SMALL_SHM_BYTES = 64 << 20  # Docker's default
_STUB_SHM_BYTES = 1 << 20  # shm-default-byte-size
_FEW_FILES = 4096
_OURS = "from ortgraph.backend import TritonPythonModel"
_REGION = re.compile(r"ortgraph_\d+_|triton_\w+_backend_shm_region_")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `level` is ok, warning or failure; `mend` says what to do where it is not ok."""

    topic: str
    level: str
    text: str
    mend: str = ""


@dataclass(frozen=True)
class _Need:
    """What a model's instances need: bytes of the largest batch's inputs and outputs, and of its outputs."""

    name: str
    kind: str
    instances: int
    batch_bytes: int
    outputs_bytes: int


def doctor(model_repository: Repository = None, triton: Triton = None, as_json: AsJson = False) -> None:
    """Check that everything fits; exit code 1 when something will fail. Example: ortgraph doctor -m my_models"""
    with reported():
        if model_repository is not None and not model_repository.is_dir():
            raise CommandError(f"model repository {model_repository} is not a folder")
        folders = sorted(path for path in (model_repository or Path("/nowhere")).glob("*") if path.is_dir())
        with steps(3 + len(folders)) as step:
            findings = _examine(folders, triton, step)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings], "ok": not _failures(findings)}))
    else:
        _show(findings)
    if _failures(findings):
        raise typer.Exit(1)


def _failures(findings: list[Finding]) -> int:
    return sum(finding.level == FAILURE for finding in findings)


def _examine(folders: list[Path], triton: Path | None, step: Step) -> list[Finding]:
    findings: list[Finding] = []
    step("packages")
    findings += _packages()
    step("GPU")
    findings += _gpu()
    step("Triton")
    installation, found = _triton(triton)
    findings += found
    has_old_stub = installation is not None and not _knows_numpy2(installation)
    needs = []
    for folder in folders:
        step(f"model {folder.name}")
        found, need = _model(folder, has_old_stub)
        findings += found
        needs += [need] if need else []
    findings += [*_shared_memory(needs), *_cuda_pool(needs), *_files()]
    return findings


def _packages() -> Iterator[Finding]:
    """This Python and the packages that the serving process takes from it, against what this version asks for."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("Python", FAILURE, f"{version} is not supported", "use Python 3.11, 3.12 or 3.13")
    wrong = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        wrong = list(_unfit("ortgraph", {""})) + list(_unfit("ortgraph", {"cli", "client"}, only_installed=True))
    for name, found, wanted in wrong:
        has = f"is {found}" if found else "is not installed"
        yield Finding("packages", FAILURE, f"{name} {has}, but {wanted} is needed", f"pip install '{name}{wanted}'")
    if not wrong:
        shown = f"Python {version}, onnxruntime {ort.__version__}, numpy {np.__version__}"
        yield Finding("packages", OK, f"{shown}, tritonclient {_version('tritonclient')}")
    twins = [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)]
    if len(twins) == 2:
        mend = "pip uninstall both, then pip install onnxruntime-gpu"
        yield Finding("packages", FAILURE, "onnxruntime and onnxruntime-gpu overwrite each other's files", mend)


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _unfit(package: str, extras: set[str], *, only_installed: bool = False) -> Iterator[tuple[str, str, str]]:
    """(name, version found or "", version wanted) of each requirement that is not met."""
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if requirement.name == package or (marker and not any(marker.evaluate({"extra": extra}) for extra in extras)):
            continue
        if not marker and "" not in extras:
            continue
        found = _version(requirement.name)
        if not (found or only_installed) or (found and not requirement.specifier.contains(found, prereleases=True)):
            yield requirement.name, found, str(requirement.specifier)


def _gpu() -> Iterator[Finding]:
    """The NVIDIA driver and libraries: whether they can carry ONNX Runtime's CUDA provider."""
    if "microsoft" in Path("/proc/version").read_text().lower():
        mend = "clients on this machine use system shared memory instead"
        yield Finding("GPU", WARNING, "WSL has no CUDA IPC: CUDA shared memory of clients cannot be registered", mend)
    if not any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")):
        yield Finding("GPU", OK, "no NVIDIA GPU here: models run on the CPU (or on WebGPU where asked for)")
        return
    try:
        driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        driver.cuDriverGetVersion(ctypes.byref(found))
    except OSError:
        mend = "install the driver's libcuda.so.1; in a container start it with --gpus all"
        yield Finding("GPU", FAILURE, "there is an NVIDIA GPU, but no libcuda.so.1", mend)
        return
    shown = f"{found.value // 1000}.{found.value % 1000 // 10}"
    if found.value < _CUDA_VERSION:
        mend = "update the driver to 580 or newer"
        yield Finding("GPU", FAILURE, f"the driver knows CUDA {shown}, onnxruntime {ort.__version__} needs 13", mend)
        return
    wrong = [f"{name}{wanted}" for name, _, wanted in _unfit("onnxruntime-gpu", {"cuda", "cudnn"})]
    if not _version("cuda-bindings"):
        wrong.append("cuda-bindings>=13,<14")
    if instance_kind() == "GPU" and (reason := _why_no_cuda_session()) == "":
        yield Finding("GPU", OK, f"the driver knows CUDA {shown}, and ONNX Runtime's CUDA provider opens")
        return
    reason = reason if instance_kind() == "GPU" else "no device can be used"
    mend = f"pip install {' '.join(map(repr, wrong))}" if wrong else "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    yield Finding("GPU", FAILURE, f"ONNX Runtime's CUDA provider does not open: {reason}", mend)


def _why_no_cuda_session() -> str:
    """Open a model of one node on the CUDA provider; what went wrong, or an empty string."""
    from onnx import parser

    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        content = model.SerializeToString()
        session = ort.InferenceSession(content, options, providers=["CUDAExecutionProvider"], enable_fallback=0)
    except Exception as error:
        return str(error).splitlines()[0][:200]
    return "" if "CUDAExecutionProvider" in session.get_providers() else "its libraries cannot be loaded"


def _triton(folder: Path | None) -> tuple[Installation | None, list[Finding]]:
    """The server's files: they start, their stub fits this Python, and the release is known to be sound."""
    try:
        installation = Installation.find()
        if folder is not None:
            installation = Installation(folder / "bin" / "tritonserver", folder / "lib", folder / "backends")
            if not installation.program.is_file():
                raise ServerError(f"there is no bin/tritonserver in {folder}")
    except ServerError as error:
        return None, [Finding("Triton", FAILURE, str(error), "ortgraph fetch, or name a server's folder with --triton")]
    found = []
    libraries = (installation.libraries, sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH"))
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(str(path) for path in libraries if path)}
    said = _said([str(installation.program), "--help"], env)
    if "Usage" not in said:
        mend = "it needs glibc 2.35 or newer and the libraries beside it; ortgraph fetch --force unpacks them anew"
        found.append(Finding("Triton", FAILURE, f"the server does not start: {_last(said)}", mend))
    found += [*_stub(installation, env), *_release(installation)]
    if not (installation.backends / "ortgraph" / "model.py").is_file():
        mend = f"copy this project's backends/ortgraph to {installation.backends}"
        found.append(Finding("Triton", FAILURE, "the backend 'ortgraph' is not among the server's backends", mend))
    return installation, found


def _said(command: list[str], env: dict[str, str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def _last(said: str) -> str:
    return (said.strip().splitlines() or ["it says nothing"])[-1][:200]


def _stub(installation: Installation, env: dict[str, str]) -> Iterator[Finding]:
    stub = installation.backends / "python" / "triton_python_backend_stub"
    ours = ".".join(map(str, sys.version_info[:2]))
    if not stub.is_file():
        yield Finding(
            "stub", FAILURE, f"there is no Python backend in {installation.backends}", "ortgraph fetch --force"
        )
        return
    built_for = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    version = built_for[1].decode() if built_for else "?"
    if built_for and version != ours:
        text = f"Triton's stub is built for Python {version}, but the packages are Python {ours}'s"
        mend = "run 'ortgraph fetch --force' with this Python, or install the packages for the stub's"
        yield Finding("stub", FAILURE, text, mend)
        return
    said = _said([str(stub)], env)
    if "Expected" not in said:
        mend = f"install this Python's shared library (libpython{ours}.so.1.0)"
        yield Finding("stub", FAILURE, f"Triton's stub does not start: {_last(said)}", mend)
        return
    if np.__version__.startswith("1.") or _knows_numpy2(installation):
        yield Finding("stub", OK, f"Python {version}, as here, and numpy {np.__version__} fits it")
        return
    text = f"this stub was built before numpy 2 (here {np.__version__}): models with BYTES tensors are refused"
    yield Finding("stub", WARNING, text, "pip install 'numpy<2', or use a newer Triton")


def _knows_numpy2(installation: Installation) -> bool:
    stub = installation.backends / "python" / "triton_python_backend_stub"
    return stub.is_file() and b"numpy._core" in stub.read_bytes()


def _release(installation: Installation) -> Iterator[Finding]:
    root = installation.program.parent.parent
    stamp = root / "fetched.txt"
    release = _FETCHED.get(stamp.read_text().split()[0]) if stamp.is_file() else None
    named = re.fullmatch(r"(\d\d)\.(\d\d)", os.environ.get("NVIDIA_TRITON_SERVER_VERSION", ""))
    if release is None and named:
        release = (int(named[1]), int(named[2]))
    if release is None:
        yield Finding("Triton", OK, f"the server in {root} starts; its release is not known")
    elif release < _FIXED_IN:
        text = f"release {release[0]}.{release[1]:02} can hang at very high concurrency (server issue 8448)"
        yield Finding("Triton", WARNING, text, "use 25.04 or newer in production")
    else:
        yield Finding("Triton", OK, f"release {release[0]}.{release[1]:02}")


def _model(folder: Path, has_old_stub: bool) -> tuple[list[Finding], _Need | None]:
    """Load the model as the serving process would: config, opset, tensors, preflight, captures; and its needs."""
    topic = f"model {folder.name}"
    try:
        config, file = of_directory(folder)
        if config.backend != "ortgraph" and not _has_our_script(file.parent):
            return [Finding(topic, OK, f"backend '{config.backend or config.platform}': not ours, not looked at")], None
        load_model(file, with_data=False)
        if config.name not in ("", folder.name):
            raise CommandError(
                f"config.pbtxt names it '{config.name}', but its folder is '{folder.name}'; make them equal"
            )
        kinds = {group.Kind.Name(group.kind) for group in config.instance_group}
        kind = "GPU" if "KIND_GPU" in kinds else "CPU" if kinds == {"KIND_CPU"} else instance_kind()
        settings = pbtxt.settings(config, file, kind=kind, version=file.parent.name)
        start = time.perf_counter()
        engine = Engine.load(settings)
        load_s = time.perf_counter() - start
        try:
            buckets = memory_of(engine)
            specs = engine.signature.inputs + engine.signature.outputs
            notes = [*settings.notes, *engine.findings.notes]
        finally:
            engine.close()
    except (OrtgraphError, LoadError) as error:
        return [Finding(topic, FAILURE, str(error), f"as it says; 'ortgraph inspect {folder}' shows more")], None
    found = [Finding(topic, OK, f"loads in {load_s:.1f} s (Triton's stub-timeout-seconds does not limit that)")]
    if load_s > START_TIMEOUT_S / 2:
        text = f"it loads in {load_s:.0f} s, and 'ortgraph serve' waits {START_TIMEOUT_S:.0f} s for all models"
        found = [Finding(topic, WARNING, text, "give fewer bucket sizes; start-up probes must wait as long")]
    if has_old_stub and not np.__version__.startswith("1.") and any(spec.dtype.is_string for spec in specs):
        text = "it has BYTES tensors, which this stub cannot carry with numpy 2"
        found.append(Finding(topic, FAILURE, text, "pip install 'numpy<2', or use a newer Triton"))
    if settings.notes:
        found.append(Finding(topic, WARNING, notes[0], "as it says"))
    instances = sum(max(group.count, 1) for group in config.instance_group) or 1
    batch = max((bucket.inputs_bytes + (bucket.outputs_bytes or 0) for bucket in buckets), default=0)
    outputs = max((bucket.outputs_bytes or 0 for bucket in buckets), default=0)
    return found, _Need(folder.name, kind, instances, batch, outputs)


def _has_our_script(version: Path) -> bool:
    script = version / "model.py"
    return script.is_file() and _OURS in script.read_text(encoding="utf-8")


def _shared_memory(needs: list[_Need]) -> Iterator[Finding]:
    """/dev/shm against what the stubs and the largest batches need, and what ended servers left there."""
    shm = Path("/dev/shm")
    sizes = os.statvfs(shm)
    total, free = sizes.f_frsize * sizes.f_blocks, sizes.f_frsize * sizes.f_bavail
    need = sum(need.instances * (_STUB_SHM_BYTES + need.batch_bytes) for need in needs)
    said = f"{_mb(free)} of {_mb(total)} free" + (f"; the models take up to {_mb(need)}" if needs else "")
    mend = "docker run --shm-size=1g (or --ipc=host); in Kubernetes an emptyDir with medium Memory"
    if need > free:
        yield Finding("/dev/shm", FAILURE, said, mend)
    elif total <= _SMALL_SHM_BYTES or 2 * need > free:
        yield Finding("/dev/shm", WARNING, f"{said}; regions grow and never shrink", mend)
    else:
        yield Finding("/dev/shm", OK, said)
    unused = _unused_regions(shm)
    if unused:
        used = sum(path.stat().st_blocks * 512 for path in unused)
        text = f"{len(unused)} regions ({_mb(used)}) that no process here uses: of servers that were killed"
        names = " ".join(sorted({f"{shm}/{_REGION.match(path.name)[0]}*" for path in unused}))  # type: ignore[index]
        yield Finding("/dev/shm", WARNING, text, f"with no server running, in no container either: rm {names}")


def _unused_regions(shm: Path) -> list[Path]:
    """The shared memory of Python stubs, this user's, that no process maps."""
    regions = [path for path in shm.iterdir() if _REGION.match(path.name) and path.stat().st_uid == os.getuid()]
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            mapped |= set(re.findall(rf"{shm}/(\S+)", maps.read_text(errors="replace")))
    return [path for path in regions if path.name not in mapped]


def _cuda_pool(needs: list[_Need]) -> Iterator[Finding]:
    """The server's CUDA memory pool; only where there is a GPU."""
    need = sum(need.instances * need.outputs_bytes for need in needs if need.kind == "GPU")
    if need > _CUDA_POOL_BYTES:
        pool = _mb(_CUDA_POOL_BYTES)
        text = f"outputs take up to {_mb(need)}, the default pool {pool}; when full, tensors on the GPU come back empty"
        yield Finding("CUDA pool", WARNING, text, f"start Triton with --cuda-memory-pool-byte-size=0:{2 * need}")
    elif need:
        yield Finding("CUDA pool", OK, f"outputs take up to {_mb(need)} of {_mb(_CUDA_POOL_BYTES)}")


def _files() -> Iterator[Finding]:
    """Each client's connection is an open file of the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEW_FILES:
        more = f"ulimit -n {hard}" if hard > soft else "raise the limit (docker run --ulimit nofile=65536)"
        yield Finding(
            "open files", WARNING, f"at most {soft}, so fewer connections than that", f"{more} before the server"
        )
    else:
        yield Finding("open files", OK, f"at most {soft}")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.0f} KiB"


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.topic) for finding in findings)
    styles = {OK: "green", WARNING: "yellow", FAILURE: "red"}
    for finding in findings:
        console.print(f"[{styles[finding.level]}]{finding.level:<8}[/]", end="")
        console.print(f"{finding.topic:<{width}}  {finding.text}", markup=False)
        if finding.mend:
            console.print(f"{'':<8}{'':<{width}}  mend: {finding.mend}", markup=False)
    failures, warnings = _failures(findings), sum(finding.level == WARNING for finding in findings)
    console.print(f"{failures} failures, {warnings} warnings")
