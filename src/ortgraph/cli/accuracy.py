"""How far a rewritten model's answers lie from the original's, on the CPU, compared in float64.

Inputs are read from .npz files, one run each, or drawn from the model's signature.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Column, Table

from .. import signature as signatures
from ..config import ModelConfig, parse, parse_buckets
from ..dtypes import DType, as_storage, to_float64
from ..errors import ConfigError, InvalidRequest, OrtgraphError, RunError, nearest
from ..preflight import Preflight
from ..providers.base import Array, HostArrays
from ..providers.host import run_on_host
from ..session import open_session, session_options, specs
from ..signature import Signature, TensorSpec
from .console import console
from .files import CommandError, file_bytes

_GUESSES = (8, 32, 224)
_MOST_ROWS = 256  # of an output, for neighbours: every row is compared with every other
_TIMED_S, _TIMED_RUNS = 0.5, 50
UNWRITTEN = "; nothing was written"


Inputs = Annotated[
    list[Path] | None, typer.Option("--inputs", help="An .npz file of real inputs, one run; may be repeated.")
]
Sizes = Annotated[str, typer.Option(help="Sizes of generated inputs, as in 'buckets': batch=32; sequence=16,128")]
ValueRanges = Annotated[str, typer.Option(help="What generated inputs are drawn from: input_ids=0..30521")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.onnx.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


class Candidate:
    """A model file on ONNX Runtime's CPU provider."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when ONNX Runtime cannot load it, CommandError when it has other values than tensors."""
        config = ModelConfig("", "", path)
        start = time.perf_counter()
        self._session = open_session(config, session_options(config), ["CPUExecutionProvider"])
        self.load_s = time.perf_counter() - start
        self.inputs, self.outputs, strange = specs(self._session)
        if strange:
            raise CommandError(f"{path.name}: {strange[0]}; only models of tensors can be compared")
        self._dtypes = {spec.name: spec.dtype for spec in self.inputs + self.outputs}

    def run(self, inputs: Mapping[str, Array]) -> HostArrays:
        """One run; floats are cast to the model's own kind of float."""
        given = {}
        for name, array in inputs.items():
            dtype = self._dtypes[name]
            is_cast = array.dtype.kind == dtype.storage.kind == "f"
            given[name] = array.astype(dtype.storage) if is_cast else array
        return run_on_host(self._session, self._dtypes, given, [spec.name for spec in self.outputs])

    def latency_s(self, inputs: Mapping[str, Array]) -> float:
        """The median of its runs in half a second."""
        self.run(inputs)
        seconds: list[float] = []
        while len(seconds) < _TIMED_RUNS and sum(seconds) < _TIMED_S:
            start = time.perf_counter()
            self.run(inputs)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


@dataclass(frozen=True)
class Measures:
    """What a model file costs; times on the CPU."""

    size_bytes: int
    load_s: float
    latency_s: float


def measure(path: Path, candidate: Candidate, inputs: Mapping[str, Array]) -> Measures:
    """The candidate of this file; it is opened once more, since the first time may read from the disk."""
    latency_s = candidate.latency_s(inputs)
    return Measures(file_bytes(path), min(candidate.load_s, Candidate(path).load_s), latency_s)


def print_measures(sides: Mapping[str, Measures]) -> None:
    """A row for each file."""
    table = Table("", "MB", "load ms (CPU)", "run ms (CPU)")
    for name, side in sides.items():
        table.add_row(name, f"{side.size_bytes / 1e6:.1f}", f"{1e3 * side.load_s:.1f}", f"{1e3 * side.latency_s:.1f}")
    console.print(table)


@dataclass(frozen=True)
class Samples:
    """What both models are run on: the inputs of each run, and a sentence where they could be better ones."""

    runs: list[dict[str, Array]]
    remark: str = ""


def read_samples(candidate: Candidate, files: Sequence[Path], without: Mapping[str, Array]) -> Samples:
    """One run from each .npz file, an array for each input but those in `without`.

    Raises:
        CommandError: a file cannot be read, or its arrays are not the model's inputs.
    """
    wanted = {spec.name: spec for spec in candidate.inputs if spec.is_required and spec.name not in without}
    runs = []
    for path in files:
        try:
            with np.load(path, allow_pickle=False) as archive:
                if not isinstance(archive, np.lib.npyio.NpzFile):
                    raise CommandError(f"{path} is one array; write inputs with numpy.savez, each under its name")
                arrays = {name: archive[name] for name in archive.files}
        except (ValueError, zipfile.BadZipFile, EOFError) as error:
            raise CommandError(f"{path} is not an .npz file of numbers: {error}") from error
        for name in arrays:
            if name not in wanted:
                raise CommandError(f"{path}: '{name}' is not an input of the model{nearest(name, wanted)}")
        for name, spec in wanted.items():
            if name not in arrays:
                raise CommandError(f"{path} has no array for input '{name}'")
            try:
                arrays[name] = as_storage(name, arrays[name], spec.dtype)
            except InvalidRequest as error:
                raise CommandError(f"{path}: {error}") from None
        runs.append(arrays)
    return Samples(runs)


def draw_samples(
    candidate: Candidate,
    sizes: str,
    value_ranges: str,
    constants: Mapping[str, Array],
    frozen_sizes: Mapping[tuple[str, int], int],
) -> Samples:
    """Random inputs at every combination of the given sizes; a dimension without one gets a size that the model takes.

    Args:
        sizes: `batch=8; sequence=16,64`, as in the parameter `buckets`.
        value_ranges: as the parameter of that name.
        constants: frozen inputs, which are not drawn but given to every trial run.
        frozen_sizes: sizes of axes that are no choice any more.

    Raises:
        CommandError: a bad value, or the model runs at none of the sizes tried.
    """
    inputs = tuple(_with_sizes(spec, frozen_sizes) for spec in candidate.inputs if spec.name not in constants)
    ranges = _parsed("--value-ranges", "value_ranges", value_ranges).value_ranges
    for name in ranges:
        if not any(spec.name == name for spec in inputs):
            known = [spec.name for spec in inputs]
            raise CommandError(f"--value-ranges: '{name}' is not an input of the model{nearest(name, known)}")
    try:
        ladders = parse_buckets(sizes)
        signature = signatures.build(inputs, candidate.outputs, is_batched=False, addressed=ladders)
    except ValueError as rule:
        raise CommandError(f"--sizes must be {rule}, got '{sizes}'") from None
    except ConfigError as error:
        raise CommandError(str(error).replace("parameter 'buckets'", "--sizes")) from None
    runs: list[dict[str, Array]] = []
    problem = ""
    for guess in _GUESSES:
        try:
            runs = list(_drawn(candidate, signature, ladders, guess, ranges, constants))
            break
        except OrtgraphError as error:
            problem = str(error)
    if not runs:
        names = "; ".join(f"{dim.name}=..." for dim in signature.dims)
        hint = f'give --sizes "{names}" or --inputs FILE.npz' if names else "give --value-ranges or --inputs FILE.npz"
        raise CommandError(f"the model runs on no generated input ({problem}); {hint}")
    blind = [s.name for s in inputs if s.is_required and s.dtype.storage.kind in "iu" and not s.dtype.is_raw]
    remark = f"{', '.join(blind)}: drawn from 0 and 1; --value-ranges or --inputs make the check a real one"
    return Samples(runs, remark if blind and not ranges else "")


def _with_sizes(spec: TensorSpec, frozen: Mapping[tuple[str, int], int]) -> TensorSpec:
    return replace(spec, shape=tuple(frozen.get((spec.name, axis), size) for axis, size in enumerate(spec.shape)))


def _parsed(option: str, key: str, value: str) -> ModelConfig:
    try:
        return parse({"parameters": {key: {"string_value": value}}}, model_path=Path("model.onnx"))
    except ConfigError as error:
        raise CommandError(str(error).replace(f"parameter '{key}'", option)) from None


def _drawn(
    candidate: Candidate,
    signature: Signature,
    ladders: Mapping[str, tuple[int, ...]],
    guess: int,
    ranges: Mapping[str, tuple[float, float]],
    constants: Mapping[str, Array],
) -> Iterator[dict[str, Array]]:
    """Inputs on which the model was run."""

    def run(inputs: dict[str, Array]) -> HostArrays:
        return candidate.run({**inputs, **constants})

    places = {signature.index(name): sizes for name, sizes in ladders.items()}
    source = Preflight(signature, run, {}, {}, ranges)
    for sizes in itertools.product(*(places.get(place, (guess,)) for place in range(len(signature.dims)))):
        inputs = source.random_inputs(sizes)
        run(inputs)
        yield inputs


@dataclass(frozen=True)
class Agreement:
    """How an output agrees with the original's, over all runs.

    Attributes:
        worst: the largest difference, relative to the largest value of the output; of whole numbers, flags and texts
            the share that changed; inf where shapes, infinities or NaNs differ.
        mean: the mean difference relative to the mean value.
        cosine: the smallest cosine between two answers' rows (last axis); None where a row is one number.
        same_largest: the share of rows whose largest entry is the same (a classifier's answer).
        same_nearest: for rows of [rows, width], the share with the same nearest neighbour by cosine.
        same_order: for those, the share of pairs of other rows that stay in the same order by cosine.
    """

    name: str
    worst: float
    mean: float
    cosine: float | None = None
    same_largest: float | None = None
    same_nearest: float | None = None
    same_order: float | None = None


@dataclass(frozen=True)
class Answers:
    """What a model gave for each run."""

    outputs: tuple[TensorSpec, ...]
    runs: list[HostArrays]


def answers(candidate: Candidate, samples: Samples, constants: Mapping[str, Array]) -> Answers:
    """Run a model on the samples, with frozen inputs if it has them.

    Raises:
        CommandError: it does not run.
    """
    try:
        return Answers(candidate.outputs, [candidate.run({**inputs, **constants}) for inputs in samples.runs])
    except RunError as error:
        raise CommandError(f"the model does not run on these inputs: {error}") from error


def compare(wanted: Answers, candidate: Candidate, samples: Samples) -> list[Agreement]:
    """How the candidate's answers agree with the original's, output by output."""
    got = answers(candidate, samples, {})
    dtypes = {spec.name: spec.dtype for spec in got.outputs}
    pairs = list(zip(wanted.runs, got.runs, strict=True))
    return [_agreement(spec, dtypes[spec.name], pairs) for spec in wanted.outputs]


def _agreement(spec: TensorSpec, new: DType, pairs: Sequence[tuple[HostArrays, HostArrays]]) -> Agreement:
    name = spec.name
    if any(old[name].shape != now[name].shape for old, now in pairs):
        return Agreement(name, math.inf, math.inf)
    if not spec.dtype.is_float or not new.is_float:
        changed = np.concatenate([(old[name] != now[name]).ravel() for old, now in pairs])
        share = float(changed.mean()) if changed.size else 0.0
        return Agreement(name, share, share)
    wanted = [to_float64(old[name], spec.dtype) for old, _ in pairs]
    got = [to_float64(now[name], new) for _, now in pairs]
    for a, b in zip(got, wanted, strict=True):
        odd = ~np.isfinite(b)
        if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
            return Agreement(name, math.inf, math.inf)
        a[odd] = b[odd] = 0
    difference = np.concatenate([np.abs(a - b).ravel() for a, b in zip(got, wanted, strict=True)])
    size = np.concatenate([np.abs(b).ravel() for b in wanted])
    if not size.size:
        return Agreement(name, 0.0, 0.0)
    tiny = np.finfo(np.float32).tiny
    agreement = Agreement(
        name, float(difference.max() / max(size.max(), tiny)), float(difference.mean() / max(size.mean(), tiny))
    )
    if any(b.ndim < 1 or b.shape[-1] < 2 for b in wanted):
        return agreement
    rows = [(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])) for a, b in zip(got, wanted, strict=True)]
    same = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in rows])
    cosine = np.concatenate([(_unit(a) * _unit(b)).sum(-1)[np.abs(b).max(-1) > 0] for a, b in rows])
    agreement = replace(agreement, same_largest=float(same.mean()), cosine=float(cosine.min()) if cosine.size else None)
    if any(b.ndim != 2 for b in wanted) or len({b.shape[-1] for b in wanted}) > 1 or len(same) < 3:
        return agreement
    nearest_rows, order = _neighbours(*(np.concatenate(part)[:_MOST_ROWS] for part in zip(*rows, strict=True)))
    return replace(agreement, same_nearest=nearest_rows, same_order=order)


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.finfo(np.float32).tiny))


def _neighbours(got: Array, wanted: Array) -> tuple[float, float]:
    """The shares of the same nearest other row, and of the same order between two other rows."""
    count = len(got)
    other = ~np.eye(count, dtype=bool)
    near, near_wanted = (_unit(rows) @ _unit(rows).T for rows in (got, wanted))
    near, near_wanted = (scores[other].reshape(count, count - 1) for scores in (near, near_wanted))
    upper = np.triu_indices(count - 1, 1)
    same = [
        float(((a[:, None] > a)[upper] == (b[:, None] > b)[upper]).mean())
        for a, b in zip(near, near_wanted, strict=True)
    ]
    return float((near.argmax(-1) == near_wanted.argmax(-1)).mean()), float(np.mean(same))


def check(agreements: Sequence[Agreement], tolerance: float | None) -> None:
    """Refuse an error above the tolerance, and NaNs or shapes of its own with or without one.

    Raises:
        CommandError: the first output that is not near enough.
    """
    for found in agreements:
        if math.isinf(found.worst):
            raise CommandError(f"output '{found.name}' has other shapes, infinities or NaNs than before{UNWRITTEN}")
        if tolerance is not None and not found.worst <= tolerance:
            raise CommandError(
                f"output '{found.name}' lies {found.worst:.1e} from the original's, above the tolerance of "
                f"{tolerance:g}{UNWRITTEN}"
            )


def print_agreements(agreements: Sequence[Agreement], runs: int, notes: Sequence[str]) -> None:
    """The table of all outputs, and what else is to be said."""
    table = Table(Column("output", overflow="fold"), "worst", "mean", "cosine", "largest", "nearest", "order")
    for found in agreements:
        shares = [found.same_largest, found.same_nearest, found.same_order]
        table.add_row(
            found.name,
            f"{found.worst:.1e}",
            f"{found.mean:.1e}",
            "" if found.cosine is None else f"{found.cosine:.5f}",
            *("" if share is None else f"{share:.1%}" for share in shares),
        )
    console.print(table)
    console.print(
        f"over {runs} run{'s' * (runs > 1)}: worst and mean difference (of the output's largest and mean value), "
        "the least cosine of two answers,\n"
        "and how many rows keep their largest entry, their nearest other row, and the order of the others by nearness"
    )
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False)
