"""ONNX's own backend test data through `Engine.run`: what plain onnxruntime passes, passes here with the same bits."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnx.backend.test.loader import DATA_DIR, load_model_tests
from onnx.backend.test.runner import Runner

from ortgraph import Engine, ModelConfig, OrtgraphError
from ortgraph.dtypes import DType, from_ort

# kind -> (cases in onnx 1.23.2, how many of them pass in plain onnxruntime 1.31.1: at least so many must pass here)
COUNTS = {
    "node": (1884, 1449),
    "simple": (23, 17),
    "real": (9, 9),
    "pytorch-converted": (82, 59),
    "pytorch-operator": (35, 24),
}
ML_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


@dataclass
class Case:
    """One model with its data sets: inputs by name and the outputs that ONNX expects."""

    name: str
    path: Path
    data: list[tuple[dict[str, Any], list[Any]]]
    rtol: float
    atol: float


def cases(kind: str, folder: Path) -> Iterator[Case]:
    """Every case of a kind, one at a time; models are written to `folder` where the package has no file for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx overflows on purpose while it makes its expected values
        found = load_model_tests(kind=kind)
    for case in sorted(found, key=lambda case: case.name):
        if case.model is not None:
            path = folder / "model.onnx"
            onnx.save(case.model, path)
            names = [value.name for value in case.model.graph.input]
            data = [
                (dict(zip(names, map(plain_value, inputs), strict=False)), list(map(plain_value, outputs)))
                for inputs, outputs in case.data_sets
            ]
        elif case.url:  # "real" models come with the package, without their weights
            path = Path(DATA_DIR) / "light" / Path(case.url).name
            data = [real_data(path)]
        else:
            path = Path(case.model_dir) / "model.onnx"
            data = [stored_data(path, folder) for folder in sorted(path.parent.glob("test_data_set*"))]
        yield Case(case.name, path, data, case.rtol, case.atol)


def plain_value(value: Any) -> Any:
    """An array, or a list of them; ONNX's scalars are numpy scalars, which no session takes."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def real_data(path: Path) -> tuple[dict[str, Any], list[Any]]:
    graph = onnx.load(path).graph
    weights = {weight.name for weight in graph.initializer}
    inputs = {i.name: Runner.generate_dummy_data(i) for i in graph.input if i.name not in weights}
    expected = onnx.load_tensor(str(path).replace(".onnx", "_output_0.pb"))
    return inputs, [numpy_helper.to_array(expected)]


def stored_data(model_path: Path, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    graph = onnx.load(model_path).graph

    def read(kind: str, values: Sequence[onnx.ValueInfoProto]) -> list[Any]:
        found = []
        for i in range(len(list(folder.glob(f"{kind}_*.pb")))):
            text = (folder / f"{kind}_{i}.pb").read_bytes()
            if values[i].type.HasField("sequence_type"):
                found.append(numpy_helper.to_list(onnx.SequenceProto.FromString(text)))
            else:
                found.append(numpy_helper.to_array(onnx.TensorProto.FromString(text)))
        return found

    inputs = read("input", graph.input)
    return dict(zip([i.name for i in graph.input], inputs, strict=False)), read("output", graph.output)


class Plain:
    """`InferenceSession` with default options; bfloat16 and fp8, which numpy lacks, go in and out as OrtValues."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = [node.name for node in self.session.get_outputs()]
        nodes = [*self.session.get_inputs(), *self.session.get_outputs()]
        self.types = {node.name: from_ort(node.type) for node in nodes}

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The outputs by name, raw types as words, as the engine gives them."""
        if not any(dtype is not None and dtype.is_raw for dtype in self.types.values()):
            return dict(zip(self.names, self.session.run(self.names, inputs), strict=True))
        feeds = {name: to_ort_value(value, self.types[name]) for name, value in inputs.items()}
        values = self.session.run_with_ort_values(self.names, feeds)
        return {name: from_ort_value(v, self.types[name]) for name, v in zip(self.names, values, strict=True)}

    def check(self, case: Case, answer: dict[str, Any], expected: Sequence[Any]) -> None:
        """Compare with ONNX's expected outputs as its runner does. Raises AssertionError where they differ."""
        pairs = []
        for (name, got), wanted in zip(answer.items(), expected, strict=True):
            dtype = self.types[name]
            if dtype is not None and dtype.is_raw:
                got = got.view(ML_DTYPES[dtype.onnx_name])
                assert got.dtype == wanted.dtype
            if dtype is not None and dtype.onnx_name.startswith("float8"):  # numpy cannot promote it
                got, wanted = got.astype(np.float32), wanted.astype(np.float32)
            pairs.append((wanted, got))
        Runner.assert_similar_outputs([w for w, _ in pairs], [g for _, g in pairs], rtol=case.rtol, atol=case.atol)


def to_ort_value(value: Any, dtype: DType | None) -> ort.OrtValue:
    assert dtype is not None, "only tensors go beside bfloat16 and fp8"
    words = value.view(dtype.storage) if dtype.is_raw else value
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.asarray(words, order="C"), dtype.onnx_id)


def from_ort_value(value: ort.OrtValue, dtype: DType | None) -> Any:
    if dtype is None or not dtype.is_raw:
        return value.numpy()
    count = math.prod(value.shape())
    words = ctypes.string_at(value.data_ptr(), count * dtype.storage.itemsize) if count else b""
    return np.frombuffer(words, dtype.storage).reshape(value.shape())


def assert_same(got: Any, wanted: Any, where: str) -> None:
    """Equal to the bit: types, shapes, values, NaNs; in sequences item by item."""
    if isinstance(wanted, (list, tuple)):
        assert isinstance(got, (list, tuple)) and len(got) == len(wanted), where
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(wanted, np.ndarray):
        assert isinstance(got, np.ndarray) and got.dtype == wanted.dtype and got.shape == wanted.shape, where
        is_same = np.array_equal(got, wanted) if wanted.dtype == object else got.tobytes() == wanted.tobytes()
        assert is_same, f"{where}: {got!r} is not {wanted!r}"
    else:
        assert type(got) is type(wanted) and got == wanted, where


def passes_plain(case: Case) -> list[dict[str, Any]] | None:
    """Plain onnxruntime's answers where they are as expected, else None (it lacks the operator, type or opset)."""
    try:
        plain = Plain(case.path)
        answers = [plain.run(inputs) for inputs, _ in case.data]
        for answer, (_, expected) in zip(answers, case.data, strict=True):
            plain.check(case, answer, expected)
    except Exception:
        return None
    return answers


@pytest.mark.parametrize("kind", COUNTS)
def test_every_case_that_onnxruntime_passes_gives_the_same_answer(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    total = passed_plain = passed_here = 0
    failures = []
    for case in cases(kind, tmp_path):
        total += 1
        wanted = passes_plain(case)
        if wanted is None:
            continue
        passed_plain += 1
        try:
            engine = Engine.load(ModelConfig(case.name, "1", case.path), allow_values=True)
            for (inputs, _), answer in zip(case.data, wanted, strict=True):
                got = engine.run(inputs)
                assert list(got) == list(answer)
                for name in answer:
                    assert_same(got[name], answer[name], name)
            engine.close()
            passed_here += 1
        except (OrtgraphError, AssertionError) as error:
            failures.append(f"{case.name}: {error}")
    with capsys.disabled():
        print(f"\nONNX backend test, {kind}: {total} cases, {passed_plain} pass in onnxruntime, {passed_here} here")
    assert not failures, "\n".join(failures)
    all_cases, at_least = COUNTS[kind]
    assert total >= all_cases
    assert passed_here == passed_plain >= at_least
