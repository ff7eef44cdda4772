"""A Vulkan driver for the WebGPU tests: the machine's own where the plugin finds a GPU, else SwiftShader on the CPU."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import onnxruntime as ort

from ortgraph.errors import ModelError, first_line
from ortgraph.providers import webgpu
from tests import toys

SWIFTSHADER = tuple(Path(f"/usr/{lib}/chromium/vk_swiftshader_icd.json") for lib in ("lib", "lib64"))


def environment() -> dict[str, str]:
    """The variables that let the plugin take SwiftShader; nothing where it is not installed, or a driver is named."""
    found = next((path for path in SWIFTSHADER if path.is_file()), None)
    if found is None or "VK_DRIVER_FILES" in os.environ or Path("/dev/nvidiactl").exists():
        return {}
    return {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1", "VK_DRIVER_FILES": str(found)}


@cache
def why_not() -> str:
    """Why WebGPU cannot run here, one line; empty where it can. Sets the variables for this process."""
    os.environ.update(environment())
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        options.add_provider_for_devices([webgpu.find_device()], {})
        ort.InferenceSession(toys.affine().SerializeToString(), options, enable_fallback=0)
    except ModelError as error:
        return str(error)
    except Exception as error:
        return f"no Vulkan driver (Debian's libvulkan1 and chromium-common bring one): {first_line(error)}"
    return ""
