"""Random shapes, batches, bucket tables and pad values: each answer equals that of its request alone, to the bit.

Slots are poisoned before each stage. Everything runs twice: with the CPU's tight shapes, and with a provider that runs
every group at exactly its bucket's shape, as captured graphs do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortgraph import Engine, ModelConfig
from ortgraph.batch import Request
from ortgraph.dtypes import DType
from ortgraph.errors import CancelledRequest, InvalidRequest, RequestError, UnsupportedRequest
from ortgraph.metrics import Metrics
from ortgraph.providers.base import Array, Run, Slot
from ortgraph.providers.cpu import CpuProvider, CpuSlot
from ortgraph.signature import Shape, Sizes
from tests import toys
from tests.toys import VOCABULARY, alone

MAX_ROWS, MAX_LENGTH = 6, 12
Inputs = dict[str, Any]
repeatable = settings(
    max_examples=120, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
ladders = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=4).map(lambda sizes: tuple(sorted(set(sizes))))


class PoisonedSlot(CpuSlot):
    """What it hands out to be staged is full of values that spoil every answer; it keeps the shapes it ran."""

    bucket: Sizes | None = None

    def stage(self, name: str, dtype: DType, shape: Shape) -> Array:
        view = super().stage(name, dtype, shape)
        view[...] = np.nan if dtype.is_float else 10**9
        return view

    def launch(self, outputs: Sequence[str], rows: int | None = None) -> Run:
        shapes = {name: array.shape for name, array in self.values.items()}
        assert isinstance(self._provider, TightProvider)
        self._provider.runs.append((self.bucket, shapes))
        return super().launch(outputs, rows)


class TightProvider(CpuProvider):
    """The CPU with poisoned slots and a record of its runs."""

    def __init__(self, config: ModelConfig, metrics: Metrics | None = None) -> None:
        super().__init__(config, metrics)
        self.runs: list[tuple[Sizes | None, dict[str, Shape]]] = []

    def slot(self, bucket: Sizes | None) -> Slot:
        slot = self._free.pop() if self._free else PoisonedSlot(self)
        assert isinstance(slot, PoisonedSlot)
        slot.bucket = bucket
        return slot


class FixedProvider(TightProvider):
    """Runs each group at its bucket's shape."""

    has_fixed_shapes = True


PROVIDERS = [TightProvider, FixedProvider]


@cache
def session(kind: str) -> ort.InferenceSession:
    return toys.plain(MODELS[kind])


MODELS: dict[str, onnx.ModelProto] = {"encoder": toys.encoder(), "planes": toys.planes(), "grid": toys.grid()}


@contextmanager
def engine_on(provider: type[TightProvider], kind: str, **fields: Any) -> Iterator[tuple[Engine, TightProvider]]:
    """An engine on one of the providers above; the runs of its preflight are forgotten."""
    with tempfile.TemporaryDirectory() as folder, patch("ortgraph.engine.open_provider", provider):
        engine = toys.load(MODELS[kind], Path(folder), **fields)
    made = engine._provider
    assert isinstance(made, provider)
    made.runs.clear()
    yield engine, made
    engine.close()


def check(engine: Engine, provider: TightProvider, kind: str, batch: Sequence[Request | RequestError]) -> None:
    """Every request is answered once, right, and every run has its bucket's shapes and not too many rows."""
    wanted = [alone(session(kind), r.inputs) if isinstance(r, Request) else r for r in batch]
    answers = list(engine.finish(engine.begin(batch)))
    assert sorted(index for index, _ in answers) == list(range(len(batch)))
    for index, answer in answers:
        right = wanted[index]
        if isinstance(right, RequestError):
            assert answer is right
            continue
        assert isinstance(answer, dict), repr(answer)
        assert answer.keys() == right.keys()
        for name in right:
            assert answer[name].dtype == right[name].dtype
            np.testing.assert_array_equal(answer[name], right[name], strict=True)
    check_runs(engine, provider)
    failed = ("ortgraph_eager_runs_total", (("reason", "group_failed"),))
    assert failed not in engine.metrics.values(), "a group failed and was run again one by one"


def check_runs(engine: Engine, provider: TightProvider) -> None:
    for bucket, shapes in provider.runs:
        if engine.signature.is_batched:
            assert all(shape[0] <= MAX_ROWS for shape in shapes.values())
        if bucket is not None and provider.has_fixed_shapes:
            assert shapes == {s.name: engine.signature.shape(s, bucket) for s in engine.signature.inputs}


def text(rows: int, length: int, seed: int) -> Inputs:
    """Ids of any value and a mask with holes, but with a first token."""
    random = np.random.default_rng(seed)
    mask = random.integers(0, 2, (rows, length))
    mask[:, :1] = 1
    return {"ids": random.integers(-VOCABULARY, VOCABULARY, (rows, length)), "mask": mask}


def whole(shape: Shape, seed: int) -> Array:
    """Whole numbers as float32: their sums are exact in any order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def declared(**named: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    return {name: sizes for name, sizes in named.items() if sizes is not None}


@pytest.mark.parametrize("provider", PROVIDERS)
@repeatable
@given(
    shapes=st.lists(st.tuples(st.integers(0, MAX_ROWS), st.integers(1, MAX_LENGTH + 1)), max_size=10),
    rows_ladder=st.none() | ladders,
    length_ladder=st.none() | ladders,
    is_ragged=st.booleans(),
    pad=st.integers(-VOCABULARY, VOCABULARY - 1),
    seed=st.integers(0, 2**20),
)
def test_one_ragged_dimension(
    provider: type[TightProvider],
    shapes: list[tuple[int, int]],
    rows_ladder: tuple[int, ...] | None,
    length_ladder: tuple[int, ...] | None,
    is_ragged: bool,
    pad: int,
    seed: int,
) -> None:
    fields = {
        "max_batch_size": MAX_ROWS,
        "buckets": declared(batch=rows_ladder, sequence=length_ladder),
        "ragged": ("ids", "mask") if is_ragged else (),
        "pad_values": {"ids": float(pad)},
    }
    with engine_on(provider, "encoder", **fields) as (engine, made):
        assert engine.table.padded == (True, is_ragged or length_ladder is not None)
        for turn in range(2):  # the second time on used slots
            batch = [Request(text(*shape, seed + i + turn)) for i, shape in enumerate(shapes)]
            check(engine, made, "encoder", batch)


@pytest.mark.parametrize("provider", PROVIDERS)
@repeatable
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, MAX_ROWS), st.integers(0, MAX_LENGTH), st.integers(0, MAX_LENGTH)), max_size=8
    ),
    rows_ladder=st.none() | ladders,
    high_ladder=st.none() | ladders,
    wide_ladder=st.none() | ladders,
    is_ragged=st.booleans(),
    pad=st.sampled_from([0.0, 0.0, 1.0, -2.5, float("nan"), float("inf")]),
    seed=st.integers(0, 2**20),
)
def test_two_ragged_dimensions(
    provider: type[TightProvider],
    shapes: list[tuple[int, int, int]],
    rows_ladder: tuple[int, ...] | None,
    high_ladder: tuple[int, ...] | None,
    wide_ladder: tuple[int, ...] | None,
    is_ragged: bool,
    pad: float,
    seed: int,
) -> None:
    """With a pad value other than 0 the sums over `wide` forbid its padding, and the answers are right all the same."""
    fields = {
        "max_batch_size": MAX_ROWS,
        "buckets": declared(batch=rows_ladder, high=high_ladder, wide=wide_ladder),
        "ragged": ("x",) if is_ragged else (),
        "pad_values": {"x": pad},
    }
    with engine_on(provider, "planes", **fields) as (engine, made):
        is_wide_asked, is_high_asked = (is_ragged or ladder is not None for ladder in (wide_ladder, high_ladder))
        assert engine.table.padded == (True, is_high_asked, is_wide_asked and pad == 0)
        for turn in range(2):
            batch = [Request({"x": whole(shape, seed + i + turn)}) for i, shape in enumerate(shapes)]
            check(engine, made, "planes", batch)


@pytest.mark.parametrize("provider", PROVIDERS)
@repeatable
@given(
    shapes=st.lists(st.tuples(st.integers(0, MAX_LENGTH), st.integers(0, MAX_LENGTH)), max_size=6),
    height_ladder=st.none() | ladders,
    width_ladder=st.none() | ladders,
    pad=st.sampled_from([0.0, 0.0, 3.0, float("nan")]),
    seed=st.integers(0, 2**20),
)
def test_axes_without_a_batch(
    provider: type[TightProvider],
    shapes: list[tuple[int, int]],
    height_ladder: tuple[int, ...] | None,
    width_ladder: tuple[int, ...] | None,
    pad: float,
    seed: int,
) -> None:
    buckets = declared(height=height_ladder, width=width_ladder)
    with engine_on(provider, "grid", buckets=buckets, pad_values={"x": pad}) as (engine, made):
        assert engine.table.batch_dim is None
        batch = [Request({"x": whole(shape, seed + i), "s": whole((), seed)}) for i, shape in enumerate(shapes)]
        check(engine, made, "grid", batch)
        assert len(made.runs) == len(batch)


MISTAKES = {
    "passed on": None,
    "index": "the model cannot run this request: ",
    "rows": "7 rows are more than max_batch_size 6",
    "dtype": "input 'mask' expects INT64, got int32",
    "axes": "input 'ids' expects 2 axes, got shape [2]",
    "unknown": "unknown input 'idz'; did you mean 'ids'?",
    "missing": "input 'mask' is missing and has no value in default_values",
    "output": "unknown output 'meen'; did you mean 'mean'?",
    "cancelled": "the request was cancelled before it ran",
}


def mistaken(mistake: str, seed: int) -> Request | RequestError:
    inputs = text(7 if mistake == "rows" else 2, 3, seed)
    if mistake == "passed on":
        return UnsupportedRequest("lies on the GPU")
    if mistake == "index":
        inputs["ids"][1, 2] = VOCABULARY
    elif mistake == "dtype":
        inputs["mask"] = inputs["mask"].astype(np.int32)
    elif mistake == "axes":
        inputs["ids"] = inputs["ids"][:, 0]
    elif mistake == "unknown":
        inputs["idz"] = inputs["ids"]
    elif mistake == "missing":
        del inputs["mask"]
    outputs = ("meen",) if mistake == "output" else ()
    return Request(inputs, outputs, lambda: mistake == "cancelled")


@pytest.mark.parametrize("provider", PROVIDERS)
@repeatable
@given(
    drawn=st.lists(
        st.tuples(st.integers(0, MAX_ROWS), st.integers(1, 5)) | st.sampled_from(sorted(MISTAKES)), max_size=12
    ),
    length_ladder=st.none() | ladders,
    seed=st.integers(0, 2**20),
)
def test_a_bad_request_gets_its_own_error_and_the_others_their_answers(
    provider: type[TightProvider],
    drawn: list[tuple[int, int] | str],
    length_ladder: tuple[int, ...] | None,
    seed: int,
) -> None:
    fields = {"max_batch_size": MAX_ROWS, "ragged": ("ids", "mask"), "buckets": declared(sequence=length_ladder)}
    with engine_on(provider, "encoder", **fields) as (engine, made):
        batch = [
            mistaken(kind, seed + i) if isinstance(kind, str) else Request(text(*kind, seed + i))
            for i, kind in enumerate(drawn)
        ]
        right = {
            i: alone(session("encoder"), text(*k, seed + i)) for i, k in enumerate(drawn) if not isinstance(k, str)
        }
        answers = list(engine.finish(engine.begin(batch)))
        assert sorted(index for index, _ in answers) == list(range(len(batch)))
        for index, answer in answers:
            kind = drawn[index]
            if not isinstance(kind, str):
                assert isinstance(answer, dict), repr(answer)
                for name, array in right[index].items():
                    np.testing.assert_array_equal(answer[name], array, strict=True)
            elif kind == "passed on":
                assert answer is batch[index]
            else:
                assert type(answer) is (CancelledRequest if kind == "cancelled" else InvalidRequest)
                message = MISTAKES[kind]
                assert message and str(answer).startswith(message) and "\n" not in str(answer)
        check_runs(engine, made)


@pytest.mark.parametrize("provider", PROVIDERS)
@repeatable
@given(rows_ladder=ladders, length_ladder=ladders)
def test_the_table_of_an_engine_is_total(
    provider: type[TightProvider], rows_ladder: tuple[int, ...], length_ladder: tuple[int, ...]
) -> None:
    """Every size from 0 to the largest and one more has the smallest bucket that holds it, or none."""
    buckets = declared(batch=rows_ladder, sequence=length_ladder)
    with engine_on(provider, "encoder", max_batch_size=MAX_ROWS, buckets=buckets) as (engine, _):
        usable = [size for size in rows_ladder if size <= MAX_ROWS] or [MAX_ROWS]
        for rows in range(MAX_ROWS + 2):
            for length in range(MAX_LENGTH + 2):
                row_size = min((size for size in usable if size >= rows), default=None)
                length_size = min((size for size in length_ladder if size >= length), default=None)
                fitted = None if row_size is None or length_size is None else (row_size, length_size)
                assert engine.table.fit((rows, length)) == fitted
