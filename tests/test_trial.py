"""The trial capture: what becomes of a child process that dies, hangs, or says that the context is lost."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ortgraph import child, trial
from tests import toys

GPU = "some GPU"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trial.Job:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = toys.config(toys.save(toys.affine(), tmp_path), execution_provider="cuda")
    return trial.Job(made, (1, 4), {"x": (1, 4)})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def reporting(result: str, log: Path | None = None) -> list[str]:
    """A child that reads its job, says this, and adds a line to the log."""
    said = json.dumps({"result": result, "reason": "CUDA failure 700"})
    count = f"open({str(log)!r}, 'a').write('x\\n');" if log else ""
    return python(f"import sys; sys.stdin.buffer.read(); {count} print('noise'); print({said!r})")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (python("import os; os.kill(os.getpid(), 11)"), "died of SIGSEGV (11)"),
        (python("import os; os.abort()"), "died of SIGABRT (6)"),
        (python("raise SystemExit(7)"), "ended with exit code 7"),
        (python("import time; time.sleep(60)"), "did not end within 1 s"),
        (reporting("lost"), "lost the CUDA context: CUDA failure 700"),
    ],
)
def test_a_child_that_does_not_survive_is_a_sentence_and_is_not_remembered(
    job: trial.Job, command: list[str], message: str
) -> None:
    wanted = f"a trial capture in a process of its own {message}; graph_capture: required captures without a trial"
    timeout_s = 1.0 if "sleep" in command[-1] else 60.0
    assert trial.danger(job, GPU, timeout_s, command) == wanted
    assert trial.danger(job, GPU, timeout_s, command) == wanted


def test_a_passed_trial_is_made_once_for_a_model_a_gpu_and_a_config(job: trial.Job, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = reporting("passed", log)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: trial.danger(job, GPU, 60.0, command), range(4))) == [""] * 4
    assert log.read_text() == "x\n"
    assert trial.danger(job, "another GPU", 60.0, command) == ""
    other = replace(job, config=replace(job.config, provider_options={"use_tf32": "0"}))
    assert trial.danger(other, GPU, 60.0, command) == ""
    toys.save(toys.reduce("ReduceSum"), tmp_path)
    assert trial.danger(job, GPU, 60.0, command) == ""
    assert log.read_text() == "x\n" * 4


@pytest.mark.parametrize("result", ["passed", "refused"])
def test_without_a_folder_or_with_an_ordinary_error_the_trial_is_made_again(
    job: trial.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str
) -> None:
    if result == "passed":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    log = tmp_path / "log"
    for _ in range(2):
        assert trial.danger(job, GPU, 60.0, reporting(result, log)) == ""
    assert log.read_text() == "x\n" * 2


def test_the_real_child_reports_an_ordinary_error_where_there_is_no_such_gpu(job: trial.Job) -> None:
    nowhere = replace(job, config=replace(job.config, device_id=99))
    assert trial.run(child.python_command("ortgraph.trial"), nowhere, 120.0) == ("", False)
    done = trial.subprocess.run(
        child.python_command("ortgraph.trial"),
        input=trial.pickle.dumps(nowhere),
        capture_output=True,
        check=True,
        timeout=120,
    )
    report = json.loads(done.stdout)
    assert report["result"] == "refused"
    assert "GPU" in report["reason"] or "device 99" in report["reason"]


def test_without_a_home_a_passed_trial_is_remembered_in_the_temp_folder(
    job: trial.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root in a container, say; not in a link that somebody else has put there."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    log, folder = tmp_path / "log", tmp_path / "tmp" / f"ortgraph-{os.getuid()}"
    for _ in range(2):
        assert trial.danger(job, GPU, 60.0, reporting("passed", log)) == ""
    assert log.read_text() == "x\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 1
    if os.getuid() == 0:  # only root can make a link that is somebody else's
        (tmp_path / "elsewhere").mkdir()
        folder.rename(tmp_path / "before")
        folder.symlink_to(tmp_path / "elsewhere")
        os.lchown(folder, 12345, -1)
        assert trial.danger(job, GPU, 60.0, reporting("passed", log)) == ""
        assert list((tmp_path / "elsewhere").iterdir()) == []
