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
_SIGNS = (0, 1, -1)
_TEXTS = ("", "a", "b", "a b", "b c a")


@dataclass
class Findings:
    """What was measured.

    `padded` holds for each dimension whether it may be padded, `axes` which output axis follows which dimension,
    `notes` one sentence for each thing that will not be done and why, `cost` the estimated seconds of a run.
    """

    padded: list[bool]
    can_join: bool = True
    axes: dict[str, dict[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: Cost = lambda sizes: float(np.prod(sizes))


def worst_error(got: Array, wanted: Array, dtype: DType) -> float:
    """The largest difference relative to the largest wanted value (at least 1); inf where shape or NaNs differ.

    Types that are not floats must be equal: then the result is 0, else inf.
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
    return float(np.abs(a[finite] - b[finite]).max() / max(1.0, np.abs(b[finite]).max()))


class Preflight:
    """Measures one model. `run` must run exactly the shapes it is given."""

    def __init__(
        self,
        signature: Signature,
        run: RunExact,
        fills: Mapping[str, Fill],
        known_sizes: Mapping[int, int],
        value_ranges: Mapping[str, tuple[float, float]],
    ) -> None:
        """`known_sizes` are the dimensions, by place, whose size the config fixes."""
        self._signature = signature
        self.run_exact = run
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
            found.can_join, reason = self._check_join(base, batch)
            found.padded[batch] = found.can_join
            if not found.can_join:
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
        found.cost = self._measure_cost(base, ladders, batch)
        return found

    def random_inputs(self, sizes: Sizes, sign: int = 0) -> dict[str, Array]:
        """Random inputs within `value_ranges`, else by type (see `_random_values`)."""
        inputs = {}
        for spec in self._signature.inputs:
            if not spec.is_required:
                continue
            shape = self._signature.shape(spec, sizes)
            if spec.name in self._ranges and not spec.dtype.is_raw:
                low, high = self._ranges[spec.name]
                if spec.dtype.is_float:
                    array = self._random.uniform(low, high, shape).astype(spec.dtype.storage)
                else:
                    array = self._random.integers(int(low), int(high), shape, spec.dtype.storage, endpoint=True)
            else:
                array = _random_values(self._random, spec.dtype, shape, sign)
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

    def _check_join(self, base: Sizes, batch: int) -> tuple[bool, str]:
        for sign in _SIGNS:
            reason = self._join_changes(base, sign)
            if reason:
                return False, reason
        return True, ""

    def _join_changes(self, base: Sizes, sign: int) -> str:
        one, two = self.random_inputs(base, sign), self.random_inputs(base, sign)
        both = {name: np.concatenate([one[name], two[name]]) for name in one}
        try:
            apart, together = [self.run_exact(one), self.run_exact(two)], self.run_exact(both)
        except OrtgraphError as error:
            return f"two rows cannot run together: {error}"
        for name, array in together.items():
            if array.ndim == 0 or array.shape[0] != 2:
                return f"output '{name}' has shape {list(array.shape)} for 2 rows"
            for row, alone in enumerate(apart):
                worst = worst_error(array[row : row + 1], alone[name], self._dtypes[name])
                if worst > self._dtypes[name].tolerance:
                    return f"output '{name}' of a row changes by {worst:.1e} beside another row"
        return ""

    def _check_padding(self, dim: int, base: Sizes, ladder: Ladder | None, axes: dict[str, dict[int, int]]) -> str:
        """Why this dimension cannot be padded, or an empty string; the output axes that follow it go into `axes`."""
        rules: dict[str, set[int]] = {name: set() for name in self._dtypes}
        for (small, large), sign in itertools.product(_trial_sizes(base[dim], ladder), _SIGNS):
            short, long = (tuple(size if i == dim else b for i, b in enumerate(base)) for size in (small, large))
            inputs = self.random_inputs(short, sign)
            try:
                exact = self.run_exact(inputs)
                padded = self.run_exact({name: self._pad(name, array, long) for name, array in inputs.items()})
            except OrtgraphError as error:
                return f"a trial run at {small} padded to {large} failed: {error}"
            for name, array in padded.items():
                wanted, dtype = exact[name], self._dtypes[name]
                if array.ndim != wanted.ndim:
                    return f"output '{name}' changes its number of axes"
                changed = {axis for axis in range(array.ndim) if array.shape[axis] != wanted.shape[axis]}
                if any((wanted.shape[axis], array.shape[axis]) != (small, large) for axis in changed):
                    return (
                        f"output '{name}' has shape {list(wanted.shape)} at {small}, "
                        f"{list(array.shape)} padded to {large}, and cannot be sliced back"
                    )
                rules[name] |= changed
                worst = worst_error(array[tuple(slice(size) for size in wanted.shape)], wanted, dtype)
                if worst > dtype.tolerance:
                    return f"output '{name}' changes by {worst:.1e} when {small} is padded to {large}"
        for name, found in rules.items():
            axes.setdefault(name, {}).update(dict.fromkeys(found, dim))
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
            worst = worst_error(array[tuple(index)], exact[row][name], self._dtypes[name])
            if worst > self._dtypes[name].tolerance:
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


def _random_values(random: np.random.Generator, dtype: DType, shape: Shape, sign: int) -> Array:
    """Normal floats, texts of one to three words, else 0 and 1 with a leading 1, which suits indices and masks.

    With a sign the floats all have it (a maximum over negative numbers, say, shows padding with 0), and with a positive
    one the other numbers are all 1.
    """
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
        array = np.asarray(1 if sign > 0 else random.integers(0, 2, shape), dtype.storage)
        array = np.broadcast_to(array, shape).copy()
        if array.ndim and array.size:
            array[..., 0] = 1
    return array


def _trial_sizes(base: int, ladder: Ladder | None) -> list[tuple[int, int]]:
    """(size, padded to) pairs: the worst waste of the first, a middle and the last but large bucket."""
    if not ladder:
        return [(1, base), (max(1, base - 1), base)] if base > 1 else [(1, 2)]
    pairs = [(1, ladder[0])] if ladder[0] > 1 else []
    steps = [(low + 1, high) for low, high in itertools.pairwise(ladder) if high > low + 1]
    pairs += [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else []
    last = max(ladder[-1], 2)
    return pairs or [(last - 1, last)]
