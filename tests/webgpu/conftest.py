"""Everything here needs a Vulkan driver; without one each test is skipped with the reason."""

from __future__ import annotations

import pytest

from tests import vulkan


@pytest.fixture(autouse=True, scope="session")
def vulkan_driver() -> None:
    if reason := vulkan.why_not():
        pytest.skip(reason)
