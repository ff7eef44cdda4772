"""Proof, before a model is ready, that joining requests and padding them does not change their answers.

Each claim is measured on random inputs with the loaded model itself: rows alone against rows together, a size unpadded
against padded. What is not proven is not done: those requests run alone or at their exact size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .batch import Fill
from .buckets import Cost, Ladder
from .dtypes import DType, to_float64
from .errors import OrtgraphError
from .providers.base import Array, HostArrays
from .signature import BATCH, Shape, Signature, Sizes

RunExact = Callable[[dict[str, Array]], HostArrays]
_GUESSES = (8, 32, 224)
_SEED = 20261130
_FLOOR = 1e-6  # what is smaller than this counts as nothing
_TEXTS = ("", "a", "b", "a b", "b c a")


@dataclass(frozen=True)
class Trial:
    """What random inputs a claim is tried on.

    `sign` makes all floats positive or negative (a maximum over negative numbers, say, shows padding with 0).
    Whole numbers and flags are from `low` to `high`, or in their own `value_ranges`; with `is_mask` the last axis
    begins with a 1.
    """

    name: str
    sign: int
    low: int
    high: int
    is_mask: bool = False


# A claim must hold on these; wide numbers are indices or lengths, and a model that refuses them is not asked.
_ORDINARY = Trial("ordinary", 0, 0, 1, is_mask=True)
_TRIALS = (_ORDINARY, Trial("positive", 1, 1, 1, is_mask=True), Trial("wide", -1, 0, 31, is_mask=True))
# Where a claim fails on these, requests with such values run alone: an input with a row of zeros (nothing but masked),
# negative whole numbers.
_ZERO, _NEGATIVE = Trial("zero", 0, 0, 0), Trial("negative", 0, -31, -1)


@dataclass
class Findings:
    """What was measured.

    `padded` holds for each dimension whether it may be padded, `axes` which output axis follows which dimension,
    `notes` one sentence for each thing that will not be done and why, `cost` the estimated seconds of a run. `unproven`
    holds "zero" or "negative" when requests with a row of zeros, or with negative whole numbers, must run alone.
    """

    padded: list[bool]
    can_join: bool = True
    unproven: set[str] = field(default_factory=set)
    axes: dict[str, dict[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: Cost = lambda sizes: float(np.prod(sizes))


def worst_error(got: Array, wanted: Array, dtype: DType, *, is_coarse: bool = False) -> float:
    """The largest difference relative to the largest wanted value; inf where shape or NaNs differ.

    Types that are not floats must be equal: then the result is 0, else inf. Singles and doubles are compared column by
    column of the last axis, so that a large one hides no other (a column below a thousandth of the largest value is
    rounding). Rounding is too coarse for that in half precision, and (`is_coarse`) where kernels change with the shape
    or with TF32, as on GPUs.
    """
    if got.shape != wanted.shape:
        return float("inf")
    if not dtype.is_float or dtype.onnx_name.startswith("float8"):
        return 0.0 if np.array_equal(got, wanted) else float("inf")
    a, b = to_float64(got, dtype), to_float64(wanted, dtype)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    difference, size = np.abs(np.where(finite, a - b, 0)), np.abs(np.where(finite, b, 0))
    scale = np.asarray(size.max())
    if dtype.storage.itemsize >= 4 and size.ndim and not is_coarse:
        scale = np.maximum(size.max(axis=tuple(range(size.ndim - 1))), 1e-3 * scale)
    return float((difference / np.maximum(scale, _FLOOR)).max())


def allowed_error(dtype: DType, rounding: float) -> float:
    """What `worst_error` may be in right answers: that of the type, or of a provider whose rounding is more."""
    return max(dtype.tolerance, rounding) if dtype.tolerance else 0.0


class Preflight:
    """Measures one model. `run` must run exactly the shapes it is given."""

    def __init__(
        self,
        signature: Signature,
        run: RunExact,
        fills: Mapping[str, Fill],
        known_sizes: Mapping[int, int],
        value_ranges: Mapping[str, tuple[float, float]],
        *,
        run_checked: RunExact | None = None,
        rounding: float = 0.0,
        max_rows: int = 1,
    ) -> None:
        """`known_sizes` are the dimensions, by place, whose size the config fixes.

        `run_checked` runs the model where an index outside its table is an error (the CPU), unless `run` does.
        `rounding` is how far two runs of `run` may lie apart where that is more than the element types' own
        tolerances; 0 where a row's answer does not depend on the shape of the run at all. `max_rows` is the most
        that run together.
        """
        self._signature = signature
        self.run_exact = run
        self._run_checked = run_checked or run
        self._rounding = rounding
        self._max_rows = max_rows
        self._fills = fills
        self._known_sizes = known_sizes
        self._ranges = value_ranges
        self._random = np.random.default_rng(_SEED)
        self._dtypes = {spec.name: spec.dtype for spec in signature.outputs}

    def examine(self, ladders: Sequence[Ladder | None], candidates: Sequence[bool]) -> Findings:
        """Prove what can be proven for the dimensions in `candidates`; `ladders` say between which sizes to pad."""
        found = Findings(padded=[False] * len(candidates))
        batch = self._signature.index(BATCH) if self._signature.is_batched else None
        if batch is None and not any(candidates):
            return found
        base, problem = self._base_sizes(ladders, batch)
        if base is None:
            found.can_join = False
            found.notes.append(f"requests are never joined or padded, since no trial run succeeded: {problem}")
            return found
        if batch is not None:
            reason = self._join_changes(base)
            found.can_join = found.padded[batch] = not reason
            if reason:
                found.notes.append(f"requests are never joined: {reason}")
        for dim, is_candidate in enumerate(candidates):
            if is_candidate and dim != batch:
                reason = self._check_padding(dim, base, ladders[dim], found.axes)
                found.padded[dim] = not reason
                if reason:
                    found.notes.append(f"dimension '{self._signature.dims[dim].name}' is never padded: {reason}")
        dims = [dim for dim, is_padded in enumerate(found.padded) if is_padded and dim != batch]
        if dims and (reason := self._check_together(dims, base, ladders, found)):
            found.notes.append(f"nothing is padded: {reason}")
            for dim in dims:
                found.padded[dim] = False
        for trial in (_ZERO, _NEGATIVE) if any(found.padded) and self._has_whole_numbers() else ():
            is_joined = found.can_join and batch is not None
            changes = [self._join_change(base, trial)] if is_joined else []
            changes += [self._padding_changes(dim, base, ladders[dim], {}, trial) for dim in dims if found.padded[dim]]
            if any(changes):
                found.unproven.add(trial.name)
                what = "a row of zeros" if trial is _ZERO else "negative whole numbers"
                found.notes.append(f"requests with {what} run alone: {next(filter(None, changes))}")
        found.cost = self._measure_cost(base, ladders, batch)
        return found

    def _has_whole_numbers(self) -> bool:
        return any(spec.dtype.storage.kind in "iub" and not spec.dtype.is_raw for spec in self._signature.inputs)

    def error(self, name: str, got: Array, wanted: Array, trial: Trial = _ORDINARY) -> float:
        """How much an output differs from another run's; 0 where that is rounding."""
        dtype, rounding = self._dtypes[name], self._rounding if self._is_on_device(trial) else 0.0
        worst = worst_error(got, wanted, dtype, is_coarse=rounding > 0)
        return worst if worst > allowed_error(dtype, rounding) else 0.0

    @staticmethod
    def _is_on_device(trial: Trial) -> bool:
        """Numbers beyond 0 and 1 may be indices outside their table: asked only where that is an error."""
        return trial.low >= 0 and trial.high <= 1

    def _run_for(self, trial: Trial) -> RunExact:
        return self.run_exact if self._is_on_device(trial) else self._run_checked

    def random_inputs(self, sizes: Sizes, trial: Trial = _ORDINARY) -> dict[str, Array]:
        """Random inputs within `value_ranges`, else as the trial says (see `_random_values`)."""
        inputs = {}
        for spec in self._signature.inputs:
            if not spec.is_required:
                continue
            shape = self._signature.shape(spec, sizes)
            if spec.name in self._ranges and not spec.dtype.is_raw:
                low, high = self._ranges[spec.name]
                if spec.dtype.is_float:
                    array = self._random.uniform(low, high, shape).astype(spec.dtype.storage)
                elif trial is _ZERO and low <= 0 <= high:
                    array = np.zeros(shape, spec.dtype.storage)
                else:
                    array = self._random.integers(int(low), int(high), shape, spec.dtype.storage, endpoint=True)
                    _begin_with_one(array, trial.is_mask and low <= 0 and high >= 1)
            else:
                array = _random_values(self._random, spec.dtype, shape, trial)
            inputs[spec.name] = array
        return inputs

    def _base_sizes(self, ladders: Sequence[Ladder | None], batch: int | None) -> tuple[Sizes | None, str]:
        problem = ""
        for guess in _GUESSES:
            sizes = tuple(
                1 if dim == batch else self._known_sizes.get(dim, ladder[len(ladder) // 2] if ladder else guess)
                for dim, ladder in enumerate(ladders)
            )
            try:
                self.run_exact(self.random_inputs(sizes))
                return sizes, ""
            except OrtgraphError as error:
                problem = str(error)
        return None, problem

    def _join_changes(self, base: Sizes) -> str:
        """Why rows of different requests cannot run together, or an empty string."""
        return next(filter(None, (self._join_change(base, trial) for trial in _TRIALS)), "")

    def _join_change(self, base: Sizes, trial: Trial) -> str:
        """Three rows alone against together, in both orders and as many times as make the largest run."""
        run = self._run_for(trial)
        rows = [self.random_inputs(base, trial) for _ in range(3)]
        try:
            apart = [run(row) for row in rows]
        except OrtgraphError as error:
            return f"a row of {trial.name} values cannot run: {error}" if trial is _ORDINARY else ""
        orders = [[0, 1, 2], [2, 1, 0]]
        if self._max_rows > 3 and trial is _ORDINARY:
            orders.append([i % 3 for i in range(self._max_rows)])
        for order in orders:
            try:
                together = run({name: np.concatenate([rows[i][name] for i in order]) for name in rows[0]})
            except OrtgraphError as error:
                return f"{len(order)} rows cannot run together: {error}"
            for name, array in together.items():
                if array.ndim == 0 or array.shape[0] != len(order):
                    return f"output '{name}' has shape {list(array.shape)} for {len(order)} rows"
                for place, row in enumerate(order):
                    if worst := self.error(name, array[place : place + 1], apart[row][name], trial):
                        beside = "another row" if len(order) == 3 else f"{len(order) - 1} others"
                        return f"output '{name}' of a row changes by {worst:.1e} beside {beside}"
        return ""

    def _check_padding(self, dim: int, base: Sizes, ladder: Ladder | None, axes: dict[str, dict[int, int]]) -> str:
        """Why this dimension cannot be padded, or an empty string; the output axes that follow it go into `axes`."""
        rules: dict[str, set[int]] = {}
        for trial in _TRIALS:
            if reason := self._padding_changes(dim, base, ladder, rules, trial):
                return reason
        for name, found in rules.items():
            axes.setdefault(name, {}).update(dict.fromkeys(found, dim))
        return ""

    def _padding_changes(
        self, dim: int, base: Sizes, ladder: Ladder | None, rules: dict[str, set[int]], trial: Trial
    ) -> str:
        """One kind of values at every pair of sizes; which output axes follow the dimension must always be the same."""
        run = self._run_for(trial)
        for small, large in _trial_sizes(base[dim], ladder):
            short, long = (tuple(size if i == dim else b for i, b in enumerate(base)) for size in (small, large))
            inputs = self.random_inputs(short, trial)
            try:
                exact = run(inputs)
            except OrtgraphError as error:
                if trial is _ORDINARY:
                    return f"a trial run at {small} failed: {error}"
                continue
            try:
                padded = run({name: self._pad(name, array, long) for name, array in inputs.items()})
            except OrtgraphError as error:
                return f"a trial run at {small} padded to {large} failed: {error}"
            for name, array in padded.items():
                wanted = exact[name]
                if array.ndim != wanted.ndim:
                    return f"output '{name}' changes its number of axes"
                changed = {axis for axis in range(array.ndim) if array.shape[axis] != wanted.shape[axis]}
                is_followed = all((wanted.shape[axis], array.shape[axis]) == (small, large) for axis in changed)
                if not is_followed or rules.setdefault(name, changed) != changed:
                    return (
                        f"output '{name}' has shape {list(wanted.shape)} at {small}, "
                        f"{list(array.shape)} padded to {large}, and cannot be sliced back"
                    )
                if worst := self.error(name, array[tuple(map(slice, wanted.shape))], wanted, trial):
                    return f"output '{name}' changes by {worst:.1e} when {small} is padded to {large}"
        return ""

    def _check_together(
        self, dims: Sequence[int], base: Sizes, ladders: Sequence[Ladder | None], found: Findings
    ) -> str:
        """What was proven one by one, now at once: every dimension padded, in one run with a longer row."""
        pairs = {dim: _trial_sizes(base[dim], ladders[dim])[0] for dim in dims}
        short, long = (tuple(pairs[i][end] if i in pairs else b for i, b in enumerate(base)) for end in (0, 1))
        a, b = self.random_inputs(short), self.random_inputs(long)
        joined = {name: self._pad(name, array, long) for name, array in a.items()}
        is_joined = found.can_join and self._signature.is_batched
        if is_joined:
            joined = {name: np.concatenate([array, b[name]]) for name, array in joined.items()}
        try:
            exact, together = [self.run_exact(a), self.run_exact(b)], self.run_exact(joined)
        except OrtgraphError as error:
            return f"a trial run with everything padded failed: {error}"
        for (name, array), (row, sizes) in itertools.product(together.items(), enumerate((short, long))):
            index = [slice(None)] * array.ndim
            for axis, dim in found.axes[name].items():
                index[axis] = slice(sizes[dim])
            if is_joined:
                index[0] = slice(row, row + 1)
            elif row:
                continue
            if worst := self.error(name, array[tuple(index)], exact[row][name]):
                return f"output '{name}' changes by {worst:.1e} when all is padded beside a longer row"
        return ""

    def _pad(self, name: str, array: Array, sizes: Sizes) -> Array:
        spec = self._signature.input(name)
        assert spec
        padded = np.full(self._signature.shape(spec, sizes), self._fills[name].pad, array.dtype)
        padded[tuple(slice(size) for size in array.shape)] = array
        return padded

    def _measure_cost(self, base: Sizes, ladders: Sequence[Ladder | None], batch: int | None) -> Cost:
        """Seconds of a run as a line over the number of elements, through a small and a large run (best of three)."""

        def seconds(sizes: Sizes) -> float:
            inputs, best = self.random_inputs(sizes), float("inf")
            for _ in range(3):
                start = time.perf_counter()
                self.run_exact(inputs)
                best = min(best, time.perf_counter() - start)
            return best

        small = tuple(ladder[0] if ladder and dim != batch else base[dim] for dim, ladder in enumerate(ladders))
        large = tuple(4 if dim == batch else base[dim] for dim in range(len(base)))
        try:
            t_small, t_large = seconds(small), seconds(large)
        except OrtgraphError:
            return lambda sizes: float(np.prod(sizes))
        n_small, n_large = float(np.prod(small)), float(np.prod(large))
        slope = max(t_large - t_small, 1e-3 * t_large) / max(n_large - n_small, 1.0)
        fixed = max(t_small - slope * n_small, 0.0)

        def cost(sizes: Sizes) -> float:
            elements = 1
            for size in sizes:
                elements *= size
            return fixed + slope * elements

        return cost


def _random_values(random: np.random.Generator, dtype: DType, shape: Shape, trial: Trial) -> Array:
    """Normal floats of the trial's sign, texts of one to three words, else numbers between the trial's bounds."""
    sign = trial.sign
    floats = np.asarray(random.standard_normal(shape))
    floats = np.asarray(sign * np.abs(floats) if sign else floats)
    array: Array
    if dtype.is_string:
        array = np.asarray(np.array(_TEXTS, np.object_)[random.integers(0, len(_TEXTS), shape)], np.object_)
    elif dtype.onnx_name == "bfloat16":
        array = np.asarray(floats.astype(np.float32).view(np.uint32) >> 16, np.uint16)
    elif dtype.is_raw:  # fp8 words between 1/8 and 7 in all four formats, with the sign of a normal number
        array = np.asarray(np.where(floats < 0, 0x80, 0) | random.integers(0x30, 0x48, shape), np.uint8)
    elif dtype.is_float:
        array = floats.astype(dtype.storage)
    else:
        low = max(trial.low, 0) if dtype.storage.kind in "ub" else trial.low
        high = max(min(trial.high, 1) if dtype.storage.kind == "b" else trial.high, low)
        array = np.asarray(random.integers(low, high, shape, endpoint=True)).astype(dtype.storage)
        _begin_with_one(array, trial.is_mask)
    return array


def _begin_with_one(array: Array, is_mask: bool) -> None:
    """A row of a mask has something that is not masked; an axis that may be the batch is left alone."""
    if is_mask and array.ndim > 1 and array.size:
        array[..., 0] = 1


def _trial_sizes(base: int, ladder: Ladder | None) -> list[tuple[int, int]]:
    """(size, padded to) pairs: the worst waste of the first, a middle and the last but large bucket."""
    if not ladder:
        top = max(base, 2)
        return list(dict.fromkeys([(1, top), (top - 1, top), (base + 1, 2 * base + 1)]))
    pairs = [(1, ladder[0])] if ladder[0] > 1 else []
    steps = [(low + 1, high) for low, high in itertools.pairwise(ladder) if high > low + 1]
    pairs += [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else []
    last = max(ladder[-1], 2)
    return pairs or [(last - 1, last)]
