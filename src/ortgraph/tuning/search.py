"""The search: axis by axis, each candidate on top of the best so far, within a budget of seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ..dtypes import DType
from ..errors import ConfigError, OrtgraphError
from .axes import Axis, describe
from .inprocess import DeviceLost
from .pairs import FIRST_ROUNDS, Pair, Settings, Subject, compare
from .store import Store

Open = Callable[[Settings, Settings], AbstractContextManager[tuple[Subject, Subject]]]


@dataclass
class Budget:
    """Seconds that may be spent; a stage gets a share of what is left."""

    end_s: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """From now on."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(self.end_s - time.monotonic(), 0.0)

    def part(self, share: float) -> Budget:
        """This share of what is left."""
        return Budget.of(self.left_s * share)

    def is_over(self) -> bool:
        """Nothing is left."""
        return not self.left_s


@dataclass
class Search:
    """The state of a search. `best` are the settings that have won so far; `skipped` says what was not tried, and why.

    `open_engines` and `open_servers` load a base and a candidate; the latter is None where there is no server.
    `tell` gets a line on what goes on now.
    """

    store: Store
    dtypes: Mapping[str, DType]
    rounding: float
    open_engines: Open
    open_servers: Open | None
    tell: Callable[[str], None]
    best: Settings = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    open_count: int = 0

    def walk(self, axes: Sequence[Axis], budget: Budget, *, where: str) -> None:
        """Try each axis in turn; the best candidate that beats the best so far by more than the noise is kept."""
        for axis in axes:
            pairs = [self._try(axis.name, candidate, budget, where) for candidate in axis.candidates]
            winners = [pair for pair in pairs if pair is not None and pair.is_better]
            if winners:
                self.best = dict(min(winners, key=lambda pair: pair.ratio).candidate)

    def _try(self, axis: str, candidate: Settings, budget: Budget, where: str) -> Pair | None:
        """Measure a candidate on top of the best so far; None where there is no time left, or it is unknown here."""
        merged = {**self.best, **candidate}
        pair = self.store.pair(axis, self.best, merged, where)
        try:
            self.measure(pair, budget, label=describe(candidate))
        except ConfigError as error:
            self.store.pairs.remove(pair)
            self.skipped.append(f"{axis}: {str(error).partition(';')[0]}")
            return None
        if not pair.is_done:
            self.open_count += 1
        return pair

    def measure(self, pair: Pair, budget: Budget, *, label: str) -> None:
        """Measure what a pair still lacks, as far as the budget goes. What fails is refused, with the reason.

        Raises:
            ConfigError: the config has no such setting.
            DeviceLost: nothing can be measured in this process any more.
        """
        if pair.is_done or budget.is_over():
            return
        how = self.open_engines if pair.where == "engine" else self.open_servers
        assert how
        so_far = f"; best so far: {describe(self.best)}" if self.best else ""
        self.tell(f"{pair.axis}: {label}{so_far}")

        def keep() -> None:
            self.store.save()
            now = f", {pair.ratio:.2f} after {len(pair.rounds)} rounds" if pair.rounds else ""
            self.tell(f"{pair.axis}: {label}{now}{so_far}")

        try:
            with contextlib.ExitStack() as stack:
                base, candidate = stack.enter_context(how(pair.base, pair.candidate))
                compare(
                    pair,
                    base,
                    candidate,
                    self.dtypes,
                    self.rounding,
                    at_least=FIRST_ROUNDS if pair.where == "server" else 0,  # starting it was the larger part
                    is_over=budget.is_over,
                    after_round=keep,
                )
        except ConfigError:
            raise
        except OrtgraphError as error:
            pair.refused = str(error)
            if isinstance(error, DeviceLost):
                raise
        finally:
            self.store.save()

    def confirm(self, budget: Budget, where: str) -> Pair | None:
        """All that won together against the config as it is, measured anew; None where nothing won."""
        if not self.best:
            return None
        pair = self.store.pair("confirm", {}, self.best, where)
        self.measure(pair, budget, label=describe(self.best))
        return pair
