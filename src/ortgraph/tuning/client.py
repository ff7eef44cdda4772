"""The load of `ortgraph tune` on a real server: `python -m ortgraph.tuning.client HOST PORT FILE`, its own process.

FILE holds the bodies of the requests. Each line on standard input is a JSON object `{"model", "clients", "each",
"first"}`: so many clients send `each` requests one after the other, drawn from the bodies in order. The answer is one
JSON line: `{"seconds", "requests", "error"}`. Answers are only counted here; whether they are right is asked apart.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from geventhttpclient import HTTPClient

TIMEOUT_S = 120.0


def main(host: str, port: int, bodies: list[tuple[bytes, int]]) -> None:
    """Serve commands until standard input ends."""
    connections: list[Any] = []
    for line in sys.stdin:
        job = json.loads(line)
        while len(connections) < job["clients"]:
            connections.append(HTTPClient(host, port, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S))
        errors: list[str] = []
        path = f"/v2/models/{job['model']}/infer"
        start = time.perf_counter()
        workers = [
            gevent.spawn(_client, connections[i], path, bodies, job["first"] + i * job["each"], job["each"], errors)
            for i in range(job["clients"])
        ]
        gevent.joinall(workers)
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "requests": job["clients"] * job["each"], "error": errors[0] if errors else ""}
        print(json.dumps(answer), flush=True)


def _client(
    connection: Any, path: str, bodies: list[tuple[bytes, int]], first: int, each: int, errors: list[str]
) -> None:
    for number in range(first, first + each):
        body, json_size = bodies[number % len(bodies)]
        try:
            response = connection.post(path, body, {"Inference-Header-Content-Length": str(json_size)})
            content = response.read()
            if response.status_code != 200:
                errors.append(f"HTTP {response.status_code}: {bytes(content[:200]).decode(errors='replace')}")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        if errors:
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pickle.loads(Path(sys.argv[3]).read_bytes()))
