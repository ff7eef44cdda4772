"""Everything here needs an NVIDIA GPU; without one each test is skipped with the reason."""

from __future__ import annotations

import pytest


def _why_not() -> str:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return "cuda-bindings is not installed"
    code, count = runtime.cudaGetDeviceCount()
    return "" if int(code) == 0 and count > 0 else "no NVIDIA GPU on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if reason and "/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))
