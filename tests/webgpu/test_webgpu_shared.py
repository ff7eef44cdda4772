"""Captured graphs in an engine process: several instances, several groups on the device at a time, answers as alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx

from ortgraph.batch import Request
from ortgraph.errors import InvalidRequest, RequestError
from ortgraph.remote import RemoteEngine
from tests.webgpu import gpu_toys as models
from tests.webgpu.gpu_toys import load_encoder, text

INSTANCES, BATCHES = 3, 40


def test_instances_share_captured_graphs(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.encoder(), path)
    captured = load_encoder(path, buckets="batch=1,2,4; sequence=4,8", graph_capture="required")
    engines = [RemoteEngine.load(captured.config) for _ in range(INSTANCES)]
    captured.close()
    cpu = load_encoder(path, "cpu")
    batches = [
        [text(np.random.default_rng((number, n, i)), 1 + (n + i) % 8) for n in range(3)]
        for number in range(INSTANCES)
        for i in range(BATCHES)
    ]
    wanted = [[cpu.run(dict(inputs)) for inputs in batch] for batch in batches]

    def ask(number: int) -> None:
        for place in range(number * BATCHES, (number + 1) * BATCHES):
            bad = {name: array + 10**6 for name, array in batches[place][0].items()}
            requests = [Request(dict(inputs)) for inputs in (*batches[place], bad)]
            found = dict(engines[number].answer(requests))
            assert sorted(found) == [0, 1, 2, 3]
            assert isinstance(found.pop(3), InvalidRequest)
            for index, answer in found.items():
                assert not isinstance(answer, RequestError)
                for name, array in wanted[place][index].items():
                    np.testing.assert_allclose(answer[name], array, atol=1e-4)

    with ThreadPoolExecutor(INSTANCES) as pool:
        list(pool.map(ask, range(INSTANCES)))
    counted: dict[str, float] = {}
    engines[0].metrics.pass_on(lambda name, labels, value: counted.update({f"{name}{dict(labels)}": value}))
    assert counted["ortgraph_requests_total{'outcome': 'answered'}"] == INSTANCES * BATCHES * 3
    assert not [name for name in counted if name.startswith("ortgraph_eager_runs_total")]
    for engine in engines:
        engine.close()
