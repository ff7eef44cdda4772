"""From requests to answers: check, group, stage, launch; then wait, split, answer. Without Triton.

`begin` starts every group of a batch and returns what is in flight; `finish` hands out the answers as each group is
done. In-flight work is a value that the caller holds. `run` and `run_batch` are the synchronous twins for tools and
tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Any

from . import signature as signatures
from .agreement import check_agreement
from .batch import Request, RequestChecker
from .buckets import BucketTable, Group, Item, Ladder, default_batch_ladder
from .config import ModelConfig
from .dtypes import as_storage
from .errors import InvalidRequest, ModelError, RequestError, RunError, UnsupportedRequest
from .graph import OnDemand, capture_buckets, replay_cost
from .graph_spec import bucket_sizes
from .metrics import Key, Metrics, interpolated
from .preflight import Findings, Preflight, RunExact
from .providers import Provider, Run, Slot, open_checked, open_provider
from .providers.base import Array, DeviceArray, DeviceProvider, HostArrays
from .responses import OutputRules, split
from .signature import BATCH, Signature, Sizes
from .staging import stage

# Asking Triton whether a request was cancelled takes about 50 us (it crosses to the server), so it is asked only
# where a request takes at least this long to run.
CANCEL_CHECK_FROM_S = 0.001

Answer = HostArrays | RequestError
_MAX_HIT_KEYS = 1024
_REAL: Key = ("ortgraph_real_elements_total", ())
_PADDED: Key = ("ortgraph_padded_elements_total", ())
_DEVICE_S: Key = ("ortgraph_device_seconds_total", ())
_BUCKET_S: Key = ("ortgraph_padding_seconds_total", (("cause", "bucket"),))
_JOINING_S: Key = ("ortgraph_padding_seconds_total", (("cause", "joining"),))


@dataclass(frozen=True)
class Flight:
    """One group that was started: its slot is given back when it is finished.

    `staged` are the arrays that the run reads, by input; what came on a GPU is missing in them.
    """

    group: Group
    slot: Slot
    run: Run
    started_s: float
    staged: Mapping[str, Array]

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""
        return self.run.is_done()


@dataclass(frozen=True)
class Batch:
    """Requests in work: groups in flight, and those refused with their error, by place in the batch."""

    requests: Sequence[Request]
    flights: Sequence[Flight]
    refused: Mapping[int, RequestError]

    @property
    def has_device_arrays(self) -> bool:
        """Whether a run reads the requests' own GPU memory, which must be there until it is over."""
        return any(request.has_device_arrays for request in self.requests)

    def is_done(self) -> bool:
        """Whether finishing it would not wait."""
        return all(flight.is_done() for flight in self.flights)

    def wait(self) -> None:
        """Block until the device is done with it; for a thread that finishes what another one started."""
        for flight in self.flights:
            flight.run.block()


class Engine:
    """One loaded model instance. All calls come from one thread."""

    def __init__(
        self,
        config: ModelConfig,
        provider: Provider,
        signature: Signature,
        findings: Findings,
        metrics: Metrics,
        on_demand: OnDemand | None,
    ) -> None:
        """Use `Engine.load`; this takes the parts it made."""
        self.config = config
        self.signature = signature
        self.findings = findings
        self.metrics = metrics
        self._on_demand = on_demand
        self._required = frozenset(spec.name for spec in signature.inputs if spec.is_required)
        self._provider = provider
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._checker = _checker(config, signature)
        self._checker.unproven = frozenset(findings.unproven)
        self._rules = OutputRules(findings.axes)
        self.fixed = _fixed(config, signature)
        self._mean_request_s = 1.0
        self._hit_keys: dict[Sizes, Key] = {}
        self.table = BucketTable(
            ladders=_ladders(config, signature, has_default=provider.can_capture),
            padded=tuple(findings.padded),
            batch_dim=signature.index(BATCH) if signature.is_batched and findings.can_join else None,
            max_rows=max(config.max_batch_size, 1),
            has_fixed_shapes=self.is_asynchronous,
            takes_exact=on_demand is not None,
            cost=findings.cost,
        )

    @classmethod
    def load(cls, config: ModelConfig, *, allow_values: bool = False) -> Engine:
        """Open the model, check it against its config, and prove what may be joined and padded.

        Args:
            allow_values: also load a model that takes or gives sequences, maps or optionals; only `run` serves it.

        Raises:
            LoadError: the model cannot be served; one line says what to change.
        """
        metrics = Metrics()
        provider = open_provider(config, metrics)
        try:
            if provider.not_tensors and not allow_values:
                raise ModelError(f"{provider.not_tensors[0]}; only tensors of known element types can be served")
            check_agreement(config, provider.inputs, provider.outputs)
            served = {tensor.name for tensor in config.outputs}
            outputs = tuple(spec for spec in provider.outputs if not served or spec.name in served)
            signature = signatures.build(
                provider.inputs, outputs, is_batched=config.max_batch_size > 0, addressed=config.buckets
            )
            if provider.can_capture and config.graph_specs:
                sizes = bucket_sizes(config.graph_specs, signature, _fixed(config, signature))
                config = replace(config, buckets=sizes, graph_specs=())
            findings, on_demand = Findings([False] * len(signature.dims), can_join=False), None
            if not provider.not_tensors:
                findings, on_demand = _examine(config, provider, signature)
            return cls(config, provider, signature, findings, metrics, on_demand)
        except BaseException:
            provider.close()
            raise

    @property
    def is_healthy(self) -> bool:
        """False when the device context is lost: the process must end."""
        return self._provider.is_healthy

    @property
    def is_asynchronous(self) -> bool:
        """Whether a started batch goes on while the next one is prepared, from memory of its own."""
        return self._provider.has_fixed_shapes or self._on_demand is not None

    @property
    def tells_when_done(self) -> bool:
        """Whether `is_done` of a batch turns True by itself; elsewhere `finish` alone finds out."""
        return self._provider.tells_when_done

    @property
    def loss(self) -> str:
        """What an unhealthy engine has lost."""
        return "the CUDA context is lost"

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that is not done, and why."""
        return tuple(self.findings.notes)

    @property
    def summary(self) -> str:
        """Provider, buckets and what else the line of a loaded model should say."""
        table, dims = self.table, self.signature.dims
        buckets = "; ".join(
            f"{dim.name}={','.join(map(str, ladder))}"
            for place, (dim, ladder) in enumerate(zip(dims, table.ladders, strict=True))
            if ladder and place not in self.fixed
        )
        padded = [dim.name for dim, is_padded in zip(dims, table.padded, strict=True) if is_padded]
        parts = (
            f"on {self.provider_name}",
            f"buckets: {buckets or 'none'}",
            f"padded: {', '.join(padded) or 'nothing'}",
            f"intra-op threads: {self.config.intra_op_thread_count or 'one a core'}",
            self._provider.remark,
        )
        return "; ".join(filter(None, parts))

    @property
    def provider_name(self) -> str:
        """The execution provider that runs the model."""
        return self._provider.name

    def begin(self, requests: Sequence[Request | RequestError]) -> Batch:
        """Check, group, stage and launch; nothing is waited for. A RequestError among the requests is passed on."""
        refused: dict[int, RequestError] = {}
        items = []
        good = [request if isinstance(request, Request) else Request({}) for request in requests]
        for index, request in enumerate(requests):
            if isinstance(request, RequestError):
                refused[index] = request
                continue
            try:
                is_cancelled = self._mean_request_s >= CANCEL_CHECK_FROM_S and request.is_cancelled()
                if request.has_device_arrays:
                    request = self._localised(request)
                    good[index] = request
                checked = self._checker.check(request, is_cancelled=is_cancelled)
            except RequestError as error:
                refused[index] = error
                continue
            items.append(Item(index, checked.sizes, frozenset(request.inputs), not checked.alone))
        return Batch(good, self._launch_all(items, good, refused), refused)

    def finish(self, batch: Batch) -> Iterator[tuple[int, Answer]]:
        """The answer of every request once, with its place in the batch; groups in the order they were started.

        Where a group fails as a whole, its requests are run again one by one, so that only a bad one gets the error.
        """
        outcomes = {"refused": len(batch.refused), "answered": 0, "failed": 0}
        yield from batch.refused.items()
        for flight in batch.flights:
            for place, answer in self._finish_flight(flight, batch.requests):
                outcomes["failed" if isinstance(answer, RequestError) else "answered"] += 1
                yield place, answer
        counts = [(("ortgraph_requests_total", (("outcome", o),)), n) for o, n in outcomes.items() if n]
        self.metrics.record(counts, ())

    def answer(self, requests: Sequence[Request | RequestError]) -> Iterator[tuple[int, Answer]]:
        """`begin` and `finish`."""
        return self.finish(self.begin(requests))

    def run_batch(self, requests: Sequence[Request | RequestError]) -> list[Answer]:
        """`answer`, in the order of the requests."""
        answers = dict(self.answer(requests))
        return [answers[index] for index in range(len(requests))]

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] = ()) -> dict[str, Any]:
        """Run one request in this process.

        Args:
            inputs: arrays (or what numpy makes one of) of the model's element types and shapes, by input name.
            outputs: the outputs wanted; empty means all.

        Returns:
            The outputs by name, in storage dtypes: bfloat16 as uint16 words, fp8 as uint8 words.

        Raises:
            RequestError: as a client would get it.
        """
        if self._provider.not_tensors:
            names = tuple(outputs) or self._provider.output_names
            return dict(zip(names, self._provider.run_values(inputs, names), strict=True))
        known = {spec.name: spec.dtype for spec in self.signature.inputs}
        arrays = {n: as_storage(n, v, known[n]) if n in known else v for n, v in inputs.items()}
        answer = self.run_batch([Request(arrays, tuple(outputs))])[0]
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def close(self) -> None:
        """Release the session; calling it twice is safe."""
        self._provider.close()

    def _localised(self, request: Request) -> Request:
        """A request with GPU tensors: those whose values must be looked at come to the host, the others stay.

        Raises:
            UnsupportedRequest: the model does not run on an NVIDIA GPU.
        """
        provider, known = self._provider, {spec.name: spec for spec in self.signature.inputs}
        if not isinstance(provider, DeviceProvider):
            raise UnsupportedRequest(f"a GPU tensor was sent to a model that runs on {provider.name}")
        inputs = dict(request.inputs)
        for name, array in inputs.items():
            if not isinstance(array, DeviceArray):
                continue
            is_whole_number = name in known and known[name].dtype.storage.kind in "iub" and not known[name].dtype.is_raw
            if not array.size or name in self.config.value_ranges or (is_whole_number and self._checker.unproven):
                inputs[name] = provider.to_host(array)
        stays = any(isinstance(array, DeviceArray) for array in inputs.values())
        return Request(inputs, request.outputs, request.is_cancelled, stays)

    def _launch_all(
        self, items: Sequence[Item], requests: Sequence[Request], refused: dict[int, RequestError]
    ) -> list[Flight]:
        """Group and launch. Values are checked on whole staged groups; only where that fails, request by request."""
        flights = []
        for group in self.table.group(items):
            flight = self._launch(group, requests, check_values=True)
            if flight is not None:
                flights.append(flight)
                continue
            good = []
            for item in group.items:
                try:
                    self._checker.check_values(requests[item.place].inputs)
                    good.append(item)
                except InvalidRequest as error:
                    refused[item.place] = error
            for again in self.table.group(good):
                checked = self._launch(again, requests)
                assert checked
                flights.append(checked)
        return flights

    def _launch(self, group: Group, requests: Sequence[Request], *, check_values: bool = False) -> Flight | None:
        """Stage and start a group; None when values are checked and one is out of its range."""
        if self._on_demand is not None and group.bucket is not None and group.items[0].key == self._required:
            self._on_demand.admit(group.bucket)
        start = time.perf_counter()
        slot = self._provider.slot(group.bucket)
        arrays = stage(slot, group, requests, self.signature, self._checker.fills)
        if check_values:
            try:
                self._checker.check_values(arrays)
            except InvalidRequest:
                self._provider.give_back(slot)
                return None
        staged = time.perf_counter()
        wanted = self._wanted(group, requests)
        rows = None
        if self.signature.is_batched:
            rows = sum(item.sizes[0] for item in group.items)
        flight = Flight(group, slot, slot.launch(wanted, rows), staged, arrays)
        self._count(group, requests, arrays, staged - start)
        return flight

    def _finish_flight(self, flight: Flight, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        group = flight.group
        try:
            outputs = flight.run.wait()
            answers: list[tuple[int, Answer]] = [
                (item.place, found) for item, found in split(group, outputs, requests, self.signature, self._rules)
            ]
        except RequestError as error:
            answers = []
            is_gone = any(requests[item.place].has_device_arrays for item in group.items)  # not in what was staged
            if len(group.items) == 1 or is_gone or not self._provider.is_healthy:
                answers += [(item.place, self._as_client_error(error)) for item in group.items]
        alone = [] if answers else self._each_alone(flight, requests)
        self._provider.give_back(flight.slot)
        run_s = time.perf_counter() - flight.started_s
        self.metrics.observe("ortgraph_run_seconds", run_s)
        self._mean_request_s += 0.1 * (run_s / len(group.items) - self._mean_request_s)
        if answers:
            yield from answers
            return
        for item, request in zip(group.items, alone, strict=True):
            self.metrics.add("ortgraph_eager_runs_total", reason="group_failed")
            group = Group((item._replace(place=0),), item.sizes, None)
            again = self._launch(group, [request])
            assert again
            for _, answer in self._finish_flight(again, [request]):
                yield item.place, answer

    def _each_alone(self, flight: Flight, requests: Sequence[Request]) -> list[Request]:
        """The requests of a group that failed, cut out of what was staged: their own memory may be gone by now."""
        alone, row = [], 0
        for item in flight.group.items:
            inputs = {}
            for name, array in flight.staged.items():
                spec = self.signature.input(name)
                assert spec
                index = [slice(size) for size in self.signature.shape(spec, item.sizes)]
                if self.signature.is_batched:
                    index[0] = slice(row, row + item.sizes[0])
                inputs[name] = array[tuple(index)].copy()
            row += item.sizes[0] if self.signature.is_batched else 0
            alone.append(Request(inputs, requests[item.place].outputs))
        return alone

    def _as_client_error(self, error: RequestError) -> RequestError:
        """A checked request on which ONNX Runtime fails has bad values or sizes, unless the device is lost."""
        if isinstance(error, RunError) and self._provider.is_healthy:
            return InvalidRequest(f"the model cannot run this request: {error}")
        return error

    def _wanted(self, group: Group, requests: Sequence[Request]) -> tuple[str, ...]:
        wanted: set[str] = set()
        for item in group.items:
            names = requests[item.place].outputs
            if not names:
                return self._outputs
            wanted.update(names)
        return tuple(name for name in self._outputs if name in wanted)

    def _count(self, group: Group, requests: Sequence[Request], staged: Mapping[str, Array], staging_s: float) -> None:
        bucket, items = group.bucket, group.items
        counts: list[tuple[Key, float]] = []
        if bucket is not None:
            key = self._hit_keys.get(bucket)
            if key is None:
                if len(self._hit_keys) >= _MAX_HIT_KEYS:  # a dimension without buckets has as many sizes as come
                    self._hit_keys.clear()
                key = self._hit_keys[bucket] = ("ortgraph_bucket_hits_total", (("bucket", self.bucket_name(bucket)),))
            counts.append((key, 1))
        if reason := self._provider.eager_reason(bucket):
            counts.append((("ortgraph_eager_runs_total", (("reason", reason),)), 1))
        elif bucket is not None and (seconds := self._replay_seconds(bucket, items)):
            counts += zip((_DEVICE_S, _BUCKET_S, _JOINING_S), seconds, strict=True)
        total = sum(array.size for array in staged.values())
        real = total
        if len(items) > 1 or items[0].sizes != group.sizes:
            real = sum(requests[item.place].inputs[name].size for item in items for name in staged)
        counts += ((_REAL, real), (_PADDED, total - real))
        rows = group.sizes[0] if self.signature.is_batched else 1
        self.metrics.record(
            counts,
            (
                ("ortgraph_group_rows", rows),
                ("ortgraph_group_requests", len(items)),
                ("ortgraph_staging_seconds", staging_s),
            ),
        )

    def _replay_seconds(self, bucket: Sizes, items: Sequence[Item]) -> tuple[float, float, float] | None:
        """The estimated time of a replay, and of it what went into padding: up to the bucket, and to join the items.

        None where no replay was timed.
        """
        ladders = [ladder for ladder, size in zip(self.table.ladders, bucket, strict=True) if ladder and size in ladder]
        if len(ladders) < len(bucket):
            return None
        cost, batch = self.table.cost, self.table.batch_dim
        whole = cost(bucket)
        longest: Sequence[float] = items[0].sizes
        mean = longest
        if len(items) > 1 and batch is not None:
            columns = list(zip(*(item.sizes for item in items), strict=True))
            rows, total = columns[batch], sum(columns[batch])
            longest = [total if dim == batch else max(column) for dim, column in enumerate(columns)]
            mean = [
                total if dim == batch else sum(map(mul, rows, column)) / total for dim, column in enumerate(columns)
            ]
        filled = min(interpolated(cost, ladders, longest), whole)
        needed = filled if mean == longest else min(interpolated(cost, ladders, mean), filled)
        return whole, whole - filled, filled - needed

    def bucket_name(self, bucket: Sizes) -> str:
        """`batch=8,sequence=64`, or `exact` for a model without buckets.

        A dimension without a ladder, or whose size the config fixes, is left out. An exact size beside a ladder is
        `other`, so that a metric has no label for every size there is.
        """
        parts = [
            f"{dim.name}={size if size in ladder else 'other'}"
            for place, (dim, size, ladder) in enumerate(
                zip(self.signature.dims, bucket, self.table.ladders, strict=True)
            )
            if ladder is not None and place not in self.fixed
        ]
        return ",".join(parts) or "exact"


def _checker(config: ModelConfig, signature: Signature) -> RequestChecker:
    return RequestChecker(
        signature,
        pad_values=config.pad_values,
        default_values=config.default_values,
        value_ranges=config.value_ranges,
        max_batch_size=config.max_batch_size,
    )


def _fixed(config: ModelConfig, signature: Signature) -> dict[int, int]:
    """The dimensions that the config gives one size, by place."""
    offset = 1 if signature.is_batched else 0
    fixed = {(t.name, axis + offset): size for t in config.inputs for axis, size in enumerate(t.dims) if size > 0}
    return {i: fixed[axis] for i, dim in enumerate(signature.dims) for axis in dim.axes if axis in fixed}


def _ladders(config: ModelConfig, signature: Signature, *, has_default: bool) -> tuple[Ladder | None, ...]:
    """The declared bucket sizes of each dimension, one where the config fixes it; the batch gets its own by default."""
    found: list[Ladder | None] = [None] * len(signature.dims)
    if has_default or config.buckets:
        for place, size in _fixed(config, signature).items():
            found[place] = (size,)
    for name, sizes in config.buckets.items():
        found[signature.index(name)] = sizes
    if signature.is_batched and (batch := found[0]) is not None:
        found[0] = tuple(size for size in batch if size <= config.max_batch_size) or (config.max_batch_size,)
    elif signature.is_batched and (has_default or any(found)):
        found[0] = default_batch_ladder(config.max_batch_size, config.preferred_batch_sizes)
    return tuple(found)


def _run_exact(provider: Provider, signature: Signature, inputs: dict[str, Array]) -> HostArrays:
    """One run of just these inputs."""
    slot = provider.slot(None)
    try:
        for spec in signature.inputs:
            if spec.name in inputs:
                slot.borrow(spec.name, spec.dtype, inputs[spec.name])
        return slot.launch([spec.name for spec in signature.outputs]).wait()
    finally:
        provider.give_back(slot)


def _examine(config: ModelConfig, provider: Provider, signature: Signature) -> tuple[Findings, OnDemand | None]:
    """Run the preflight: dimensions with buckets or with allow_ragged_batch are candidates for padding.

    Then capture what is declared; what is captured later, where that is asked for, is proven with the same preflight.
    """
    ragged = {tensor.name for tensor in config.inputs if tensor.is_ragged}
    ladders, known = _ladders(config, signature, has_default=False), _fixed(config, signature)
    candidates = [
        config.padding == "auto"
        and place not in known
        and (ladder is not None or any(n in ragged for n, _ in dim.axes))
        for place, (dim, ladder) in enumerate(zip(signature.dims, ladders, strict=True))
    ]
    fills = _checker(config, signature).fills
    twin: Provider | None = None
    run_checked: RunExact | None = None
    if not provider.checks_indices:

        def run_checked(inputs: dict[str, Array]) -> HostArrays:
            nonlocal twin
            twin = twin or open_checked(config)
            return _run_exact(twin, signature, inputs)

    preflight = Preflight(
        signature,
        partial(_run_exact, provider, signature),
        fills,
        known,
        config.value_ranges,
        run_checked=run_checked,
        rounding=provider.rounding,
        max_rows=config.max_batch_size,
    )
    try:
        findings = preflight.examine(ladders, candidates)
    finally:
        if twin is not None:
            twin.close()
    if provider.can_capture and config.graph_capture != "off":
        ladders = _ladders(config, signature, has_default=True)
        is_required = config.graph_capture == "required"
        limit = config.captures_on_demand
        captured = capture_buckets(provider, signature, ladders, preflight, is_required=is_required, on_demand=limit)
        findings.notes += captured.notes
        findings.cost = replay_cost(captured.seconds, findings.cost)
        if limit and not provider.why_eager:
            return findings, OnDemand(provider, signature, preflight, limit)
    return findings, None
