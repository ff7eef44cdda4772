"""Which M the CUDA provider profiles its weight-only products for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgraph.config import ModelConfig, parse
from ortgraph.tactics import MAX_M, PROFILE_M, profiled_m, with_profiled_m


def config(max_batch_size: int = 4, **parameters: str) -> ModelConfig:
    entries = {key.replace("__", "."): {"string_value": value} for key, value in parameters.items()}
    return parse({"max_batch_size": max_batch_size, "parameters": entries}, model_path=Path("m/1/model.onnx"))


def test_the_m_of_an_encoder_are_rows_times_length_and_rows():
    given = with_profiled_m(config(ep__cuda__fpa_intb_gemm="1", buckets="batch=1,3; sequence=10,50"))
    profiled = [int(m) for m in given.session_config[PROFILE_M].split(",")]
    assert {1, 3, 10, 50, 30, 150} <= set(profiled)
    assert set(profiled) - {3, 10, 50, 30, 150} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert profiled == sorted(profiled)


def test_a_batch_without_sizes_gets_those_of_the_engine():
    given = with_profiled_m(config(6, ep__cuda__fpa_intb_gemm="on", buckets="sequence=100"))
    assert {100, 200, 300, 400, 600} <= {int(m) for m in given.session_config[PROFILE_M].split(",")}


@pytest.mark.parametrize("value", ["0", "off", "OFF", " 0 ", None])
def test_nothing_is_added_where_it_is_off(value: str | None):
    parameters = {"buckets": "batch=1"} | ({"ep__cuda__fpa_intb_gemm": value} if value else {})
    assert PROFILE_M not in with_profiled_m(config(**parameters)).session_config


def test_what_is_given_stays():
    given = config(ep__cuda__fpa_intb_gemm="1", ep__cuda__fpa_intb_profile_m="7", buckets="batch=1,2")
    assert with_profiled_m(given).session_config[PROFILE_M] == "7"


@given(st.lists(st.lists(st.integers(1, 2000), min_size=1, max_size=4).map(tuple), max_size=3))
def test_every_product_is_profiled_and_every_other_m_finds_a_power_of_two(ladders: list[tuple[int, ...]]):
    profiled = set(profiled_m(ladders))
    largest = 1
    for ladder in ladders:
        largest *= max(ladder)
        assert all(min(size, MAX_M) in profiled for size in ladder)
    assert min(largest, MAX_M) in profiled
    for m in range(1, min(largest, MAX_M) + 1):
        assert m in profiled or 1 << (m - 1).bit_length() in profiled
