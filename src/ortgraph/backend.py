"""TritonPythonModel: the only file that knows Triton's Python backend."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from . import dlpack
from .batch import Request
from .config import ModelConfig, parse
from .dtypes import DType
from .engine import Answer, Engine
from .errors import InvalidRequest, LoadError, RequestError, first_line
from .metrics import GAUGES, Labels, MetricsThread, describe
from .pipeline import Pipeline
from .providers import open_provider
from .providers.base import Array, HostArrays
from .remote import RemoteEngine
from .signature import Signature, TensorSpec

# Axis names that exporters give to the batch: only then does a model without a config get a max_batch_size.
_BATCH_NAMES = re.compile(r"bs|(?i:(.*[._])?batch(_?size)?)")
DEFAULT_MAX_BATCH_SIZE = 32
# A stub built before numpy 2 misreads numpy 2's arrays (it sends empty bodies and dies of BYTES). With such a pair
# tensors go through DLPack, which is right everywhere but takes 10 us more a tensor.
_STUB_KNOWS_NUMPY = np.__version__.startswith("1.") or b"numpy._core" in Path("/proc/self/exe").read_bytes()


class TritonPythonModel:
    """Serves the `model.onnx` of its version folder."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in inputs, outputs and, where neither was written, batching, from the ONNX model.

        A model that cannot be read is left to `initialize`, which says why.
        """
        written = copy.deepcopy(auto_complete_model_config.as_dict())  # it changes with every add_ below
        try:
            config = ModelConfig(written["name"], "1", _model_path(written, pb_utils.get_model_dir()), graph_level=2)
            provider = open_provider(config)
        except LoadError:
            return auto_complete_model_config
        inputs = [spec for spec in provider.inputs if spec.dtype.triton]
        outputs = [spec for spec in provider.outputs if spec.dtype.triton]
        provider.close()
        has_io = bool(written.get("input") or written.get("output"))
        if not has_io and not written.get("max_batch_size") and _is_batchable(inputs, outputs):
            auto_complete_model_config.set_max_batch_size(DEFAULT_MAX_BATCH_SIZE)
            if not any(key in written for key in ("dynamic_batching", "sequence_batching")):
                auto_complete_model_config.set_dynamic_batching()
        is_batched = auto_complete_model_config.as_dict().get("max_batch_size", 0) > 0
        for spec in () if written.get("input") else inputs:
            auto_complete_model_config.add_input(_config_entry(spec, is_batched))
        for spec in () if written.get("output") else outputs:
            auto_complete_model_config.add_output(_config_entry(spec, is_batched))
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; it is ready when this returns. A failure is one line that says what to change."""
        self._engine: Engine | RemoteEngine | None = None
        self._pipeline: Pipeline | None = None
        self._metrics: MetricsThread | None = None
        written = json.loads(args["model_config"])
        try:
            config = parse(
                written,
                model_path=_model_path(written, pb_utils.get_model_dir()),
                version=args["model_version"],
                instance_kind=args["model_instance_kind"],
                device_id=int(args["model_instance_device_id"]),
            )
            _check_stub(config)
            start = time.perf_counter()
            self._engine = RemoteEngine.load(config) if config.has_engine_process else Engine.load(config)
            _check_carried(self._engine.signature)
        except LoadError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from None
        load_s = time.perf_counter() - start
        pb_utils.Logger.log_info(
            f"ortgraph: {args['model_name']} version {args['model_version']} loaded and checked in {load_s:.1f} s "
            f"{self._engine.summary}"
        )
        for note in (*config.notes, *self._engine.notes):
            pb_utils.Logger.log_warn(f"ortgraph: {args['model_name']}: {note}")
        signature, sink = self._engine.signature, _TritonMetrics(args["model_name"], args["model_version"])
        self._dtypes = {spec.name: spec.dtype for spec in signature.inputs + signature.outputs}
        if config.response_mode == "sender" and isinstance(self._engine, Engine) and self._engine.is_asynchronous:
            self._pipeline = Pipeline(self._engine, config.batches_in_flight)
        self._metrics = MetricsThread(self._engine.metrics, sink.add)
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection goes over it while requests wait

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer a batch: one response for each request, in order; a bad one gets its own error.

        With `response_mode` sender the answers follow through each request's response sender, and this returns None.
        """
        assert self._engine
        if self._pipeline is not None:
            batch = self._pipeline.begin(lambda: [self._read(request) for request in requests])
            senders = [request.get_response_sender() for request in requests]
            self._pipeline.submit(batch, lambda index, answer: self._send(senders[index], answer))
            if batch.has_device_arrays:
                batch.wait()  # Triton takes the requests' memory back when this returns
            return None
        responses: list[Any] = [None] * len(requests)
        for index, answer in self._engine.answer([self._read(request) for request in requests]):
            responses[index] = self._respond(answer)
        self._end_if_lost()
        return responses

    def _send(self, sender: Any, answer: Answer) -> None:
        try:
            sender.send(self._respond(answer), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # the others of its batch, and the batches after it, are still to be answered
            pb_utils.Logger.log_error(f"ortgraph: an answer could not be sent: {first_line(error)}")
        self._end_if_lost()

    def _end_if_lost(self) -> None:
        """A lost engine cannot be mended in this process: end it, so that nothing answers from a ruin."""
        if self._engine is not None and not self._engine.is_healthy:
            pb_utils.Logger.log_error(f"ortgraph: {self._engine.loss}; this process ends, restart the server")
            os._exit(70)

    def is_ready(self) -> bool:
        """Whether the model can answer (asked by Triton 26.03 and later)."""
        engine = getattr(self, "_engine", None)
        return engine is not None and engine.is_healthy

    def finalize(self) -> None:
        """Undo initialize in reverse."""
        if self._pipeline is not None:
            self._pipeline.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _read(self, request: Any) -> Request | RequestError:
        """Borrow a request's tensors: no copy, valid until `execute` returns."""
        try:
            inputs, is_on_device = {}, False
            for tensor in request.inputs():
                name = tensor.name()
                if tensor.is_cpu():
                    inputs[name] = _host_array(name, tensor, self._dtypes.get(name))
                else:
                    inputs[name], is_on_device = _device_array(name, tensor, self._dtypes.get(name)), True
            return Request(inputs, tuple(request.requested_output_names()), request.is_cancelled, is_on_device)
        except RequestError as error:
            return error
        except pb_utils.TritonModelException as error:
            return InvalidRequest(first_line(error))

    def _respond(self, answer: Answer) -> Any:
        if isinstance(answer, RequestError):
            return _error_response(answer)
        return pb_utils.InferenceResponse(self._tensors(answer))

    def _tensors(self, answer: HostArrays) -> list[Any]:
        return [_triton_tensor(name, array, self._dtypes[name]) for name, array in answer.items()]


def _host_array(name: str, tensor: Any, dtype: DType | None) -> Array:
    if dtype is None:
        raise InvalidRequest(f"unknown input '{name}'")
    if dtype.is_raw:
        return dlpack.borrow_raw(tensor, name, dtype.storage)
    array: Array = tensor.as_numpy() if _STUB_KNOWS_NUMPY or dtype.is_string else np.from_dlpack(tensor)
    return array


def _device_array(name: str, tensor: Any, dtype: DType | None) -> Any:
    if dtype is None:
        raise InvalidRequest(f"unknown input '{name}'")
    return dlpack.borrow_device(tensor, name, dtype.storage)


def _triton_tensor(name: str, array: Array, dtype: DType) -> Any:
    if array.ndim == 0:  # Triton has no scalars
        array = array.reshape(1)
    if dtype.is_string:
        texts = [text.encode() if isinstance(text, str) else bytes(text) for text in array.ravel()]
        encoded = np.empty(len(texts), np.object_)
        encoded[:] = texts
        return pb_utils.Tensor(name, encoded.reshape(array.shape))
    if _STUB_KNOWS_NUMPY and not dtype.is_raw:
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, dlpack.Lent(array, dtype))


def _error_response(error: RequestError) -> Any:
    code = getattr(pb_utils.TritonError, error.status, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error), code))


def _model_path(written: dict[str, Any], version_folder: str) -> Path:
    name = str(written.get("default_model_filename") or "model.onnx")
    return Path(version_folder) / (name if name.endswith(".onnx") else "model.onnx")


def _is_batchable(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """The first axis of every tensor is dynamic, and the inputs name it as a batch and have more than it.

    An input of rows of one number would need `reshape`, which cannot be completed: it is served without batching.
    """
    firsts = [spec.shape[0] if spec.shape else 0 for spec in (*inputs, *outputs)]
    named = [isinstance(first, str) and _BATCH_NAMES.fullmatch(first) for first in firsts[: len(inputs)]]
    has_rows = all(len(spec.shape) > 1 for spec in inputs)
    return bool(inputs) and all(named) and has_rows and not any(isinstance(first, int) for first in firsts)


def _config_entry(spec: TensorSpec, is_batched: bool) -> dict[str, Any]:
    dims = [size if isinstance(size, int) else -1 for size in spec.shape[1 if is_batched else 0 :]] or [1]
    entry = {"name": spec.name, "data_type": spec.dtype.triton, "dims": dims}
    return entry if spec.is_required else {**entry, "optional": True}


def _check_stub(config: ModelConfig) -> None:
    """A stub built before numpy 2 reads BYTES wrongly under numpy 2 and dies: refuse instead.

    Raises:
        LoadError: the model has a string tensor and this pair cannot carry it.
    """
    has_strings = any(tensor.dtype.is_string for tensor in config.inputs + config.outputs)
    if has_strings and not _STUB_KNOWS_NUMPY:
        raise LoadError("this Triton's Python stub cannot carry BYTES with numpy 2; install 'numpy<2' or update Triton")


def _check_carried(signature: Signature) -> None:
    """Without config.pbtxt's inputs and outputs such a tensor would silently be left out.

    Raises:
        LoadError: Triton has no such element type.
    """
    for spec in signature.inputs + signature.outputs:
        if spec.is_required and not spec.dtype.triton:
            raise LoadError(
                f"'{spec.name}' is {spec.dtype.short}, which Triton cannot carry; cast it to another type in the model"
            )


class _TritonMetrics:
    """Triton's custom metrics: a family for each series name, a metric for each set of labels, made when first used."""

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add to the counter or gauge on Triton's endpoint."""
        metric = self._metrics.get((name, labels))
        if metric is None:
            family = self._families.get(name)
            if family is None:
                kind = pb_utils.MetricFamily.GAUGE if name in GAUGES else pb_utils.MetricFamily.COUNTER
                family = self._families[name] = pb_utils.MetricFamily(name=name, description=describe(name), kind=kind)
            metric = self._metrics[name, labels] = family.Metric(labels={**self._labels, **dict(labels)})
        metric.increment(value)
