"""The figures that serving on a GPU is held to, one measure each: `python -m benchmarks gpu-figures`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import onnxruntime as ort

from benchmarks import machine, workload
from benchmarks.in_process import Inputs, load_config, plain_session, random_inputs
from benchmarks.loader import Job, LoadProcesses, Measurement
from benchmarks.rounds import Load
from benchmarks.targets import BenchmarkError, prepare
from loadtest import server_metrics
from loadtest.samples import build_pool
from loadtest.server_metrics import Series, grown
from loadtest.wire import Shot, encode
from ortgraph import Engine
from ortgraph.batch import Request
from ortgraph.buckets import Item
from ortgraph.preflight import worst_error
from ortgraph.providers.base import DeviceArray, DeviceProvider
from ortgraph.server import ROOT, TritonServer
from ortgraph.signature import Sizes
from ortgraph.staging import stage

FINER_SEQUENCE = "16,24,32,48,64,80,96,112,128"
_EDGE_NS = 50_000_000  # of a measured span at either end, where not all clients are at work
_POOL = 32
_BATCH = 14


@dataclass(frozen=True)
class Figure:
    """A row of the result: what is asked, what was measured, and whether that is enough (None: only told)."""

    measure: str
    figure: str
    asked: str
    measured: str
    is_reached: bool | None


@dataclass(frozen=True)
class Setup:
    """Where and how long: each load for `seconds`; `is_tiny` is a small model on the CPU."""

    folder: Path
    seconds: float
    is_tiny: bool = False

    def repository(self, instances: int, sequence: str = workload.SEQUENCE) -> Path:
        """The workload's."""
        cache = ROOT / ".cache" / "workload"
        options: Any = {"is_fused": False, "instances": [instances], "is_tiny": self.is_tiny, "sequence": sequence}
        return workload.write(cache, **options)[instances]

    def watched(self, instances: int, kind: str) -> Path:
        """The workload's with a model.py of watch.py: TimedModel or TracedModel."""
        source = self.repository(instances) / workload.MODEL
        repository = self.folder / f"{kind}_{instances}"
        version = repository / workload.MODEL / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text((source / "config.pbtxt").read_text())
        (version / "model.onnx").symlink_to((source / "1" / "model.onnx").resolve())
        paths = [str(ROOT), str(ROOT / "src")]
        text = f"import sys\n\nsys.path[:0] = {paths}\nfrom benchmarks.watch import {kind} as TritonPythonModel\n"
        (version / "model.py").write_text(text)
        return repository

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """The workload's model in this process."""
        folder = self.repository(1) / workload.MODEL
        engine = Engine.load(load_config(folder, "cpu" if self.is_tiny else "cuda"))
        try:
            yield engine
        finally:
            engine.close()


@dataclass(frozen=True)
class Loaded:
    """One load on one server: the span that counts on the monotonic clock, and the metrics around the whole of it."""

    measured: Measurement
    start_ns: int
    end_ns: int
    before: Series
    after: Series

    @property
    def rate(self) -> float:
        """Right answers a second."""
        return len(self.measured.latencies_ms) / self.measured.measured_s

    def grown(self, name: str, **labels: str) -> float:
        """What a counter grew by."""
        return grown(self.before, self.after, name, **labels)


def serve(
    setup: Setup, repository: Path, loads: Sequence[str], *, is_checked: bool = True, is_settled: bool = False
) -> dict[str, Loaded]:
    """Every load in turn on one server; `is_settled` waits for ortgraph's own metrics.

    Raises:
        BenchmarkError: the model did not load, or an answer was wrong or missing.
    """
    pools = {}
    for text in loads:
        load = Load.parse(text)
        samples = build_pool(
            setup.repository(1) / workload.MODEL,
            load.lengths,
            count=_POOL,
            rows=load.rows,
            is_gpu=bool(machine.gpus()) and not setup.is_tiny,
        )
        pools[text] = [Shot(encode(workload.MODEL, s.inputs, list(s.expected)), s.expected) for s in samples]
    read = server_metrics.read_settled if is_settled else server_metrics.read
    found = {}
    with (
        TritonServer(repository, log_path=setup.folder / f"{repository.name}.log") as server,
        LoadProcesses(pools) as loader,
    ):
        if failed := [model.reason for model in server.models() if model.state != "READY"]:
            raise BenchmarkError(f"{repository.name}: {failed[0]}")
        for text in loads:
            url = urlsplit(f"//{server.http_url}")
            clients = Load.parse(text).clients
            options: Any = {"load": text, "host": url.hostname, "port": url.port, "clients": clients, "tolerance": 2e-2}
            loader.run(Job(**options, warmup_s=1.0, duration_s=0.0, seed=0, is_checked=is_checked))
            before = read(server.metrics_url)
            start_ns = time.monotonic_ns()
            measured = loader.run(Job(**options, warmup_s=0.0, duration_s=setup.seconds, seed=1, is_checked=is_checked))
            end_ns = start_ns + int(setup.seconds * 1e9)
            if measured.failures or not measured.latencies_ms:
                raise BenchmarkError(f"{repository.name} under {text}: {measured.failures or 'no answer came'}")
            found[text] = Loaded(measured, start_ns + _EDGE_NS, end_ns - _EDGE_NS, before, read(server.metrics_url))
    return found


def left_by(repository: Path) -> list[dict[str, Any]]:
    """What the watched instances left.

    Raises:
        BenchmarkError: they left nothing.
    """
    files = sorted((repository / workload.MODEL / "1").glob("watch-*.json"))
    if not files:
        log = repository.with_name(f"{repository.name}.log").read_text(errors="replace")
        raise BenchmarkError(f"no instance of {repository.name} left its times; its log ends: {log[-1000:]}")
    return [json.loads(path.read_text()) for path in files]


def covered_ns(intervals: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """How much of a span the union of the intervals covers."""
    total, reached = 0, start_ns
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, end_ns)
        if end > start:
            total += end - start
            reached = end
    return total


def busy(setup: Setup) -> list[Figure]:
    """The share of wall time in which a graph runs on the device, over all instances together."""
    loads = [f"{clients}:128" for clients in (14, 28, 56, 112)]
    found = []
    for instances in (1, 2):
        repository = setup.watched(instances, "TracedModel")
        served = serve(setup, repository, loads)
        left = left_by(repository)
        shares: dict[str, list[float]] = {}
        for source in set.intersection(*(set(each["intervals"]) for each in left)):
            intervals = [(start, end) for each in left for start, end in each["intervals"][source]]
            spans = [(one.start_ns, one.end_ns) for one in served.values()]
            shares[source] = [covered_ns(intervals, *span) / (span[1] - span[0]) for span in spans]
        # CUPTI's are exact; it may give no times for graphs (a driver that cannot), which the events show.
        best = next(source for source in ("CUPTI", "events", "host") if any(shares.get(source, ())))
        texts = [
            f"{load.split(':')[0]} clients {share:.0%} ({one.rate:.0f} requests/s)"
            for (load, one), share in zip(served.items(), shares[best], strict=True)
        ]
        others = [
            f"by {source} {', '.join(f'{share:.0%}' for share in each)}"
            for source, each in shares.items()
            if source != best
        ]
        notes = {each["note"] for each in left} - {""}
        measured = "; ".join([*texts, f"by {best}", *others, *notes])
        is_reached = max(shares[best]) >= 0.85
        name = f"device busy, length 128, {instances} instance{'s'[: instances - 1]}"
        found.append(
            Figure("busy", name, *(("", measured, None) if instances == 1 else ("85 %", measured, is_reached)))
        )
    return found


def rows(setup: Setup) -> list[Figure]:
    """14 clients with 4 rows each against back-to-back replays of the largest bucket."""
    with setup.engine() as engine:
        bucket = tuple(ladder[-1] for ladder in engine.table.ladders if ladder)
        alone = bucket[0] / replay_s(engine, bucket, setup.seconds)
    found = []
    for instances in (1, 2):
        load = "14:128x4"
        rate = 4 * serve(setup, setup.repository(instances), [load])[load].rate
        measured = f"{rate / alone:.0%}: {rate:.0f} of {alone:.0f} rows/s"
        name = f"rows a second of full replays, 14 clients with 4 rows, {instances} instance{'s'[: instances - 1]}"
        found.append(Figure("rows", name, "95 %", measured, rate / alone >= 0.95))
    return found


def replay_s(engine: Engine, bucket: Sizes, seconds: float) -> float:
    """Seconds of one replay of a bucket, of as many behind each other as fill `seconds`; on the CPU of one run."""
    provider: Any = engine._provider
    slot = provider.slot(bucket)
    inputs = random_inputs(engine, bucket, np.random.default_rng(0))
    for spec in engine.signature.inputs:
        slot.stage(spec.name, spec.dtype, inputs[spec.name].shape)[...] = inputs[spec.name]
    names = [spec.name for spec in engine.signature.outputs]
    start = time.perf_counter()
    for _ in range(5):
        slot.launch(names).wait()
    count = max(int(seconds * 5 / (time.perf_counter() - start)), 1)
    if provider.name != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            slot.launch(names).wait()
        return (time.perf_counter() - start) / count
    from cuda.bindings import runtime

    from ortgraph.providers.driver import check

    ends = [check("cudaEventCreate", runtime.cudaEventCreateWithFlags(0)) for _ in range(2)]
    check("cudaEventRecord", runtime.cudaEventRecord(ends[0], provider.stream.handle))
    for _ in range(count):
        provider._session.run_with_iobinding(slot.graph.binding, slot.graph.options)
    check("cudaEventRecord", runtime.cudaEventRecord(ends[1], provider.stream.handle))
    provider.stream.synchronize()
    found_s = float(check("cudaEventElapsedTime", runtime.cudaEventElapsedTime(*ends))) / 1e3 / count
    for event in ends:
        runtime.cudaEventDestroy(event)
    provider.give_back(slot)
    return found_s


def one_client(setup: Setup) -> list[Figure]:
    """What a single request takes in the server beyond the device, against a model that does nothing."""
    with setup.engine() as engine:
        device_us = replay_s(engine, (1, 128), setup.seconds / 2) * 1e6
    noop = prepare("noop", model=workload.MODEL, source=setup.repository(1), folder=setup.folder / "noop").repository
    ours = serve(setup, setup.repository(1), ["1:128"])["1:128"]
    nothing = serve(setup, noop, ["1:128"], is_checked=False)["1:128"]
    (ours_us, ours_parts), (noop_us, noop_parts) = _duration_us(ours), _duration_us(nothing)
    ratio = (ours_us - device_us) / noop_us
    measured = (
        f"{ratio:.2f}: ({ours_us:.0f} - {device_us:.0f} of the device) / {noop_us:.0f} us; ours {ours_parts}; "
        f"no-op {noop_parts}"
    )
    name = "one client: request duration less the device's, against a no-op model"
    return [Figure("one-client", name, "1.2", measured, ratio <= 1.2)]


def _duration_us(one: Loaded) -> tuple[float, str]:
    """Triton's mean duration of a request, and its parts in words."""
    count = one.grown("nv_inference_request_success")
    mean = {
        part: one.grown(f"nv_inference_{part}_duration_us") / count
        for part in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    }
    return mean["request"], ", ".join(f"{part} {us:.0f}" for part, us in mean.items() if part != "request")


def python(setup: Setup) -> list[Figure]:
    """Microseconds of `execute` a request beyond waiting for the device, by the requests of its batch."""
    repository = setup.watched(1, "TimedModel")
    served = serve(setup, repository, ["1:128", "16:128", "48:128"])
    watched_parts = ("all", "wait", "read", "begin", "respond")
    spans = [(one.start_ns, one.end_ns) for one in served.values()]
    batches = [b for b in left_by(repository)[0]["batches"] if any(lo <= b["at_ns"] <= hi for lo, hi in spans)]
    found: list[Figure] = []
    for low, high, name in ((1, 1, "1"), (8, 15, "8 to 15"), (16, 32, "16 to 32")):
        chosen = [batch for batch in batches if low <= batch["requests"] <= high]
        count = sum(batch["requests"] for batch in chosen)
        title = f"Python a request, batches of {name}"
        if not count:
            found.append(Figure("python", title, "30 us", "no such batch came", is_reached=False))
            continue
        parts = {part: sum(batch[part] for batch in chosen) / count * 1e6 for part in watched_parts}
        own = parts["all"] - parts["wait"]
        rest = own - parts["read"] - parts["begin"] - parts["respond"]
        measured = (
            f"{own:.0f} us: reading {parts['read']:.0f}, begin {parts['begin']:.0f}, "
            f"responding {parts['respond']:.0f}, finish and the rest {rest:.0f}; {len(chosen)} batches"
        )
        found.append(Figure("python", title, *(("", measured, None) if high == 1 else ("30 us", measured, own <= 30))))
    return found


def padding(setup: Setup) -> list[Figure]:
    """Padding's share of device time by serving's own metrics, lengths 8 to 128, with two bucket ladders."""
    found = []
    for sequence in (workload.SEQUENCE, FINER_SEQUENCE):
        load = "14:8..128"
        one = serve(setup, setup.repository(2, sequence), [load], is_settled=True)[load]
        device_s = one.grown("ortgraph_device_seconds_total") or float("nan")  # nothing is captured on the CPU
        series = "ortgraph_padding_seconds_total"
        bucket, joining = (one.grown(series, cause=cause) / device_s for cause in ("bucket", "joining"))
        elements = {kind: one.grown(f"ortgraph_{kind}_elements_total") for kind in ("real", "padded")}
        of_elements = elements["padded"] / sum(elements.values())
        measured = (
            f"{bucket + joining:.1%} of device time: {bucket:.1%} up to the buckets, {joining:.1%} to join lengths; "
            f"{of_elements:.0%} of elements; {one.rate:.0f} requests/s"
        )
        name = f"padding, 14 clients, lengths 8 to 128, sequence={sequence}"
        found.append(Figure("padding", name, "20 % of device time", measured, bucket + joining <= 0.2))
    return found


def device_io(setup: Setup) -> list[Figure]:
    """In process, one row of 8 to 128 tokens, inputs on the device and outputs left there."""
    rng = np.random.default_rng(0)
    with setup.engine() as engine:
        device = "cpu" if setup.is_tiny else "cuda"
        session = plain_session(engine.config, device)
        host = [random_inputs(engine, (1, int(length)), rng) for length in rng.integers(8, 129, 128)]
        values = [{n: ort.OrtValue.ortvalue_from_numpy(a, device, 0) for n, a in each.items()} for each in host]
        ours = _Ours(engine, values, host)
        names = [spec.name for spec in engine.signature.outputs]
        variants: dict[str, tuple[int, Callable[[int], Any]]] = {
            "session.run": (1, lambda n: session.run(names, host[n])),
            "IO binding": (1, lambda n: _bound(session, values[n], names, device)),
            "ortgraph": (1, lambda n: ours.run([n])),
            f"ortgraph, {_BATCH} at hand": (_BATCH, lambda n: ours.run([(n + i) % len(host) for i in range(_BATCH)])),
        }
        for number in range(len(host)):
            error = ours.error(number, dict(zip(names, session.run(names, host[number]), strict=True)))
            if error > 2e-2:
                raise BenchmarkError(f"an answer on the device is off by {error:.1e}")
        times_s: dict[str, list[float]] = {name: [] for name in variants}
        for number in islice(cycle(range(len(host))), max(int(500 * setup.seconds), 10)):
            for name, (_, run) in variants.items():
                start = time.perf_counter()
                run(number)
                times_s[name].append(time.perf_counter() - start)
    for each in times_s.values():
        del each[: len(each) // 10]  # warming up
    p99 = {name: float(np.percentile(each, 99)) for name, each in times_s.items()}
    rate = {name: variants[name][0] / float(np.mean(each)) for name, each in times_s.items()}
    texts = [
        f"{name} p50 {np.percentile(each, 50) * 1e6:.0f}, p99 {p99[name] * 1e6:.0f} us, {rate[name]:.0f} requests/s"
        for name, each in times_s.items()
    ]
    lower = 1 - p99["ortgraph"] / p99["session.run"]
    times = max(rate[name] for name in rate if name.startswith("ortgraph")) / rate["session.run"]
    where = "in process, inputs and outputs on the device, lengths 8 to 128"
    return [
        Figure("device-io", f"P99 against session.run, {where}", "70 % lower", f"{lower:.0%} lower", lower >= 0.7),
        Figure("device-io", "throughput against session.run", "4", f"{times:.1f}: {'; '.join(texts)}", times >= 4),
    ]


def _bound(session: ort.InferenceSession, values: Mapping[str, ort.OrtValue], names: list[str], device: str) -> Any:
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        binding.bind_output(name, device, 0)
    session.run_with_iobinding(binding)
    return binding.get_outputs()


class _Ours:
    """The engine's own steps without the copy down: check, group, stage, launch, wait.

    Values are checked on host copies: the workload's `value_ranges` would bring the GPU's tensors to the host for it.
    """

    def __init__(self, engine: Engine, values: Sequence[Mapping[str, ort.OrtValue]], host: Sequence[Inputs]) -> None:
        self._engine = engine
        self._provider: Any = engine._provider
        self._is_device = isinstance(engine._provider, DeviceProvider)
        self._names = () if self._is_device else tuple(spec.name for spec in engine.signature.outputs)
        self._host = host
        self._inputs: list[dict[str, Any]] = [
            {
                name: DeviceArray(value.data_ptr(), tuple(value.shape()), each[name].dtype, value)
                if self._is_device
                else each[name]
                for name, value in placed.items()
            }
            for placed, each in zip(values, host, strict=True)
        ]

    def run(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Answer these requests; the graph (or none) and the outputs of the last group."""
        engine = self._engine
        requests = [Request(dict(self._inputs[n]), has_device_arrays=self._is_device) for n in numbers]
        items = []
        for place, number in enumerate(numbers):
            checked = engine._checker.check(Request(dict(self._host[number])))
            items.append(Item(place, checked.sizes, frozenset(self._host[number]), not checked.alone))
        for group in engine.table.group(items):
            slot = self._provider.slot(group.bucket)
            stage(slot, group, requests, engine.signature, engine._checker.fills)
            # Waited for before the next: buckets share the memory of their outputs.
            outputs, graph = slot.launch(self._names).wait(), getattr(slot, "graph", None)
            self._provider.give_back(slot)
        return graph, outputs

    def error(self, number: int, right: Mapping[str, Any]) -> float:
        """How far the answer that was left on the device lies from the right one."""
        graph, outputs = self.run([number])
        worst = 0.0
        for spec in self._engine.signature.outputs:
            if graph is not None:
                place = graph.outputs[spec.name]
                address = graph.blocks.outputs.address + place.offset_bytes
                found = self._provider.to_host(DeviceArray(address, place.shape, place.dtype.storage, None))
            else:
                found = outputs[spec.name]
            worst = max(worst, worst_error(found, right[spec.name], spec.dtype, is_coarse=True))
        return worst


MEASURES: Mapping[str, Callable[[Setup], list[Figure]]] = {
    "busy": busy,
    "rows": rows,
    "one-client": one_client,
    "python": python,
    "padding": padding,
    "device-io": device_io,
}


def merged(old: Mapping[str, Any], described: Mapping[str, Any], new: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A result with these rows in place of the same measures'; other measures' rows of the same machine stay."""
    is_same = all(old.get(key) == described[key] for key in ("hardware", "versions"))
    measured = {row["measure"] for row in new}
    kept = [row for row in old.get("rows", ()) if row["measure"] not in measured] if is_same else []
    order = list(MEASURES)
    return {**described, "rows": sorted([*kept, *new], key=lambda row: order.index(row["measure"]))}
