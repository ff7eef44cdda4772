"""What Triton's log says, and its HTTP interface does not: loading so far, configs it cannot read, why it ended.

Triton opens its ports only when every model is loaded or refused, so that until then only the log tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOADING = re.compile(r'"loading: (.+):(\d+)"')
_ENDED = re.compile(r"\"(successfully loaded|failed to load) '([^']+)'( version \d+)?")
_NOT_TRIED = re.compile(r"\"(?:Poll failed for model directory|failed to load model) '([^']+)': (.*)\"$")
_PARSE_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)$")
# Triton 24.10 then waits for ever for a stub that has ended.
_STUCK = re.compile(r"(?:Failed to preinitialize Python stub: |triton_python_backend_stub: )(.*)$", re.M)
_ERROR_LINE = re.compile(
    r"^(E\d{4} |\[libprotobuf ERROR|error: )|unrecognized option|error while loading shared libraries"
)


@dataclass(frozen=True)
class ModelState:
    """A model version as the server reports it: state is READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


def first_line(reason: str) -> str:
    """Triton's reason without its own prefixes and the stub's stack: one line."""
    line = next((line for line in reason.splitlines() if line.strip()), "")
    for prefix in ("Internal: ", "Invalid argument: ", "TritonModelException: "):
        line = line.removeprefix(prefix)
    return line.strip()


def loading_states(log: str) -> list[ModelState]:
    """Each model version that began to load, and whether it has ended; the reason comes later, from the server."""
    versions: dict[str, str] = dict(_LOADING.findall(log))
    ended = {name: "READY" if how.startswith("success") else "UNAVAILABLE" for how, name, _ in _ENDED.findall(log)}
    return [ModelState(name, version, ended.get(name, "LOADING"), "") for name, version in versions.items()]


def models_not_tried(log: str) -> dict[str, str]:
    """Why Triton did not even try to load a model, by model; with the place in its config where the log says so.

    Such a model has no state in the server's answers, or is missing there.
    """
    found, place = {}, ""
    for line in log.splitlines():
        if parse_error := _PARSE_ERROR.search(line):
            place = f" ({parse_error[1]})"
        elif not_tried := _NOT_TRIED.search(line):
            found[not_tried[1]] = first_line(not_tried[2]) + place
            place = ""
    return found


def stuck_reason(log: str) -> str:
    """Why Triton waits for ever for a Python model, or "" where it does not."""
    found = _STUCK.search(log)
    if not found:
        return ""
    remedy = "mend the model or remove its folder"
    if "libpython" in found[1]:
        remedy = "install this Python's shared library (libpython3.x), or use a Python that has it (make PYTHON=...)"
    return f"{found[1].strip()}; {remedy}"


def last_error(log: str) -> str:
    """The last line that is an error, without its time and place in Triton's source."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    line = (errors or lines or ["it said nothing"])[-1]
    return line.split("] ", 1)[-1].strip(' "\t')[:300]
