"""An engine in a process of its own, asked by several instances: right answers, and what its death costs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from ortgraph.batch import Request
from ortgraph.config import ModelConfig
from ortgraph.engine import Answer
from ortgraph.errors import InvalidRequest, LoadError, LostEngineError, ModelError, RequestError, UnsupportedRequest
from ortgraph.metrics import Labels
from ortgraph.remote import RemoteEngine
from tests import toys

INSTANCES = 3


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return toys.config(
        toys.save(toys.encoder(), tmp_path),
        max_batch_size=16,
        ragged=("ids", "mask"),
        buckets={"sequence": (4, 8)},
        value_ranges={"ids": (-50, 49), "mask": (0, 1)},
    )


@pytest.fixture
def instances(config: ModelConfig) -> Iterator[list[RemoteEngine]]:
    engines = [RemoteEngine.load(config) for _ in range(INSTANCES)]
    yield engines
    for engine in engines:
        engine.close()


def pid(engines: list[RemoteEngine]) -> int:
    """The engine process, which the first instance has started."""
    assert engines[0]._link
    assert engines[0]._link._process
    return engines[0]._link._process.pid


def text(rng: np.random.Generator, rows: int, length: int) -> dict[str, Any]:
    mask = rng.integers(0, 2, (rows, length))
    mask[:, 0] = 1
    return {"ids": rng.integers(-50, 50, (rows, length)), "mask": mask}


def answers(engine: RemoteEngine, inputs: list[Mapping[str, Any] | RequestError]) -> list[Answer]:
    """Copied, in order."""
    requests = [i if isinstance(i, RequestError) else Request(dict(i)) for i in inputs]
    found = {
        place: a if isinstance(a, RequestError) else {name: array.copy() for name, array in a.items()}
        for place, a in engine.answer(requests)
    }
    assert sorted(found) == list(range(len(inputs)))
    return [found[place] for place in range(len(inputs))]


def series(engine: RemoteEngine) -> dict[tuple[str, Labels], float]:
    found: dict[tuple[str, Labels], float] = {}
    engine.metrics.pass_on(lambda name, labels, value: found.__setitem__((name, labels), value))
    return found


def stopped(engines: list[RemoteEngine]) -> int:
    """Stop the process, so that what is sent from now on waits together."""
    process = pid(engines)
    os.kill(process, signal.SIGSTOP)
    while Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] != "T":
        time.sleep(0.001)
    return process


def sent(engines: list[RemoteEngine], inputs: list[Any]) -> list[Future[list[Answer]]]:
    """Each instance's batch, sent and not answered."""
    pool = ThreadPoolExecutor(len(engines))
    arrived = threading.Barrier(len(engines) + 1)
    futures = []
    for engine, batch in zip(engines, inputs, strict=True):

        def receive(engine: RemoteEngine = engine) -> Any:
            arrived.wait()
            del engine._receive  # type: ignore[method-assign]
            return engine._receive()

        engine._receive = receive  # type: ignore[method-assign]
        futures.append(pool.submit(answers, engine, batch))
    pool.shutdown(wait=False)
    arrived.wait()
    return futures


def check(session: ort.InferenceSession, inputs: Mapping[str, Any], answer: Answer) -> None:
    assert not isinstance(answer, RequestError), answer
    for name, wanted in toys.alone(session, inputs).items():
        np.testing.assert_array_equal(answer[name], wanted, strict=True)


def test_instances_get_right_answers_at_once(instances: list[RemoteEngine]) -> None:
    session = toys.plain(toys.encoder())

    def ask(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(100):
            batch: list[Any] = [text(rng, int(rng.integers(1, 4)), int(rng.integers(1, 9))) for _ in range(5)]
            for inputs, answer in zip(batch, answers(instances[number], batch), strict=True):
                check(session, inputs, answer)

    with ThreadPoolExecutor(INSTANCES) as pool:
        list(pool.map(ask, range(INSTANCES)))
    counted = series(instances[0])
    assert counted["ortgraph_requests_total", (("outcome", "answered"),)] == INSTANCES * 100 * 5
    assert series(instances[1]) == {}


def test_what_waits_together_runs_together(instances: list[RemoteEngine]) -> None:
    rng = np.random.default_rng(0)
    inputs = [text(rng, 2, 4) for _ in range(INSTANCES)]
    check(toys.plain(toys.encoder()), inputs[0], answers(instances[0], [inputs[0]])[0])
    series(instances[0])
    process = stopped(instances)
    futures = sent(instances, [[each] for each in inputs])
    os.kill(process, signal.SIGCONT)
    for each, future in zip(inputs, futures, strict=True):
        check(toys.plain(toys.encoder()), each, future.result()[0])
    counted = series(instances[2])
    assert counted["ortgraph_group_requests_count", ()] == 1
    assert counted["ortgraph_group_rows_sum", ()] == 2 * INSTANCES


def test_a_bad_request_gets_its_error_alone(instances: list[RemoteEngine]) -> None:
    good = text(np.random.default_rng(1), 1, 4)
    batch: list[Any] = [
        good,
        {"ids": good["ids"]},
        UnsupportedRequest("not this"),
        {**good, "ids": good["ids"] + 1000},
        good,
    ]
    found = answers(instances[1], batch)
    session = toys.plain(toys.encoder())
    check(session, good, found[0])
    check(session, good, found[4])
    assert isinstance(found[1], InvalidRequest)
    assert "'mask'" in str(found[1])
    assert (type(found[2]), str(found[2])) == (UnsupportedRequest, "not this")
    assert isinstance(found[3], InvalidRequest)
    assert "outside -50..49" in str(found[3])


def test_requested_outputs_cancelled_requests_and_an_empty_batch(instances: list[RemoteEngine]) -> None:
    inputs = text(np.random.default_rng(2), 1, 4)
    engine = instances[0]
    (first, second) = (dict(engine.answer([Request(dict(inputs), ("mean",))]))[0], None)
    assert not isinstance(first, RequestError)
    assert list(first) == ["mean"]
    engine._mean_request_s = 1.0
    second = dict(engine.answer([Request(dict(inputs), (), lambda: True)]))[0]
    assert isinstance(second, RequestError)
    assert second.status == "CANCELLED"
    assert dict(engine.answer([])) == {}


def test_large_arrays_go_through_and_the_memory_grows_with_them(tmp_path: Path) -> None:
    engine = RemoteEngine.load(toys.config(toys.save(toys.affine(), tmp_path)))
    for size in (1, 300_000, 3_000_000, 5, 0):
        x = np.random.default_rng(size).standard_normal((1, size)).astype(np.float32)
        (found,) = answers(engine, [{"x": x}])
        assert not isinstance(found, RequestError)
        np.testing.assert_array_equal(found["y"], 2 * x, strict=True)
    engine.close()


def test_the_process_ends_with_its_last_instance(config: ModelConfig) -> None:
    first, second = RemoteEngine.load(config), RemoteEngine.load(config)
    assert first._link
    process = first._link._process
    assert process
    assert second._link
    assert second._link._process is None
    first.close()
    assert process.poll() is None
    (answer,) = answers(second, [text(np.random.default_rng(0), 1, 3)])
    assert not isinstance(answer, RequestError)
    second.close()
    assert process.wait(30) == 0


def test_a_death_costs_what_was_in_flight_and_a_new_process_serves_on(instances: list[RemoteEngine]) -> None:
    session, inputs = toys.plain(toys.encoder()), text(np.random.default_rng(3), 2, 5)
    check(session, inputs, answers(instances[0], [inputs])[0])
    process = stopped(instances)
    futures = sent(instances[:2], [[inputs, inputs], [inputs]])
    os.kill(process, signal.SIGKILL)
    for number, future in enumerate(futures):
        for answer in future.result():
            assert isinstance(answer, LostEngineError)
            assert answer.status == "UNAVAILABLE"
            assert str(answer) == "the engine process ended" + (" by SIGKILL" if number == 0 else "")
    for engine in instances:  # the third had nothing in flight: it sees no error at all
        check(session, inputs, answers(engine, [inputs])[0])
        assert engine.is_healthy
    assert series(instances[1])["ortgraph_requests_total", (("outcome", "answered"),)] == INSTANCES


def test_a_process_that_cannot_be_started_again_makes_the_engine_unhealthy(
    instances: list[RemoteEngine], config: ModelConfig
) -> None:
    inputs = text(np.random.default_rng(4), 1, 4)
    config.model_path.write_bytes(b"no model any more")
    assert instances[0]._link
    process = instances[0]._link._process
    assert process
    process.kill()
    process.wait()
    (answer,) = answers(instances[0], [inputs])
    assert isinstance(answer, LostEngineError)
    assert not instances[0].is_healthy
    assert "the engine process ended" in instances[0].loss


def test_a_process_that_dies_again_without_an_answer_makes_the_engine_unhealthy(instances: list[RemoteEngine]) -> None:
    inputs = text(np.random.default_rng(5), 1, 4)
    engine = instances[0]
    check(toys.plain(toys.encoder()), inputs, answers(engine, [inputs])[0])
    for is_healthy in (True, False):
        process = stopped(instances)
        (future,) = sent([engine], [[inputs]])
        os.kill(process, signal.SIGKILL)
        assert isinstance(future.result()[0], LostEngineError)
        assert engine.is_healthy is is_healthy
        if is_healthy:
            engine._channel()  # starts the next


def test_a_model_that_cannot_be_loaded_says_so_to_every_instance(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    made = toys.config(path)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(RemoteEngine.load, made) for _ in range(2)]
    for future in futures:
        with pytest.raises(LoadError) as caught:
            future.result()
        with pytest.raises(ModelError) as wanted:
            toys.Engine.load(made)
        assert str(caught.value) == str(wanted.value)


def test_a_process_that_dies_while_it_loads_is_a_line(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; sys.stdin.buffer.read(); os.kill(os.getpid(), 11)"
    monkeypatch.setattr("ortgraph.child.python_command", lambda module: [os.sys.executable, "-c", code])
    with toys.refused(LoadError, "the engine process died while it loaded the model by SIGSEGV"):
        RemoteEngine.load(config)


def test_another_config_has_a_process_of_its_own(instances: list[RemoteEngine], config: ModelConfig) -> None:
    other = RemoteEngine.load(replace(config, padding="off"))
    assert other._link
    assert other._link._process
    assert other._link._process.pid != pid(instances)
    other.close()
