"""The load test without a server: when requests are due, what is sent, how samples are merged."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loadtest.knee import knee
from loadtest.lengths import Lengths
from loadtest.percentiles import Latency
from loadtest.samples import LoadTestError, build_pool
from loadtest.stages import Stage, endless, stage_at, stages
from ortgraph.server import ROOT

# Locust makes the standard library cooperative, so its part runs in a process of its own.
IN_LOCUST = """
import locust, json
from array import array
from loadtest.arrivals import due_times
from loadtest.recorder import Samples
from loadtest.samples import LoadTestError, build_pool
from loadtest.stages import Stage
{body}
"""


def in_locust(body: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", IN_LOCUST.format(body=body)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_shapes_cover_the_time_without_gaps():
    for shape in ("flat", "steps", "spike", "soak"):
        plan = stages(shape, 40.0, duration_s=20.0, warmup_s=1.0, steps=4, spike=3.0)
        assert plan[0].start_s == 0.0
        assert all(left.end_s == right.start_s for left, right in itertools.pairwise(plan))
        assert sum(stage.end_s - stage.measure_s for stage in plan) == pytest.approx(20.0)
    assert [stage.level for stage in stages("steps", 40.0, duration_s=8.0, warmup_s=1.0, steps=4)] == [10, 20, 30, 40]
    assert [stage.level for stage in stages("spike", 40.0, duration_s=8.0, warmup_s=1.0, spike=3.0)] == [40, 120, 40]
    assert stage_at(stages("flat", 1.0, duration_s=1.0, warmup_s=1.0), 2.0) is None
    assert stage_at(endless(1.0, 0.0), 1e9) is not None


def test_due_times_follow_the_rate_and_are_shared_out():
    body = """
plan = [Stage("a", 100.0, 0.0, 0.0, 10.0), Stage("b", 300.0, 10.0, 10.0, 20.0)]
find = lambda poisson, i, n: list(due_times(plan, is_poisson=poisson, index=i, count=n))
print(json.dumps([find(False, 0, 1), find(False, 0, 2), find(False, 1, 2), find(True, 0, 1), find(True, 1, 2)]))
"""
    constant, first, second, poisson, half = map(np.array, in_locust(body))  # type: ignore[call-overload]
    assert len(constant) == 4000
    assert np.array_equal(np.sort(np.concatenate([first, second])), constant)
    for times, share in ((poisson, 1.0), (half, 0.5)):
        for start_s, rate in ((0, 100), (10, 300)):
            wanted = 10 * rate * share
            found = np.count_nonzero((times >= start_s) & (times < start_s + 10))
            assert abs(found - wanted) < 5 * math.sqrt(wanted)
    gaps_s = np.diff(poisson[poisson < 10])
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.2)  # what an exponential distribution has


def test_percentiles_of_workers_are_those_of_all_their_samples():
    """One worker saw 10 ms a thousand times, the other 100 ms fifty times: no mean of their P99s is the P99."""
    body = """
merged = Samples()
for latency_ms, count in ((10.0, 1000), (100.0, 50)):
    own = Samples(array("d", [0.0] * count), array("d", [latency_ms] * count), array("d", [1.0] * count))
    own.fail("refused", 1.0)
    merged.add_packed(own.pack())
print(json.dumps([list(merged.latency_ms), {kind: list(times) for kind, times in merged.failed_s.items()}]))
"""
    latencies_ms, failed = in_locust(body)  # type: ignore[misc]
    assert failed == {"refused": [1.0, 1.0]}
    latency = Latency.of(latencies_ms)
    assert (latency.count, latency.p50_ms, latency.p95_ms, latency.p99_ms) == (1050, 10.0, 10.0, 100.0)


def test_lengths_come_from_a_distribution(tmp_path: Path):
    rng = random.Random(1)
    zipf = [Lengths.parse("zipf:8..128").draw(rng) for _ in range(4000)]
    assert min(zipf) == 8
    assert max(zipf) <= 128
    assert zipf.count(8) / zipf.count(9) == pytest.approx(2, rel=0.35)  # the second has half the weight of the first
    (tmp_path / "seen.txt").write_text("16\n16\n64\n")
    seen = Lengths.parse(f"file:{tmp_path}/seen.txt")
    drawn = [seen.draw(rng) for _ in range(900)]
    assert set(drawn) == {16, 64}
    assert drawn.count(16) / drawn.count(64) == pytest.approx(2, rel=0.3)
    assert Lengths.parse("64").draw(rng) == 64
    for text in ("8..128", "64", "zipf1:8..128", "zipf1.5:8..16", f"file:{tmp_path}/seen.txt"):
        assert str(Lengths.parse(text)) == text
    (tmp_path / "wrong.txt").write_text("16\nx\n")
    (tmp_path / "empty.txt").write_text("")
    for text in ("zipf", "zipf:9..8", "file:", f"file:{tmp_path}/wrong.txt", f"file:{tmp_path}/empty.txt", "0", "8..x"):
        with pytest.raises(ValueError, match=r"lengths|one size a line"):
            Lengths.parse(text)


def test_real_texts_and_images_are_sent():
    repository = ROOT / "model_repository"
    texts = ROOT / "client" / "README.md"
    pool = build_pool(repository / "text_embedding", Lengths(8, 8), count=3, rows=2, texts=texts)
    assert len(pool) == 3
    assert all(sample.inputs["input_ids"].shape[0] == 2 for sample in pool)
    assert len({sample.inputs["input_ids"].shape[1] for sample in pool}) > 1  # as long as the lines are
    pool = build_pool(repository / "text_recognition", Lengths(8, 8), count=9, images=ROOT / "client" / "samples")
    assert len(pool) == 2
    for sample in pool:
        (image,) = sample.inputs.values()
        assert image.shape[:3] == (1, 3, 48)
        assert -1 <= image.min() < image.max() <= 1
    with pytest.raises(LoadTestError, match="must be a folder with images"):
        build_pool(repository / "text_recognition", Lengths(8, 8), count=1, images=ROOT / "docs")


def test_the_knee_is_where_throughput_has_the_best_latency():
    curve = [(10, 10, 20), (20, 20, 22), (30, 30, 30), (40, 36, 400), (50, 36, 2000)]
    assert knee(curve) == 30
    assert knee(curve[:3]) is None  # latency has not yet doubled: the knee lies higher
    assert knee(curve[:2]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "-1"], "must be a number from 0"),
        (["--lengths", "8..4"], "lengths must be"),
        (["--search"], "--search needs --p99-ms"),
        (["--rate", "5", "--auto-rate"], "cannot be given together"),
        (["--users", "0"], "must be a whole number from 1"),
    ],
)
def test_bad_options_are_refused_in_a_line(arguments: list[str], message: str):
    done = subprocess.run(
        [sys.executable, "-m", "loadtest", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_a_stage_of_no_length_is_no_stage():
    assert stage_at([Stage("a", 1.0, 0.0, 0.0, 0.0), Stage("b", 2.0, 0.0, 0.0, 1.0)], 0.0).name == "b"  # type: ignore[union-attr]
