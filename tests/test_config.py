"""config.pbtxt, as Triton hands it over in JSON, to ModelConfig: right values, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ortgraph.config import MAX_BUCKET_SIZES, ModelConfig, TensorConfig, parse, parse_buckets
from ortgraph.dtypes import from_triton
from ortgraph.errors import ConfigError
from tests.toys import refused

PATH = Path("/models/toy/1/model.onnx")
BUCKETS_RULE = "'name=size,size; input[axis]=size', each size a whole number from 1 and no name twice"
RANGES_RULE = "'input=low..high; input=low..high', both finite and low not above high"


def parsed(**fields: Any) -> ModelConfig:
    return parse(fields, model_path=PATH)


def with_parameters(**parameters: str) -> ModelConfig:
    """Parameters as Triton writes them: `{"key": {"string_value": "value"}}`. `__` stands for a dot."""
    written = {key.replace("__", "."): {"string_value": value} for key, value in parameters.items()}
    return parsed(name="toy", parameters=written)


def test_an_empty_config_has_the_defaults() -> None:
    assert parsed() == ModelConfig("toy", "1", PATH)
    assert parsed(name="other").name == "other"


def test_triton_json_is_read_whole() -> None:
    """64-bit numbers come as text, parameters as objects, absent messages as empty ones."""
    text = json.dumps(
        {
            "name": "toy",
            "max_batch_size": 8,
            "input": [
                {"name": "ids", "data_type": "TYPE_INT64", "dims": ["-1"], "allow_ragged_batch": True},
                {"name": "image", "data_type": "TYPE_FP32", "dims": ["3", "48", "-1"], "optional": True},
            ],
            "output": [{"name": "y", "data_type": "TYPE_BF16", "dims": ["4"]}],
            "dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "100"},
            "optimization": {"graph": {"level": 1}, "cuda": {"busy_wait_events": True}},
            "model_transaction_policy": {"decoupled": False},
            "parameters": {"intra_op_thread_count": {"string_value": "2"}},
        }
    )
    config = parse(text, model_path=PATH, version="3", instance_kind="GPU", device_id=1)
    int64, fp32, bf16 = (from_triton(name) for name in ("TYPE_INT64", "TYPE_FP32", "TYPE_BF16"))
    assert int64 and fp32 and bf16
    assert config == ModelConfig(
        "toy",
        "3",
        PATH,
        max_batch_size=8,
        inputs=(
            TensorConfig("ids", int64, (-1,), is_ragged=True),
            TensorConfig("image", fp32, (3, 48, -1), is_optional=True),
        ),
        outputs=(TensorConfig("y", bf16, (4,)),),
        instance_kind="GPU",
        device_id=1,
        preferred_batch_sizes=(4, 8),
        graph_level=1,
        busy_wait_events=True,
        intra_op_thread_count=2,
    )


def test_reshape_gives_the_models_own_dims() -> None:
    entry = {"name": "x", "data_type": "TYPE_FP32", "dims": ["1"], "reshape": {"shape": []}}
    assert parsed(input=[entry]).inputs[0].dims == ()
    entry["reshape"] = {"shape": ["2", "-1"]}
    assert parsed(input=[entry]).inputs[0].dims == (2, -1)
    with refused(ConfigError, "output 'x': reshape is not supported; give the model's own dims"):
        parsed(output=[entry])


def test_without_a_batch_nothing_is_ragged() -> None:
    entry = {"name": "x", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}
    assert not parsed(input=[entry]).inputs[0].is_ragged
    assert parsed(input=[entry], max_batch_size=2).inputs[0].is_ragged


def test_tensors_that_cannot_be_served_are_refused() -> None:
    with refused(ConfigError, "input 'x': data_type TYPE_INVALID is not known"):
        parsed(input=[{"name": "x", "data_type": "TYPE_INVALID"}])
    with refused(ConfigError, "input 'x': is_shape_tensor is for TensorRT; remove it"):
        parsed(input=[{"name": "x", "data_type": "TYPE_INT32", "is_shape_tensor": True}])


def test_parameters_of_every_kind() -> None:
    config = with_parameters(
        execution_provider="cpu",
        buckets=" batch = 4,1,2,2 ; x[3]=320, 160;",
        pad_values="ids=1; x=-0.5",
        default_values="mask=1",
        value_ranges="ids=0..30521; x=-1.5..1e3",
        padding="off",
        graph_capture="off",
        inter_op_thread_count="3",
        execution_mode="1",
        cpu_streams="2",
        enable_mem_arena="0",
        enable_mem_pattern="False",
        gpu_mem_limit="1000000",
        session__intra_op__allow_spinning="0",
        ep__cuda__fpa_intb_gemm="1",
        FORCE_CPU_ONLY_INPUT_TENSORS="no",
    )
    assert config == ModelConfig(
        "toy",
        "1",
        PATH,
        execution_provider="cpu",
        buckets={"batch": (1, 2, 4), "x[3]": (160, 320)},
        pad_values={"ids": 1.0, "x": -0.5},
        default_values={"mask": 1.0},
        value_ranges={"ids": (0.0, 30521.0), "x": (-1.5, 1000.0)},
        padding="off",
        graph_capture="off",
        inter_op_thread_count=3,
        execution_mode=1,
        cpu_streams=2,
        enable_mem_arena=False,
        enable_mem_pattern=False,
        takes_gpu_inputs=True,
        provider_options={"gpu_mem_limit": "1000000"},
        session_config={"session.intra_op.allow_spinning": "0", "ep.cuda.fpa_intb_gemm": "1"},
    )


def test_a_parameter_may_be_plain_text() -> None:
    assert parsed(parameters={"padding": "off"}).padding == "off"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("execution_provider", "tpu", "one of auto, cpu, cuda, webgpu"),
        ("padding", "On", "one of auto, off"),
        ("graph_capture", "", "one of auto, required, off"),
        ("intra_op_thread_count", "-1", "a whole number from 0 to 1024"),
        ("intra_op_thread_count", "1.5", "a whole number from 0 to 1024"),
        ("inter_op_thread_count", "1025", "a whole number from 0 to 1024"),
        ("execution_mode", "2", "a whole number from 0 to 1"),
        ("cpu_streams", "0", "a whole number from 1 to 64"),
        ("enable_mem_arena", "yes", "1 or 0"),
        ("buckets", "batch", BUCKETS_RULE),
        ("buckets", "batch=", BUCKETS_RULE),
        ("buckets", "=1", BUCKETS_RULE),
        ("buckets", "batch=0,1", BUCKETS_RULE),
        ("buckets", "batch=-1", BUCKETS_RULE),
        ("buckets", "batch=1,,2", BUCKETS_RULE),
        ("buckets", "batch=1;batch=2", BUCKETS_RULE),
        ("buckets", "batch=1..4", BUCKETS_RULE),
        ("pad_values", "x=one", "'input=number; input=number'"),
        ("default_values", "x", "'input=number; input=number'"),
        ("value_ranges", "x=1", RANGES_RULE),
        ("value_ranges", "x=2..1", RANGES_RULE),
        ("value_ranges", "x=a..b", RANGES_RULE),
        ("value_ranges", "x=0..inf", RANGES_RULE),
        ("value_ranges", "x=nan..1", RANGES_RULE),
    ],
)
def test_a_bad_value_is_refused_with_its_rule(key: str, value: str, rule: str) -> None:
    with refused(ConfigError, f"parameter '{key}' must be {rule}, got '{value}'"):
        with_parameters(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("captures_on_demand", "-1", "a whole number from 0 to 4096"),
        ("max_captures", "many", "a whole number from 0 to 1000000"),
        ("buffer_pool_generations", "65", "a whole number from 0 to 64"),
        ("buffer_pool_generations", "on", "a whole number from 0 to 64"),
        ("debug", "yes", "1 or 0"),
    ],
)
def test_a_bad_value_of_a_buckets_life_is_refused(key: str, value: str, rule: str) -> None:
    with refused(ConfigError, f"parameter '{key}' must be {rule}, got '{value}'"):
        with_parameters(**{key: value})


def test_the_life_of_a_bucket_is_configured() -> None:
    config = with_parameters(
        execution_provider="webgpu",
        captures_on_demand="4",
        max_captures="100",
        buffer_pool_generations="0",
        debug="1",
        webgpu__preferredLayout="NHWC",
    )
    assert (config.captures_on_demand, config.max_captures, config.buffer_pool_generations) == (4, 100, 0)
    assert config.is_debug
    assert config.webgpu_options == {"preferredLayout": "NHWC"}
    with refused(
        ConfigError, "parameter 'captures_on_demand' needs graph capture, but 'graph_capture' is off; remove one"
    ):
        with_parameters(captures_on_demand="1", graph_capture="off")


def accelerated(name: str, options: dict[str, str] | None = None, **more: Any) -> ModelConfig:
    accelerators = {"gpu_execution_accelerator": [{"name": name, "parameters": options or {}}]}
    return parsed(optimization={"execution_accelerators": accelerators}, **more)


def test_an_accelerator_names_the_provider_and_its_options() -> None:
    config = accelerated("webgpu", {"preferredLayout": "NCHW"})
    assert (config.execution_provider, config.webgpu_options) == ("webgpu", {"preferredLayout": "NCHW"})
    # As in Triton's onnxruntime backend: for instances on a GPU, and with its numbers for ONNX Runtime's names.
    config = accelerated("cuda", {"gpu_mem_limit": "1", "cudnn_conv_algo_search": "1", "arena_extend_strategy": "1"})
    assert config.execution_provider == "auto"
    assert config.provider_options == {
        "gpu_mem_limit": "1", "cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested",
    }  # fmt: skip
    with refused(ConfigError, "unknown gpu_execution_accelerator 'tensorrt'; known: cuda, webgpu"):
        accelerated("tensorrt")
    with refused(
        ConfigError, "unknown parameter 'gpu_mem_limits' of accelerator 'cuda'; did you mean 'gpu_mem_limit'?"
    ):
        accelerated("cuda", {"gpu_mem_limits": "1"})
    with refused(
        ConfigError,
        "gpu_execution_accelerator 'webgpu' does not go with execution_provider 'cpu'; remove one of them",
    ):
        accelerated("webgpu", parameters={"execution_provider": "cpu"})


def test_batch_buckets_beyond_max_batch_size_are_noted() -> None:
    parameters = {"buckets": {"string_value": "batch=4,8,16"}}
    assert parsed(max_batch_size=16, parameters=parameters).notes == ()
    assert parsed(max_batch_size=4, parameters=parameters).notes == (
        "batch sizes 8, 16 in buckets are beyond max_batch_size and not used",
    )


def test_too_many_bucket_sizes_are_refused() -> None:
    sizes = ",".join(str(size) for size in range(1, MAX_BUCKET_SIZES + 1))
    assert parse_buckets(f"n={sizes}") == {"n": tuple(range(1, MAX_BUCKET_SIZES + 1))}
    with pytest.raises(ConfigError, match=r"^parameter 'buckets' must be at most 256 sizes for a dimension, got "):
        with_parameters(buckets=f"n={sizes},{MAX_BUCKET_SIZES + 1}")


def test_an_unknown_parameter_is_refused_with_the_nearest_one() -> None:
    with refused(ConfigError, "unknown parameter 'bucket'; did you mean 'buckets'?"):
        with_parameters(bucket="batch=1")
    with refused(ConfigError, "unknown parameter 'intra_op_threads_count'; did you mean 'intra_op_thread_count'?"):
        with_parameters(intra_op_threads_count="1")
    with pytest.raises(ConfigError, match=r"^unknown parameter 'zzz'; known: arena_extend_strategy, .*buckets, .*"):
        with_parameters(zzz="1")


def test_what_cannot_be_combined_is_refused() -> None:
    with refused(ConfigError, "model_transaction_policy.decoupled: every request has one answer here; remove it"):
        parsed(model_transaction_policy={"decoupled": True})
    with refused(ConfigError, "sequence_batching is not supported; pass the state as an input and an output"):
        parsed(sequence_batching={"max_sequence_idle_microseconds": "1"})
    for key in ("batch_input", "batch_output"):
        with refused(ConfigError, "batch_input and batch_output are not supported; ragged inputs are padded instead"):
            parsed(**{key: [{"kind": "BATCH_ELEMENT_COUNT"}]})
    with refused(ConfigError, "optimization.graph.level must be -1, 1 or 2, got 3"):
        parsed(optimization={"graph": {"level": 3}})


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        parsed().padding = "off"  # type: ignore[misc]


GPU_TWICE = [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}]
GPU_ONCE = [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}]
CPU_TWICE = [{"kind": "KIND_CPU", "count": 2, "gpus": []}]
TEXT = [{"name": "words", "data_type": "TYPE_STRING", "dims": ["1"]}]


@pytest.mark.parametrize(
    ("groups", "parameters", "inputs", "wanted"),
    [
        (GPU_TWICE, {}, [], True),
        (GPU_ONCE, {}, [], False),
        (GPU_ONCE * 2, {}, [], True),
        (GPU_ONCE, {"engine_process": "on"}, [], True),
        (GPU_TWICE, {"engine_process": "off"}, [], False),
        (GPU_TWICE, {"execution_provider": "cpu"}, [], False),
        (GPU_TWICE, {"execution_provider": "webgpu"}, [], False),
        (GPU_TWICE, {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}, [], False),
        (GPU_TWICE, {}, TEXT, False),
        (CPU_TWICE, {}, [], False),
        (CPU_TWICE, {"engine_process": "on"}, [], True),
    ],
)
def test_instances_on_a_gpu_share_an_engine_process(
    groups: list[dict[str, Any]], parameters: dict[str, str], inputs: list[dict[str, Any]], wanted: bool
) -> None:
    written = {key: {"string_value": value} for key, value in parameters.items()}
    config = parse(
        {"instance_group": groups, "parameters": written, "input": inputs},
        model_path=PATH,
        instance_kind=groups[0]["kind"].removeprefix("KIND_"),
        device_id=0,
    )
    assert config.has_engine_process is wanted


def test_an_engine_process_that_cannot_be_is_refused() -> None:
    why = "GPU tensors (FORCE_CPU_ONLY_INPUT_TENSORS: no) stay in the process that gets them"
    with refused(ConfigError, f"parameter 'engine_process' is on, but {why}; remove it"):
        with_parameters(engine_process="on", FORCE_CPU_ONLY_INPUT_TENSORS="no")
    why = "'words' is a string tensor, which has no place in shared memory"
    with refused(ConfigError, f"parameter 'engine_process' is on, but {why}; remove it"):
        parsed(parameters={"engine_process": {"string_value": "on"}}, input=TEXT)
