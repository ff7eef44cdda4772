"""`python -m benchmarks`: compare targets side by side, interleaved, and write the result as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import documents, figures, machine, report, workload
from benchmarks.rounds import Load, Plan, Slice, serve_and_measure
from benchmarks.summary import Row, summarise
from benchmarks.targets import BenchmarkError, prepare
from loadtest.samples import LoadTestError, build_pool
from loadtest.wire import Shot, encode
from ortgraph.errors import OrtgraphError

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(highlight=False)
ROOT = Path(__file__).resolve().parent.parent
CPU_LOADS = ("1:8..128", "16:4..16", "16:4..32", "16:8..128")

GPU_LOADS = ("1:128", "14:128", "14:8..128", "28:128", "14:128x4")

Rounds = Annotated[int, typer.Option(min=1, help="How often every target gets every load.")]
SliceS = Annotated[float, typer.Option(min=0.1, help="Seconds measured for a target, load and round.")]
WarmupS = Annotated[float, typer.Option(min=0.0, help="Seconds of load before each of them that do not count.")]
Model = Annotated[str, typer.Option(help="The model, by its name in the repository.")]
Repository = Annotated[Path, typer.Option(help="Holds the model that the baselines serve too.")]
Requests = Annotated[int, typer.Option(min=1, help="Different requests to draw from, for each load.")]
Tolerance = Annotated[float | None, typer.Option(help="Relative, instead of the element type's own.")]
Output = Annotated[Path | None, typer.Option(help="Where the JSON goes; default: benchmarks/results/<command>.json.")]


@app.command()
def compare(
    targets: Annotated[list[str], typer.Argument(help="ortgraph, a baseline, or [label=]repository; the first is 1.")],
    load: Annotated[
        list[str] | None, typer.Option(help=f"clients:lengths, may be given again; default: {' and '.join(CPU_LOADS)}.")
    ] = None,
    model: Model = "text_embedding",
    repository: Repository = ROOT / "model_repository",
    rounds: Rounds = 5,
    slice_s: SliceS = 6.0,
    warmup_s: WarmupS = 0.5,
    requests: Requests = 256,
    tolerance: Tolerance = None,
    backends: Annotated[
        Path | None, typer.Option(help="Folder with further Triton backends, such as the C++ onnxruntime/.")
    ] = None,
    output: Output = None,
) -> None:
    """Serve the targets and measure them in turn; ratios are against the first one.

    The result is written after each round; Ctrl-C ends with the tables of the rounds that are finished.

    Example: python -m benchmarks compare session_run io_binding ortgraph --load 16:8..128 --rounds 3
    """
    try:
        plan = Plan(
            [Load.parse(text) for text in load or CPU_LOADS],
            rounds,
            slice_s,
            warmup_s,
            first_warmup_s=3.0,
            tolerance=tolerance,
        )
        _compare(targets, plan, model, repository, requests, backends, output or report.RESULTS / "compare.json")
    except KeyboardInterrupt:
        console.print("error: stopped by Ctrl-C before a round was finished; nothing was written", style="bold red")
        raise typer.Exit(130) from None
    except (BenchmarkError, LoadTestError, OrtgraphError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        raise typer.Exit(1) from None


@app.command()
def cpu(
    rounds: Rounds = 5,
    slice_s: SliceS = 6.0,
    warmup_s: WarmupS = 0.5,
    requests: Requests = 256,
    output: Output = None,
) -> None:
    """MiniLM by a plain session.run and by ortgraph: one client, and 16 with queries, sentences and paragraphs."""
    compare(
        ["session_run", "ortgraph"],
        rounds=rounds,
        slice_s=slice_s,
        warmup_s=warmup_s,
        requests=requests,
        output=output or report.RESULTS / "cpu.json",
    )


@app.command()
def gpu(
    fused: Annotated[bool, typer.Option(help="With ONNX Runtime's fused operators, else with standard ones.")] = False,
    rounds: Rounds = 3,
    slice_s: SliceS = 3.0,
    warmup_s: WarmupS = 0.5,
    requests: Requests = 64,
    output: Output = None,
) -> None:
    """A BERT-base-size fp16 encoder on a GPU by a plain session.run and by ortgraph with one and two instances."""
    repositories = workload.write(ROOT / ".cache" / "workload", is_fused=fused, instances=(1, 2))
    compare(
        ["session_run", *(f"ortgraph_{count}={path}" for count, path in repositories.items())],
        load=list(GPU_LOADS),
        model=workload.MODEL,
        repository=repositories[1],
        rounds=rounds,
        slice_s=slice_s,
        warmup_s=warmup_s,
        requests=requests,
        tolerance=2e-2,
        output=output or report.RESULTS / f"gpu_{'fused' if fused else 'plain'}.json",
    )


@app.command()
def gpu_figures(
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(figures.MEASURES)}; may be given again; default: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.3, help="Of each load.")] = 2.0,
    tiny: Annotated[bool, typer.Option(help="A tiny model on the CPU: tries the command out.")] = False,
    output: Output = None,
) -> None:
    """Each figure that serving on a GPU is held to: asked, measured, reached or not. Written after each measure.

    Example: python -m benchmarks gpu-figures --only busy --only python
    """
    path = output or report.RESULTS / ("gpu_figures_tiny.json" if tiny else "gpu_figures.json")
    try:
        if unknown := set(only or ()) - figures.MEASURES.keys():
            raise BenchmarkError(f"--only takes {', '.join(figures.MEASURES)}, got '{min(unknown)}'")
        for name in only or figures.MEASURES:
            with tempfile.TemporaryDirectory(prefix="ortgraph-figures-") as folder, console.status(f"measuring {name}"):
                found = figures.MEASURES[name](figures.Setup(Path(folder), seconds, tiny))
            described = machine.describe(["gpu-figures", "--seconds", f"{seconds:g}", *(["--tiny"] if tiny else [])])
            old = json.loads(path.read_text()) if path.is_file() else {}
            result = figures.merged(old, described, [asdict(figure) for figure in found])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
            for figure in found:
                state = {True: ", reached", False: ", not reached", None: ""}[figure.is_reached]
                text = f"{figure.figure}: {figure.measured} (asked: {figure.asked or '-'}{state})"
                console.print(text, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("error: stopped by Ctrl-C", style="bold red")
        raise typer.Exit(130) from None
    except (BenchmarkError, LoadTestError, OrtgraphError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        raise typer.Exit(1) from None


@app.command()
def document() -> None:
    """Write the tables in the documents anew from the results."""
    for path in documents.write():
        console.print(f"wrote {path.name}")


def _compare(
    names: list[str], plan: Plan, model: str, repository: Path, requests: int, backends: Path | None, output: Path
) -> None:
    def save(slices: Sequence[Slice]) -> list[Row]:
        rows, described = summarise(slices), machine.describe(machine.command_line())
        report.save(output, machine=described, model=model, plan=plan, rows=rows, slices=slices)
        return rows

    with tempfile.TemporaryDirectory(prefix="ortgraph-benchmark-") as folder:
        targets = [prepare(name, model=model, source=repository, folder=Path(folder) / "targets") for name in names]
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("computing the right answers", total=len(plan.loads) * requests)
            pools: dict[str, list[Shot]] = {}
            for load in plan.loads:
                samples = build_pool(
                    repository / model,
                    load.lengths,
                    count=requests,
                    rows=load.rows,
                    is_gpu=bool(machine.gpus()),
                    progress=lambda: progress.advance(task),
                )
                pools[str(load)] = [Shot(encode(model, s.inputs, list(s.expected)), s.expected) for s in samples]
            per_target = plan.first_warmup_s + plan.rounds * (plan.warmup_s + plan.slice_s)
            total_s = len(plan.loads) * len(targets) * per_target
            progress.reset(task, total=total_s)
            slices = serve_and_measure(
                targets,
                plan,
                pools,
                logs=Path(folder),
                backends=backends,
                keep=save,
                report=lambda text: progress.update(task, description=text),
                advance=lambda seconds: progress.advance(task, seconds),
            )
    rows = save(slices)
    report.show(console, rows, targets[0].label)
    console.print(f"wrote {output}")
    if any(row.failures for row in rows):
        raise BenchmarkError("some answers were wrong or missing; the numbers above count only the right ones")
    if (finished := slices[-1].round + 1) < plan.rounds:
        console.print(f"stopped by Ctrl-C after {finished} of {plan.rounds} rounds", style="yellow")
        raise typer.Exit(130)


if __name__ == "__main__":
    app()
