"""`ortgraph tune`: measure on this machine what config.pbtxt may say, and write what is faster."""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from google.protobuf import text_format  # type: ignore[import-untyped]
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..buckets import Item, default_batch_ladder
from ..config import ModelConfig
from ..dtypes import DType
from ..engine import Engine
from ..graph import MAX_BUCKETS
from ..server import Installation, ServerError
from ..signature import BATCH, Signature, Sizes
from ..tuning import axes as tuning_axes
from ..tuning import load as loads
from ..tuning.axes import INSTANCES, Facts, describe
from ..tuning.edit import edited
from ..tuning.inprocess import Engines
from ..tuning.inputs import known_sizes
from ..tuning.pairs import FIRST_ROUNDS, Pair, Settings, Subject
from ..tuning.search import ROUNDS, Budget, Search
from ..tuning.store import Store, machine
from ..tuning.tables import candidate_lengths, plan
from ..tuning.weights import FPA_INTB, Format, advise, fpa_settings, measure_formats
from . import pbtxt
from .console import console, fail
from .files import CommandError, external_files, load_model, new_file, reported
from .progress import progress_bar
from .target import Target, read_target

BATCHES = 4  # different batches of requests; each slice of a measurement takes the next ones
MAX_FORMAT_ROWS = 10
MAX_SESSIONS = 24


@dataclass(frozen=True)
class _Case:
    """What is tuned: the model, its load, and what its engine says of it as configured now."""

    target: Target
    load: loads.Load
    provider: str
    signature: Signature
    dtypes: Mapping[str, DType]
    rounding: float
    is_asynchronous: bool
    is_joined: bool
    per_batch: int
    batches: list[list[dict[str, Any]]]
    shares: Mapping[Sizes, float]
    padded: tuple[bool, ...]

    def message(self, settings: Mapping[str, str]) -> Any:
        """config.pbtxt with these settings."""
        written = copy.deepcopy(self.target.written)
        for key, value in settings.items():
            if key != INSTANCES:
                pbtxt.set_parameter(written, key, value)
            elif written.instance_group:
                written.instance_group[0].count = int(value)
            else:
                written.instance_group.add().count = int(value)
        return written

    def config(self, settings: Mapping[str, str]) -> ModelConfig:
        """As the serving process would read it."""
        kind = self.target.settings.instance_kind
        found = pbtxt.settings(self.message(settings), self.target.model_path, kind=kind)
        return replace(found, name=self.target.name)

    def served_text(self, settings: Mapping[str, str]) -> str:
        """config.pbtxt for a repository of our own."""
        written = self.message(settings)
        for name in ("name", "version_policy", "default_model_filename"):
            written.ClearField(name)
        written.backend = "python"
        return pbtxt.text(written)


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
            case = _examine(target, lengths, clients, rows)
            store = Store(path, _key(case, variants))
            store.save()

            def tell(text: str) -> None:
                progress.update(task, description=text, completed=budget_s - budget.left_s)

            try:
                found = _tune(case, store, variants, budget, tell)
            except KeyboardInterrupt:
                store.save()
                progress.stop()
                fail(f"stopped by Ctrl-C; what was measured is in {path}, and the same command goes on from there", 130)
        before = target.config_path.read_text(encoding="utf-8")
        after = _new_text(before, case, found.winner) if found.winner else before
        report = _as_json(case, found, store, before, after)
        if not as_json:
            _show(case, found, store, before, after)
        if found.winner and (yes or (not as_json and sys.stdin.isatty() and typer.confirm("Write it?"))):
            with new_file(target.config_path, force=True) as new:
                new.write_text(after, encoding="utf-8")
            report["is_written"] = True
            if not as_json:
                console.print(f"wrote {target.config_path}", markup=False)
        elif found.winner and not as_json:
            console.print("config.pbtxt is as it was; --yes writes the change")
        if as_json:
            print(json.dumps(report))


@dataclass
class _Found:
    """The outcome. `winner` holds the settings to write; empty where the config stays as it is."""

    search: Search
    confirmed: Pair | None
    winner: Settings
    tables: dict[str, Any]
    seconds: float


def _variants(texts: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in texts:
        label, equals, file = text.partition("=")
        if not equals or not label or label in found:
            raise CommandError(f"--variant must be label=model.onnx, each label once, got '{text}'")
        load_model(Path(file), with_data=False)
        found[label] = Path(file)
    return found


def _examine(target: Target, lengths: str, clients: int, rows: int) -> _Case:
    """Load the model as it is configured, and draw the requests of the load.

    Raises:
        LoadError: it cannot be served.
        CommandError: it does not take such requests.
    """
    given = loads.parse_lengths(lengths) if lengths else None
    config, written = target.settings, target.written
    assert written is not None
    if config.max_batch_size and rows > config.max_batch_size:
        raise CommandError(f"--rows {rows} is more than max_batch_size {config.max_batch_size}")
    engine = Engine.load(config)
    try:
        signature = engine.signature
        load = loads.Load(clients, rows, given or loads.default_lengths(config, signature))
        is_joined = signature.is_batched and written.HasField("dynamic_batching")
        per_batch = min(clients, config.max_batch_size // rows) if is_joined else 1
        batches = loads.batches(config, signature, load, per_batch=per_batch, count=BATCHES)
        return _Case(
            target=target,
            load=load,
            provider=engine.provider_name,
            signature=signature,
            dtypes={spec.name: spec.dtype for spec in signature.inputs + signature.outputs},
            rounding=engine._provider.rounding,
            is_asynchronous=engine.is_asynchronous,
            is_joined=is_joined,
            per_batch=per_batch,
            batches=batches,
            shares=_shares(engine, batches),
            padded=engine.table.padded,
        )
    finally:
        engine.close()


def _shares(engine: Engine, batches: Sequence[Sequence[Mapping[str, Any]]]) -> dict[Sizes, float]:
    """At which sizes the load's groups run, and how often; an exact size is rounded up to a power of two."""
    counts: Counter[Sizes] = Counter()
    for batch in batches:
        sizes = [engine.signature.sizes({n: a.shape for n, a in inputs.items()})[0] for inputs in batch]
        for group in engine.table.group([Item(i, each) for i, each in enumerate(sizes)]):
            known = group.bucket or tuple(1 << (size - 1).bit_length() for size in group.sizes)
            counts[known] += 1
    return dict(counts.most_common(MAX_FORMAT_ROWS))


def _key(case: _Case, variants: Mapping[str, Path]) -> dict[str, Any]:
    """What a measurement holds for."""
    return {
        "model": _digest(case.target.model_path),
        "config": hashlib.sha256(text_format.MessageToString(case.target.written).encode()).hexdigest(),
        "variants": {label: _digest(path) for label, path in variants.items()},
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


def _tune(case: _Case, store: Store, variants: Mapping[str, Path], budget: Budget, tell: Any) -> _Found:
    start_s = budget.left_s
    engines = Engines(case.config, case.batches)
    why_no_server = _why_no_server(case)

    @contextlib.contextmanager
    def servers(base: Settings, candidate: Settings) -> Iterator[tuple[Subject, Subject]]:
        from ..tuning.served import served

        case.config(candidate)  # an unknown setting is said at once
        texts = {"base": case.served_text(base), "candidate": case.served_text(candidate)}
        requests = [inputs for batch in case.batches for inputs in batch]
        with served(texts, case.target.model_path, requests, case.dtypes, case.load.clients) as (first, second):
            yield first, second

    search = Search(store, case.dtypes, case.rounding, engines.open, None if why_no_server else servers, tell)
    tables: dict[str, Any] = {}
    if variants:
        tables["weight_formats"] = _weight_formats(case, variants, _Tables(store, budget.part(0.35), tell))
    if case.is_asynchronous:
        tables["graph_or_eager"] = _graph_or_eager(case, _Tables(store, budget.part(0.15), tell))
    operators = {node.op_type for node in load_model(case.target.model_path, with_data=False).graph.node}
    facts = Facts(
        provider=case.provider,
        cores=len(psutil.Process().cpu_affinity() or [0]),
        threads=psutil.cpu_count(logical=False) or 1,
        clients=case.load.clients,
        has_conv="Conv" in operators,
        is_float32=any(dtype.onnx_name == "float" for dtype in case.dtypes.values()),
    )
    now = {key: str(value.string_value) for key, value in case.target.written.parameters.items()}
    session = budget.part(0.8 if why_no_server else 0.55)
    search.walk(tuning_axes.session_axes(facts, now), session, where="engine")
    if case.provider == "cpu":
        chosen = search.best.get("intra_op_thread_count", now.get("intra_op_thread_count", "0"))
        search.walk([tuning_axes.affinity_axis(int(chosen) or facts.threads)], session, where="engine")
        search.skipped.append("bucket tables: on the CPU a group runs at its own sizes, not at a bucket's")
    elif not session.is_over():
        buckets = _bucket_table(case, search.best, store, tell)
        if isinstance(buckets, str):
            search.skipped.append(buckets)
        else:
            tables["buckets"] = buckets
            axis = tuning_axes.Axis("buckets", [{"buckets": buckets["buckets"]}])
            search.walk([axis] if buckets["buckets"] != now.get("buckets") else [], session, where="engine")
    groups = case.target.written.instance_group
    instances = max(1, groups[0].count) if groups else 1
    if why_no_server:
        search.skipped.append(f"response mode and instances: {why_no_server}")
    else:
        axes = tuning_axes.server_axes(facts, is_asynchronous=case.is_asynchronous, instances=instances)
        search.walk(axes, budget.part(0.5), where="server")
        if not case.is_asynchronous:
            search.skipped.append(f"response mode: on the {case.provider} provider one batch runs at a time")
    engines.close()
    confirmed = search.confirm(budget, "engine" if why_no_server else "server")
    winner = dict(search.best) if confirmed is not None and confirmed.is_better else {}
    engines.close()
    return _Found(search, confirmed, winner, tables, start_s - budget.left_s)


def _why_no_server(case: _Case) -> str:
    try:
        Installation.find()
    except ServerError as error:
        return str(error)
    raw = [name for name, dtype in case.dtypes.items() if dtype.is_raw]
    return f"'{raw[0]}' is {case.dtypes[raw[0]].short}, which the load client cannot send" if raw else ""


def _weight_formats(case: _Case, variants: Mapping[str, Path], tables: _Tables) -> dict[str, Any]:
    """The table of times by M, and what it means for the load."""
    sizes = list(case.shares)
    config = case.target.settings
    formats = []
    for label, path in variants.items():
        formats.append(Format(label, replace(config, model_path=path)))
        has_nbits = any(node.op_type == "MatMulNBits" for node in load_model(path, with_data=False).graph.node)
        if has_nbits and case.provider == "cuda":
            session_config = {**config.session_config, **fpa_settings(sizes)}
            faster = replace(config, model_path=path, session_config=session_config)
            formats.append(Format(label + FPA_INTB, faster, like=label))
    return tables.measure("weight_formats", case, formats)


def _graph_or_eager(case: _Case, tables: _Tables) -> dict[str, Any]:
    """Each bucket that the load hits as a replay and without a graph."""
    config = case.target.settings
    eager = replace(config, graph_capture="off")
    return tables.measure("graph_or_eager", case, [Format("graph", config), Format("eager", eager, like="graph")])


@dataclass(frozen=True)
class _Tables:
    """Measures tables of times by size, and keeps them."""

    store: Store
    budget: Budget
    tell: Any

    def measure(self, name: str, case: _Case, formats: Sequence[Format]) -> dict[str, Any]:
        """The table of that name: the one that is kept, else measured now."""
        kept = self.store.tables
        if name not in kept:
            draw = loads.drawer(case.target.settings, case.signature)
            is_over, tell = self.budget.is_over, self.tell
            table = measure_formats(formats, list(case.shares), draw, is_over=is_over, tell=tell)
            total = sum(case.shares.values())
            kept[name] = {
                "dimensions": [dim.name for dim in case.signature.dims],
                "rows": table.rows(),
                "shares": [round(case.shares[sizes] / total, 4) for sizes in table.sizes],
                "largest_difference": table.errors,
                "refused": table.refused,
                **advise(table, case.shares),
            }
            self.store.save()
        return dict(kept[name])


def _bucket_table(case: _Case, settings: Settings, store: Store, tell: Any) -> dict[str, Any] | str:
    """The bucket table for the load by measured times, kept in the store; or why there is none."""
    if "buckets" in store.tables:
        return dict(store.tables["buckets"])
    dims, config = case.signature.dims, case.target.settings
    known = known_sizes(config, case.signature)
    places = [i for i, dim in enumerate(dims) if dim.name != BATCH and case.padded[i] and i not in known]
    if not case.is_asynchronous or not places:
        what = "no graph is captured" if not case.is_asynchronous else "there is no length that may be padded"
        return f"bucket tables: {what}"
    tell("bucket table: measuring every size")
    now = {case.signature.index(name): ladder for name, ladder in config.buckets.items()}
    rows: Sequence[int] = (1,)
    if case.signature.is_batched:
        rows = now.get(case.signature.index(BATCH)) or default_batch_ladder(config.max_batch_size)
        if case.provider == "cuda":  # elsewhere a bucket may have a session of its own
            rows = tuple(sorted({*rows, *default_batch_ladder(config.max_batch_size)}))
    limit = MAX_BUCKETS if case.provider == "cuda" else MAX_SESSIONS
    lengths = candidate_lengths(case.load, max(1, limit // len(rows)))
    ladders: dict[int, Sequence[int]] = {**now, **dict.fromkeys(places, tuple(lengths))}
    if case.signature.is_batched:
        ladders[case.signature.index(BATCH)] = rows
    engine = Engine.load(case.config({**settings, "buckets": _bucket_text(case, ladders)}))
    try:
        if not engine.is_asynchronous:
            return f"bucket tables: {(*engine.findings.notes, 'nothing could be captured')[0]}"

        def draw(rng: random.Random) -> list[Sizes]:
            lengths = [case.load.draw(rng) for _ in range(case.per_batch)]
            return [loads.request_sizes(config, case.signature, case.load, length) for length in lengths]

        found = plan(engine.table, draw, lengths, places)
        chosen = {i: ladder for i, ladder in enumerate(found.ladders) if ladder}
        for place in places:  # a longer request than the load's keeps its bucket
            longer = tuple(size for size in now.get(place, ()) if size > lengths[-1])
            chosen[place] = (*chosen[place], *longer)
        measured = itertools.product(*(ladder or () for ladder in engine.table.ladders))
        store.tables["buckets"] = {
            "buckets": _bucket_text(case, chosen),
            "batch_ms": round(found.seconds * 1e3, 4),
            "least_batch_ms": round(found.least_s * 1e3, 4),
            "waste": round(found.waste, 4),
            "count": math.prod(map(len, chosen.values())),
            "measured_ms": {engine.bucket_name(b): round(engine.table.cost(b) * 1e3, 4) for b in measured},
        }
    finally:
        engine.close()
    store.save()
    return dict(store.tables["buckets"])


def _bucket_text(case: _Case, ladders: Mapping[int, Sequence[int]]) -> str:
    return "; ".join(f"{case.signature.dims[i].name}={','.join(map(str, ladders[i]))}" for i in sorted(ladders))


def _new_text(before: str, case: _Case, winner: Settings) -> str:
    """config.pbtxt with the winner: an edit of the text where that reads as it must, else written anew."""
    wanted = case.message(winner)
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
    if not pair.is_done(ROUNDS):
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


def _as_json(case: _Case, found: _Found, store: Store, before: str, after: str) -> dict[str, Any]:
    return {
        "model": case.target.name,
        "provider": case.provider,
        "machine": machine(),
        "load": case.load.key(),
        "requests_a_batch": case.per_batch,
        "seconds": round(found.seconds, 1),
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


def _show(case: _Case, found: _Found, store: Store, before: str, after: str) -> None:
    lengths = sorted(case.load.lengths)
    console.print(
        f"{case.target.name} on {case.provider}: {case.load.clients} clients, rows a request: {case.load.rows}, "
        f"lengths {lengths[0]} to {lengths[-1]}, {case.per_batch} requests a batch",
        markup=False,
    )
    for name, title in (("weight_formats", "by weight format"), ("graph_or_eager", "as a graph and eager")):
        if name in found.tables:
            _show_formats(found.tables[name], title)
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
        if found.confirmed.refused or not found.confirmed.is_done(ROUNDS):
            why = "could not be measured once more" + ("" if found.confirmed.refused else "; give more time")
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
    for label, error in formats["largest_difference"].items():
        console.print(f"{label}: answers differ by {error:.1e} from those of {labels[0]}", markup=False)
    best, means = formats["best"], formats["mean_us"]
    console.print(f"best for this load: {best}, {means[best]:.1f} us a run", markup=False)
    if formats["mixed_pays"]:
        console.print(f"the best for each size: {formats['mixed_us']:.1f} us a run, which is faster than each alone")
    else:
        console.print("a choice for each size does not pay: it is not faster than the best one by more than the noise")
