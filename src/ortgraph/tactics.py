"""Which M ONNX Runtime profiles its weight-only matrix products for, before anything is captured.

With `ep.cuda.fpa_intb_gemm` the CUDA provider picks a tactic for each M (the product of all dims of the activation but
its last) from those it has timed. It times the M of `ep.cuda.fpa_intb_profile_m` while the session is opened; another
M takes the tactic of the next power of two where that was timed, else it is timed in its first run, and in a capture
nothing can be timed. (Read in the sources of ONNX Runtime 1.31: MatMulNBits, GemmPluginProfiler.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .buckets import Ladder, default_batch_ladder
from .config import ModelConfig
from .signature import BATCH

GEMM, PROFILE_M = "ep.cuda.fpa_intb_gemm", "ep.cuda.fpa_intb_profile_m"
MAX_M = 8192  # ONNX Runtime times no larger M, and runs what is larger with this one's tactic


def with_profiled_m(config: ModelConfig) -> ModelConfig:
    """The config with every M of its buckets in `ep.cuda.fpa_intb_profile_m`, where fpA_intB is on and it is not given.

    A batch without declared sizes gets those that the engine would give it.
    """
    is_on = config.session_config.get(GEMM, "").strip().lower() not in ("", "0", "off")
    if not is_on or PROFILE_M in config.session_config:
        return config
    ladders = list(config.buckets.values())
    if config.max_batch_size > 0 and not any(name == BATCH or name.endswith("[0]") for name in config.buckets):
        ladders.append(default_batch_ladder(config.max_batch_size, config.preferred_batch_sizes))
    profiled = ",".join(map(str, profiled_m(ladders)))
    return replace(config, session_config={**config.session_config, PROFILE_M: profiled})


def profiled_m(ladders: Iterable[Ladder]) -> list[int]:
    """Every M that a matrix product may have in these buckets, ascending.

    They are the products of the sizes of any of the dimensions (rows times length in an encoder, rows behind a pooled
    head), and the powers of two up to the largest, for an M that is another function of the sizes (a width / 8).
    """
    found = {1}
    for ladder in ladders:
        found |= {min(m * size, MAX_M) for m in found for size in ladder}
    powers = {1 << exponent for exponent in range((max(found) - 1).bit_length() + 1)}
    return sorted(found | powers)
