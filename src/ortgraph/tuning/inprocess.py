"""A model under load in this process: the serving engine, without Triton."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..batch import Request
from ..config import ModelConfig
from ..engine import Engine
from ..errors import RequestError
from ..providers.base import Array, HostArrays
from .load import TuningError
from .pairs import Settings

SLICE_S = 0.1
MAX_BATCHES = 1000

Batches = Sequence[Sequence[dict[str, Array]]]


class DeviceLost(TuningError):
    """A run lost the CUDA context of this process."""


class EngineSubject:
    """An engine that answers batch after batch, each as full as the load's clients make it."""

    def __init__(self, engine: Engine, batches: Batches) -> None:
        """Answers every batch once, which warms it up.

        Raises:
            TuningError: a request is refused or fails.
        """
        self.engine = engine
        self._batches = batches
        self._answers = self._all_answers()
        self.count = 1

    def measure_slice(self) -> None:
        """Have a slice last about `SLICE_S`."""
        once = min(self._timed([batch]) for batch in self._batches[:2])
        self.count = max(1, min(MAX_BATCHES, round(SLICE_S / max(once, 1e-6))))

    def seconds(self, number: int) -> float:
        """A slice of batches, beginning where slice `number - 1` ended."""
        chosen = [self._batches[(number * self.count + i) % len(self._batches)] for i in range(self.count)]
        return self._timed(chosen) / sum(len(batch) for batch in chosen)

    def _timed(self, batches: Batches) -> float:
        prepared = [[Request(dict(inputs)) for inputs in batch] for batch in batches]
        start = time.perf_counter()
        for requests in prepared:
            for _ in self.engine.finish(self.engine.begin(requests)):
                pass
        return time.perf_counter() - start

    def answers(self) -> list[HostArrays]:
        """The answers to every request."""
        return self._answers

    def _all_answers(self) -> list[HostArrays]:
        """Copied: a slot's memory is used again."""
        found: list[HostArrays] = []
        for batch in self._batches:
            for answer in self.engine.run_batch([Request(dict(inputs)) for inputs in batch]):
                if isinstance(answer, RequestError):
                    raise TuningError(f"the model does not answer the load: {answer}; choose other --lengths")
                found.append({name: np.array(array, copy=True) for name, array in answer.items()})
        return found


class Engines:
    """Opens a base and a candidate. The base stays open for the next candidate, since loading takes a while."""

    def __init__(self, configure: Callable[[Settings], ModelConfig], batches: Batches) -> None:
        self._configure = configure
        self._batches = batches
        self._settings: Settings | None = None
        self._base: EngineSubject | None = None

    @contextlib.contextmanager
    def open(self, base: Settings, candidate: Settings) -> Iterator[tuple[EngineSubject, EngineSubject]]:
        """Both engines, loaded and warmed up with every batch.

        Raises:
            LoadError: the model cannot be served like this.
            TuningError: it does not answer the load.
        """
        config = self._configure(candidate)
        if self._base is None or self._settings != base:
            self.close()
            self._base, self._settings = self._load(self._configure(base)), dict(base)
            self._base.measure_slice()
        other = self._load(config)
        try:
            other.count = self._base.count
            yield self._base, other
        finally:
            is_lost = not (self._base.engine.is_healthy and other.engine.is_healthy)
            other.engine.close()
            if is_lost:
                raise DeviceLost("the device was lost in a run; the same command goes on without this candidate")

    def _load(self, config: ModelConfig) -> EngineSubject:
        engine = Engine.load(config)
        try:
            return EngineSubject(engine, self._batches)
        except BaseException:
            engine.close()
            raise

    def close(self) -> None:
        """Close the base; twice is safe."""
        if self._base is not None:
            self._base.engine.close()
        self._base = self._settings = None
