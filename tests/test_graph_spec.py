"""`optimization.cuda` as Triton writes it in JSON: graph_spec to buckets, and what has no effect is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortgraph import ConfigError, Engine, ModelConfig, parse
from ortgraph.graph_spec import GraphSpec
from ortgraph.providers.cpu import CpuProvider
from tests import toys
from tests.toys import refused

PATH = Path("/models/toy/1/model.onnx")
SMALLER = (
    "optimization.cuda.graph_spec: its graphs also serve smaller shapes, below a graph_lower_bound too, "
    "where padding is proven"
)
ENCODER = [{"name": name, "data_type": "TYPE_INT64", "dims": ["-1"]} for name in ("ids", "mask")]


def shapes(batch_size: int, **dims: list[int]) -> dict[str, Any]:
    """64-bit numbers are text in Triton's JSON."""
    return {
        "batch_size": batch_size,
        "input": {name: {"dim": [str(size) for size in sizes]} for name, sizes in dims.items()},
    }


def written(*specs: dict[str, Any], path: Path = PATH, batch: int = 8, **more: Any) -> ModelConfig:
    parameters = {key: {"string_value": value} for key, value in more.pop("parameters", {}).items()}
    cuda = {"graphs": True, "graph_spec": list(specs), **more.pop("cuda", {})}
    config = {"max_batch_size": batch, "optimization": {"cuda": cuda}, "parameters": parameters, **more}
    return parse(config, model_path=path)


def test_the_entries_are_read_and_what_differs_is_said() -> None:
    bounded = shapes(8, ids=[64], mask=[64]) | {"graph_lower_bound": shapes(5, ids=[33], mask=[33])}
    config = written(shapes(4, ids=[32], mask=[32]), bounded)
    assert config.graph_specs == (
        GraphSpec(4, {"ids": (32,), "mask": (32,)}),
        GraphSpec(8, {"ids": (64,), "mask": (64,)}, has_lower_bound=True),
    )
    assert config.notes == (SMALLER,)
    off = {"padding": "off"}
    assert written(shapes(4, ids=[32]), parameters=off).notes == ()
    assert written(bounded, parameters=off).notes == (
        "optimization.cuda.graph_spec: graph_lower_bound is not used, since the parameter padding is off",
    )
    config = written(bounded, parameters={"buckets": "batch=1"})
    assert config.graph_specs == ()
    assert config.notes == ("optimization.cuda.graph_spec is not used, since the parameter buckets is given",)


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_does_not_switch_capture(graphs: bool) -> None:
    config = written(cuda={"graphs": graphs})
    assert (config.graph_capture, config.notes) == ("auto", ())


def test_an_output_copy_stream_has_no_effect() -> None:
    assert written(cuda={"output_copy_stream": True}).notes == (
        "optimization.cuda.output_copy_stream has no effect: outputs are copied in the order of the model's one "
        "stream, while the next batch is staged",
    )
    assert written(cuda={"output_copy_stream": False}).notes == ()


@pytest.mark.parametrize(
    ("spec", "batch", "said"),
    [
        (shapes(9), 8, "batch_size must be from 1 to max_batch_size (8), got 9"),
        (shapes(0), 8, "batch_size must be from 1 to max_batch_size (8), got 0"),
        (shapes(1), 0, "batch_size must be 0, as max_batch_size is, got 1"),
        (shapes(1, x=[3, -1]), 8, "input 'x' must have dims from 1, got [3, -1]"),
        (shapes(1, x=[4]) | {"graph_lower_bound": shapes(1, x=[5])}, 8, "input 'x' of graph_lower_bound must not be"),
        (shapes(1, x=[4]) | {"graph_lower_bound": shapes(1, x=[4, 1])}, 8, "input 'x' of graph_lower_bound must not"),
        (shapes(1, x=[4]) | {"graph_lower_bound": shapes(1, y=[4])}, 8, "input 'y' of graph_lower_bound must not be"),
        (shapes(1, x=[4]) | {"graph_lower_bound": shapes(2, x=[4])}, 8, "batch_size of graph_lower_bound must not be"),
        (shapes(1, x=[4]) | {"graph_lower_bound": shapes(0, x=[4])}, 8, "batch_size must be from 1 to max_batch_size"),
    ],
)
def test_a_bad_entry_is_refused(spec: dict[str, Any], batch: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(spec, batch=batch)
    assert str(caught.value).startswith(f"optimization.cuda.graph_spec: {said}")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a provider that is asked to capture, and refuses each bucket."""
    monkeypatch.setattr(CpuProvider, "can_capture", True)


@pytest.mark.usefixtures("captures")
def test_sizes_become_buckets_of_the_models_dimensions(tmp_path: Path) -> None:
    path = toys.save(toys.encoder(), tmp_path)
    specs = [shapes(rows, ids=[size], mask=[size]) for rows, size in ((4, 16), (2, 16), (4, 8))]
    engine = Engine.load(written(*specs, path=path, input=ENCODER))
    assert engine.config.buckets == {"batch": (2, 4), "sequence": (8, 16)}
    assert engine.table.ladders == ((2, 4), (8, 16))
    assert engine.notes == ("4 of 4 buckets run eager: the CPU captures no graphs",)
    engine.close()


@pytest.mark.usefixtures("captures")
def test_without_a_batch_and_with_a_scalar(tmp_path: Path) -> None:
    path = toys.save(toys.grid(), tmp_path)
    engine = Engine.load(written(shapes(0, x=[3, 5], s=[1]), shapes(0, x=[2, 5]), path=path, batch=0))
    assert engine.config.buckets == {"height": (2, 3), "width": (5,)}
    engine.close()


def test_on_a_cpu_they_do_not_count(tmp_path: Path) -> None:
    path = toys.save(toys.encoder(), tmp_path)
    engine = Engine.load(written(shapes(4, ids=[16], mask=[16]), path=path, input=ENCODER))
    assert engine.table.ladders == (None, None)
    engine.close()


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (shapes(1, idz=[4]), "the model has no input 'idz'; did you mean 'ids'?"),
        (shapes(1, ids=[4, 1]), "input 'ids' has dims [4, 1], but the model [-1]"),
        (shapes(1, ids=[4], mask=[8]), "dimension 'sequence' is 4 and, in input 'mask', 8; give one size"),
    ],
)
def test_shapes_that_do_not_fit_the_model_are_refused(tmp_path: Path, spec: dict[str, Any], said: str) -> None:
    with refused(ConfigError, f"optimization.cuda.graph_spec: {said}"):
        Engine.load(written(spec, path=toys.save(toys.encoder(), tmp_path), input=ENCODER))


@pytest.mark.usefixtures("captures")
def test_a_size_beside_that_of_the_configs_dims_is_refused(tmp_path: Path) -> None:
    fixed = [{"name": "x", "data_type": "TYPE_FP32", "dims": ["6"]}]
    with refused(ConfigError, "optimization.cuda.graph_spec: 'n' is 5, but config.pbtxt's dims say 6"):
        Engine.load(written(shapes(1, x=[5]), path=toys.save(toys.affine(), tmp_path), input=fixed))
