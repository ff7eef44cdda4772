"""`ortgraph tune`: measure on this machine what config.pbtxt may say, and write what is faster."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from google.protobuf import text_format  # type: ignore[import-untyped]
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..config import ModelConfig
from ..tuning import load as loads
from ..tuning.axes import INSTANCES, describe
from ..tuning.case import Case, Model, Variant, examine
from ..tuning.edit import edited
from ..tuning.pairs import FIRST_ROUNDS, Pair, Settings
from ..tuning.run import Outcome, run
from ..tuning.search import Budget
from ..tuning.store import Store, machine
from . import pbtxt
from .console import console, fail
from .files import CommandError, external_files, load_model, new_file, reported
from .progress import progress_bar
from .target import Target, read_target

BUSY = 0.2


def tune(
    model_directory: Annotated[Path, typer.Argument(help="A model's folder in a repository, with its config.pbtxt.")],
    lengths: Annotated[
        str, typer.Option(help="64, 8..128, or a file with a length (and a count) a line; default: the bucket sizes.")
    ] = "",
    clients: Annotated[int, typer.Option(min=1, max=1024, help="Each with one request on its way.")] = 16,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a request.")] = 1,
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds to spend.")] = 120.0,
    variant: Annotated[
        list[str] | None, typer.Option(help="label=model.onnx: the model in another weight format.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="The file that keeps the measurements; default: MODEL.tune.json, here.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write the winner into config.pbtxt without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what is faster here. Example: ortgraph tune model_repository/text_embedding --lengths 8..128 --clients 8

    Candidates are measured in turns with what they are to beat, and their answers are compared. What wins by more
    than the noise is measured once more against the config as it is, and then shown as a change of config.pbtxt.
    A second call goes on where the first one ended.
    """
    with reported():
        target = read_target(model_directory)
        if target.written is None or target.config_path is None:
            raise CommandError(f"{model_directory} is a file; give the model's folder, with its config.pbtxt")
        if not target.written.input:
            raise CommandError(
                f"{target.config_path} lists no inputs; write them out, so that what is measured is served"
            )
        variants = _variants(variant or [])
        path = results or Path(f"{target.name}.tune.json")
        with progress_bar() as progress:
            task = progress.add_task("loading", total=budget_s)
            budget = Budget.of(budget_s)
            given = loads.parse_lengths(lengths) if lengths else None
            busy = psutil.cpu_percent(interval=0.3) / 100  # what others do here, before anything is measured
            case = examine(_model(target, variants), given, clients, rows)
            store = Store(path, _key(target, case))
            store.save()

            def tell(text: str) -> None:
                progress.update(task, description=text, completed=budget_s - budget.left_s)

            try:
                found = run(case, store, budget, tell)
            except KeyboardInterrupt:
                store.save()
                progress.stop()
                fail(f"stopped by Ctrl-C; what was measured is in {path}, and the same command goes on from there", 130)
        before = target.config_path.read_text(encoding="utf-8")
        if pbtxt.read(target.config_path) != target.written:
            raise CommandError(f"{target.config_path} was changed meanwhile; run the command again")
        after = _new_text(before, target, found.winner) if found.winner else before
        report = {**_as_json(target.name, case, found, store, before, after), "busy_share": busy}
        if not as_json:
            _show(target.name, case, found, store, before, after)
            if busy > BUSY:
                console.print(f"others used {busy:.0%} of the processors: what wins now may lose on a quiet machine")
        if found.winner and (yes or (not as_json and _is_accepted())):
            with new_file(target.config_path, force=True) as new:
                new.write_text(after, encoding="utf-8")
            report["is_written"] = True
            if not as_json:
                console.print(f"wrote {target.config_path}", markup=False)
        elif found.winner and not as_json:
            console.print("config.pbtxt is as it was; --yes writes the change")
        if as_json:
            print(json.dumps(json.loads(json.dumps(report), parse_constant=lambda _: None)))  # JSON has no infinity


def _is_accepted() -> bool:
    """Ask whoever sits there; without a terminal nobody does."""
    try:
        return sys.stdin.isatty() and typer.confirm("Write it?")
    except typer.Abort:
        raise KeyboardInterrupt from None


def _variants(texts: Sequence[str]) -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for text in texts:
        label, equals, file = text.partition("=")
        if not equals or not label or label in found:
            raise CommandError(f"--variant must be label=model.onnx, each label once, got '{text}'")
        graph = load_model(Path(file), with_data=False).graph
        found[label] = Variant(Path(file), any(node.op_type == "MatMulNBits" for node in graph.node))
    return found


def _model(target: Target, variants: Mapping[str, Variant]) -> Model:
    groups = target.written.instance_group
    return Model(
        config=target.settings,
        parameters={key: str(value.string_value) for key, value in target.written.parameters.items()},
        operators=frozenset(node.op_type for node in load_model(target.model_path, with_data=False).graph.node),
        has_batching=target.written.HasField("dynamic_batching"),
        instances=max(1, groups[0].count) if groups else 1,
        variants=variants,
        configure=lambda chosen: _configured(target, chosen),
        served_text=lambda chosen: _served_text(target, chosen),
    )


def _message(target: Target, chosen: Mapping[str, str]) -> Any:
    """config.pbtxt with these settings."""
    written = copy.deepcopy(target.written)
    for key, value in chosen.items():
        if key != INSTANCES:
            pbtxt.set_parameter(written, key, value)
        elif written.instance_group:
            written.instance_group[0].count = int(value)
        else:
            written.instance_group.add().count = int(value)
    return written


def _configured(target: Target, chosen: Mapping[str, str]) -> ModelConfig:
    """As the serving process would read it."""
    found = pbtxt.settings(_message(target, chosen), target.model_path, kind=target.settings.instance_kind)
    return replace(found, name=target.name)


def _served_text(target: Target, chosen: Mapping[str, str]) -> str:
    """config.pbtxt for a repository of our own, in which the folder gives the name and the file is model.onnx."""
    written = _message(target, chosen)
    for name in ("name", "version_policy", "default_model_filename"):
        written.ClearField(name)
    written.backend = "python"
    return pbtxt.text(written)


def _key(target: Target, case: Case) -> dict[str, Any]:
    """What a measurement holds for."""
    return {
        "model": _digest(target.model_path),
        "config": hashlib.sha256(text_format.MessageToString(target.written).encode()).hexdigest(),
        "variants": {label: _digest(variant.path) for label, variant in case.model.variants.items()},
        "load": case.load.key(),
        "machine": machine(),
    }


def _digest(path: Path) -> str:
    """SHA-256 of an ONNX file and its external data."""
    digest = hashlib.sha256()
    for name in (path.name, *external_files(load_model(path, with_data=False))):
        with (path.parent / name).open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _new_text(before: str, target: Target, winner: Settings) -> str:
    """config.pbtxt with the winner: an edit of the text where that reads as it must, else written anew."""
    wanted = _message(target, winner)
    after = edited(before, winner)
    try:
        read = text_format.Parse(after, type(wanted)())
    except text_format.ParseError:
        read = None
    return after if read == wanted else pbtxt.text(wanted)


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "config.pbtxt", "config.pbtxt", n=1)
    return "".join(lines)


def _verdict(pair: Pair) -> str:
    if pair.refused:
        return "refused"
    if pair.is_better:
        return "faster"
    if not pair.is_done:
        return "not finished"
    return "slower" if pair.ratio > 1 + pair.noise else "no better"


def _pair_json(pair: Pair) -> dict[str, Any]:
    measured = bool(pair.rounds)
    return {
        "axis": pair.axis,
        "base": pair.base,
        "candidate": pair.candidate,
        "measured_by": pair.where,
        "rounds": len(pair.rounds),
        "base_ms": round(pair.base_s * 1e3, 4) if measured else None,
        "candidate_ms": round(pair.candidate_s * 1e3, 4) if measured else None,
        "ratio": round(pair.ratio, 4) if measured else None,
        "noise": round(pair.noise, 4) if len(pair.rounds) >= FIRST_ROUNDS else None,
        "largest_difference": pair.error,
        "verdict": _verdict(pair),
        "refused": pair.refused,
    }


def _as_json(name: str, case: Case, found: Outcome, store: Store, before: str, after: str) -> dict[str, Any]:
    return {
        "model": name,
        "provider": case.provider,
        "machine": machine(),
        "load": case.load.key(),
        "requests_a_batch": case.per_batch,
        "reused_rounds": store.reused,
        "measurements": [_pair_json(pair) for pair in store.pairs if pair.rounds or pair.refused],
        "skipped": found.search.skipped,
        "unfinished": found.search.open_count,
        "confirmed": _pair_json(found.confirmed) if found.confirmed else None,
        "winner": found.winner,
        **found.tables,
        "diff": _diff(before, after),
        "is_written": False,
        "results": str(store.path),
    }


def _show(name: str, case: Case, found: Outcome, store: Store, before: str, after: str) -> None:
    lengths = sorted(case.load.lengths)
    console.print(
        f"{name} on {case.provider}: {case.load.clients} clients, rows a request: {case.load.rows}, lengths: "
        f"{lengths[0]}{f' to {lengths[-1]}' if len(lengths) > 1 else ''}; {case.per_batch} requests a batch",
        markup=False,
    )
    for key, title in (("weight_formats", "by weight format"), ("graph_or_eager", "as a graph and eager")):
        if key in found.tables:
            _show_formats(found.tables[key], title)
    if "buckets" in found.tables:
        buckets = found.tables["buckets"]
        console.print(
            f"bucket table for this load: {buckets['buckets']} ({buckets['count']} buckets), "
            f"{buckets['batch_ms']:.3f} ms a batch; "
            f"all {len(buckets['measured_ms'])} measured ones together: {buckets['least_batch_ms']:.3f} ms",
            markup=False,
        )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("candidate", overflow="fold")
    for heading in ("ms", "before", "ratio", "noise"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    shown = [pair for pair in store.pairs if pair.rounds or pair.refused]
    for place, pair in enumerate(shown):
        if not place or shown[place - 1].axis != pair.axis:
            by = "by the real server" if pair.where == "server" else "in this process"
            table.add_row(Text(f"{pair.axis}, {by}", style="bold"))
        new = {key: value for key, value in pair.candidate.items() if pair.base.get(key) != value}
        times = [""] * 4
        if pair.rounds:
            noise = f"{pair.noise:.3f}" if len(pair.rounds) >= FIRST_ROUNDS else ""
            times = [f"{pair.candidate_s * 1e3:.3f}", f"{pair.base_s * 1e3:.3f}", f"{pair.ratio:.3f}", noise]
        table.add_row(Text("\n".join(f"  {key}={value}" for key, value in new.items())), *times, _verdict(pair))
    console.print("time of a request, of the candidate and of the best before it:")
    console.print(table)
    for pair in shown:
        if pair.refused:
            console.print(f"{describe(pair.candidate)}: {pair.refused}", markup=False)
    for line in found.search.skipped:
        console.print(f"not tried: {line}", markup=False)
    if found.search.open_count:
        console.print(f"{found.search.open_count} candidates are not finished; the same command goes on with them")
    console.print(f"{store.reused} rounds were measured before; all are in {store.path}", markup=False)
    if found.winner:
        assert found.confirmed
        gain = 1 / found.confirmed.ratio
        console.print(f"best: {describe(found.winner)}; {gain:.2f} times as fast as the config as it is", markup=False)
        console.print(_diff(before, after), markup=False, end="")
    elif found.confirmed is not None:
        why = "was not faster when measured once more"
        if found.confirmed.refused:
            why = f"could not be measured once more: {found.confirmed.refused}"
        elif not found.confirmed.is_done:
            why = "is not confirmed yet; the same command goes on with it"
        console.print(f"the config stays: {describe(found.search.best)} {why}", markup=False)
    else:
        console.print("the config stays: nothing is faster by more than the noise")


def _show_formats(formats: Mapping[str, Any], title: str) -> None:
    labels = list(formats["mean_us"])
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), title=f"time of a run {title}", title_justify="left")
    for heading in ("M", "x".join(formats["dimensions"]), "share", *(f"{label} us" for label in labels), "winner"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, share in zip(formats["rows"], formats["shares"], strict=True):
        sizes = "x".join(map(str, row["sizes"]))
        times = (f"{row['us'][label]:.1f}" for label in labels)
        table.add_row(str(row["m"]), sizes, f"{share:.0%}", *times, row["winner"])
    console.print(table)
    for label, reason in formats["refused"].items():
        console.print(f"{label}: left out, {reason}", markup=False)
    for label, error in list(formats["largest_difference"].items())[1:]:
        console.print(f"{label}: answers differ by {error:.1e} from those of {labels[0]}", markup=False)
    best, means = formats["best"], formats["mean_us"]
    console.print(f"best for this load: {best}, {means[best]:.1f} us a run", markup=False)
    if formats["mixed_pays"]:
        console.print(f"the best for each size: {formats['mixed_us']:.1f} us a run, which is faster than each alone")
    else:
        console.print("a choice for each size does not pay: it is not faster than the best one by more than the noise")
