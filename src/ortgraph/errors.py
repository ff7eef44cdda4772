"""Every error of the package, each with the Triton status a client gets.

    OrtgraphError
    ├── LoadError            the model does not become ready
    │   ├── ConfigError      a setting in config.pbtxt
    │   ├── ModelError       the ONNX file, or what ONNX Runtime says of it
    │   └── CaptureError     a bucket cannot be captured as a graph
    └── RequestError         this request alone gets an error; every other one its answer
        ├── InvalidRequest   INVALID_ARG
        ├── UnsupportedRequest  UNSUPPORTED
        ├── CancelledRequest CANCELLED
        └── RunError         INTERNAL (ONNX Runtime failed in a run)
            └── LostEngineError  UNAVAILABLE (the engine's process ended; the request may be sent again)

A message is one line: what it is about, the rule, the value got, what to change. Clients never see a traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class OrtgraphError(Exception):
    """Base of all errors raised on purpose by this package."""


class LoadError(OrtgraphError):
    """The model cannot be served; the message says what to change."""


class ConfigError(LoadError):
    """A setting of config.pbtxt breaks a rule."""


class ModelError(LoadError):
    """The ONNX model cannot be loaded or does not fit its config."""


class CaptureError(LoadError):
    """A bucket cannot be captured; it is served eager, or not at all when `graph_capture` is required."""


class RequestError(OrtgraphError):
    """One request is answered with an error of this Triton status."""

    status = "INTERNAL"


class InvalidRequest(RequestError):
    """The request breaks a rule of the model's inputs or outputs."""

    status = "INVALID_ARG"


class UnsupportedRequest(RequestError):
    """The request is well formed, but asks for what is not offered."""

    status = "UNSUPPORTED"


class CancelledRequest(RequestError):
    """The client cancelled before the request was copied in."""

    status = "CANCELLED"


class RunError(RequestError):
    """ONNX Runtime failed while it ran this request."""


class LostEngineError(RunError):
    """The engine's process ended while it had this request; nothing is wrong with the request."""

    status = "UNAVAILABLE"


# Where in ONNX Runtime's sources a check failed: file, line and C++ signature.
_CODE_PLACE = re.compile(
    r"/onnxruntime_src/\S+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)"
    r"(?: const)?(?: \[with [^\]]*\])?(?:::<lambda\([^)]*\)>)? ?"
)
_LOAD_PREFIX = re.compile(r"^Load model from .* failed:\s*")


def first_line(error: BaseException) -> str:
    """ONNX Runtime's message without its prefix, paths and stack: one line, at most 400 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    if text.endswith("Status Message:") and len(lines) > 1:
        text += " " + lines[1]
    text = _LOAD_PREFIX.sub("", _CODE_PLACE.sub("", text))
    return text if len(text) <= 400 else text[:397] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when a known name is near, else what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, 0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""
