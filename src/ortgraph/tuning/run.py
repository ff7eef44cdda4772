"""One call of `tune`: the stages, each with its share of the budget."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from ..buckets import default_batch_ladder
from ..config import ModelConfig
from ..engine import Engine
from ..graph import MAX_BUCKETS
from ..server import Installation, ServerError
from ..signature import BATCH, Sizes
from .axes import Axis, Facts, affinity_axis, server_axes, session_axes
from .case import Case
from .inprocess import Engines
from .inputs import known_sizes
from .load import drawer, request_sizes
from .pairs import Pair, Settings, Subject
from .search import Budget, Search
from .store import Store
from .tables import candidate_lengths, plan
from .weights import FPA_INTB, Format, advise, fpa_settings, measure_formats

MAX_SESSIONS = 24  # buckets to try where each may have a session of its own
CONFIRM_S = 25.0  # to start the server once more and measure what has won
Tell = Callable[[str], None]


@dataclass
class Outcome:
    """What was found. `winner` holds the settings to write; empty where the config stays as it is."""

    search: Search
    confirmed: Pair | None
    winner: Settings
    tables: dict[str, Any]


def run(case: Case, store: Store, budget: Budget, tell: Tell) -> Outcome:
    """Measure tables, then candidates, then what won together; every measurement is kept in the store."""
    why_no_server = _why_no_server(case)
    engines = Engines(case.model.configure, case.batches)

    @contextlib.contextmanager
    def servers(base: Settings, candidate: Settings) -> Iterator[tuple[Subject, Subject]]:
        from .served import served

        case.model.configure(candidate)  # an unknown setting is said at once
        texts = {"base": case.model.served_text(base), "candidate": case.model.served_text(candidate)}
        requests = [inputs for batch in case.batches for inputs in batch]
        with served(texts, case.model.config.model_path, requests, case.dtypes, case.load.clients) as (first, second):
            yield first, second

    search = Search(store, case.dtypes, case.rounding, engines.open, None if why_no_server else servers, tell)
    try:
        tables = _tables(case, store, budget, tell)
        _search_session(case, search, store, tables, budget.part(0.8 if why_no_server else 0.55))
        engines.close()
        if why_no_server:
            search.skipped.append(f"response mode and instances: {why_no_server}")
        else:
            if not case.is_asynchronous:
                search.skipped.append(f"response mode: on the {case.provider} provider one batch runs at a time")
            instances = case.model.instances
            axes = server_axes(_facts(case), is_asynchronous=case.is_asynchronous, instances=instances)
            search.walk(axes, Budget.of(min(budget.left_s / 2, max(budget.left_s - CONFIRM_S, 0.0))), where="server")
        confirmed = search.confirm(budget, "engine" if why_no_server else "server")
    finally:
        engines.close()
    return Outcome(search, confirmed, dict(search.best) if confirmed and confirmed.is_better else {}, tables)


def _facts(case: Case) -> Facts:
    return Facts(
        provider=case.provider,
        cores=len(os.sched_getaffinity(0)),
        threads=psutil.cpu_count(logical=False) or 1,
        clients=case.load.clients,
        has_conv="Conv" in case.model.operators,
        is_float32=any(dtype.onnx_name == "float" for dtype in case.dtypes.values()),
    )


def _why_no_server(case: Case) -> str:
    try:
        Installation.find()
    except ServerError as error:
        return str(error)
    raw = [name for name, dtype in case.dtypes.items() if dtype.is_raw]
    return f"'{raw[0]}' is {case.dtypes[raw[0]].short}, which the load client cannot send" if raw else ""


def _search_session(case: Case, search: Search, store: Store, tables: dict[str, Any], budget: Budget) -> None:
    """What needs no server."""
    facts, now = _facts(case), case.model.parameters
    if case.provider == "cpu":
        search.skipped.append("bucket tables: on the CPU a group runs at its own sizes, not at a bucket's")
    else:
        found = _bucket_table(case, store, search.tell)
        if isinstance(found, str):
            search.skipped.append(found)
        else:
            tables["buckets"] = found
            if found["buckets"] != now.get("buckets"):
                search.walk([Axis("buckets", [{"buckets": found["buckets"]}])], budget, where="engine")
    search.walk(session_axes(facts, now), budget, where="engine")
    if case.provider == "cpu":
        threads = search.best.get("intra_op_thread_count", now.get("intra_op_thread_count", "0"))
        search.walk([affinity_axis(int(threads) or facts.threads)], budget, where="engine")


def _tables(case: Case, store: Store, budget: Budget, tell: Tell) -> dict[str, Any]:
    """Times by weight format, and as a graph and eager; what is kept is not measured again."""
    config = case.model.config
    found: dict[str, Any] = {}
    if case.model.variants:
        found["weight_formats"] = _times("weight_formats", case, _formats(case), store, budget.part(0.35), tell)
    if case.is_asynchronous:
        formats = [Format("graph", config), Format("eager", replace(config, graph_capture="off"), like="graph")]
        found["graph_or_eager"] = _times("graph_or_eager", case, formats, store, budget.part(0.15), tell)
    return found


def _formats(case: Case) -> list[Format]:
    """The variants, on CUDA those with 4-bit weights also with fpA_intB."""
    config: ModelConfig = replace(case.model.config, outputs=())  # their element types may differ between formats
    formats = []
    for label, variant in case.model.variants.items():
        formats.append(Format(label, replace(config, model_path=variant.path)))
        if variant.has_nbits and case.provider == "cuda":
            session_config = {**config.session_config, **fpa_settings([*case.buckets, *case.shares])}
            faster = replace(config, model_path=variant.path, session_config=session_config)
            formats.append(Format(label + FPA_INTB, faster, like=label))
    return formats


def _times(
    name: str, case: Case, formats: Sequence[Format], store: Store, budget: Budget, tell: Tell
) -> dict[str, Any]:
    """The table of that name: the one that is kept, else measured now."""
    if name not in store.tables:
        draw = drawer(case.model.config, case.signature)
        table = measure_formats(formats, list(case.shares), draw, is_over=budget.is_over, tell=tell)
        total = sum(case.shares.values())
        store.tables[name] = {
            "dimensions": [dim.name for dim in case.signature.dims],
            "rows": table.rows(),
            "shares": [round(case.shares[sizes] / total, 4) for sizes in table.sizes],
            "largest_difference": table.errors,
            "refused": table.refused,
            **advise(table, case.shares),
        }
        store.save()
    return dict(store.tables[name])


def _bucket_table(case: Case, store: Store, tell: Tell) -> dict[str, Any] | str:
    """The bucket table for the load by measured times, kept in the store; or why there is none."""
    if "buckets" in store.tables:
        return dict(store.tables["buckets"])
    dims, config = case.signature.dims, case.model.config
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
    engine = Engine.load(case.model.configure({"buckets": _bucket_text(case, ladders)}))
    try:
        if not engine.is_asynchronous:
            return f"bucket tables: {(*engine.findings.notes, 'nothing could be captured')[0]}"

        def draw(rng: random.Random) -> list[Sizes]:
            lengths = [case.load.draw(rng) for _ in range(case.per_batch)]
            return [request_sizes(config, case.signature, case.load, length) for length in lengths]

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


def _bucket_text(case: Case, ladders: Mapping[int, Sequence[int]]) -> str:
    return "; ".join(f"{case.signature.dims[i].name}={','.join(map(str, ladders[i]))}" for i in sorted(ladders))
