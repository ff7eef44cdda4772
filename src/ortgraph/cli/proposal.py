"""A config.pbtxt for an ONNX model, found by trying: what the serving process's own preflight proves is switched on."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from tritonclient.grpc import model_config_pb2

from ..buckets import default_batch_ladder
from ..config import ModelConfig, parse_buckets
from ..engine import Engine
from ..errors import ConfigError, LoadError
from ..graph import MAX_BUCKETS
from ..preflight import Findings
from ..providers import open_provider
from ..signature import Signature, TensorSpec
from . import pbtxt
from .files import CommandError
from .graphfacts import index_ranges, obstacles

DEFAULT_MAX_BATCH_SIZE = 32
_LADDER = (16, 32, 64, 128, 256, 512)
_CAPTURES_ON_DEMAND = "16"
# Names that exporters and people give to first axes that are no batch.
_NOT_BATCH = re.compile(r"(?i).*(seq|len|time|frame|height|width|token|sample|point|channel|chunk|step|past).*")
_MASK = re.compile(r"(?i).*mask.*")


@dataclass(frozen=True)
class Wishes:
    """What the user decided; the rest is found. Texts are as in config.pbtxt's parameters."""

    name: str
    max_batch_size: int | None = None
    buckets: str = ""
    value_ranges: str = ""
    provider: str = "auto"


@dataclass
class Proposal:
    """A config, what was found of the model with it, and one line a decision: what it is about -> what and why.

    `is_tried` says that the preflight ran with just this config, so that another one would find the same.
    """

    config: pbtxt.TritonConfig
    signature: Signature
    findings: Findings
    ladders: dict[str, tuple[int, ...]]
    decisions: dict[str, str] = field(default_factory=dict)
    is_tried: bool = True


def instance_kind() -> str:
    """Where Triton puts an instance without an instance_group: on the GPU where there is one."""
    with contextlib.suppress(ImportError, LoadError):
        from ..providers import driver

        driver.use_device(0)
        return "GPU"
    return "CPU"


def propose(model: onnx.ModelProto, path: Path, wishes: Wishes, step: Callable[[str], None]) -> Proposal:
    """Find a config that serves the model well.

    Args:
        model: the file's content, external data not needed.
        step: told what is going on.

    Raises:
        LoadError: the model cannot be served, or not with these wishes.
        CommandError: a wish does not fit the model.
    """
    return _Search(model, path, wishes, step).run()


class _Search:
    def __init__(self, model: onnx.ModelProto, path: Path, wishes: Wishes, step: Callable[[str], None]) -> None:
        self._model, self._path, self._wishes, self._step = model, path, wishes, step
        self._kind = instance_kind()
        self._ranges: dict[str, str] = {}
        self._said_of_ranges: list[str] = []
        self._inputs: tuple[TensorSpec, ...] = ()
        self._outputs: tuple[TensorSpec, ...] = ()

    def run(self) -> Proposal:
        self._step("opening the model")
        self._read_tensors()
        self._set_ranges()
        wished = _parsed(self._wishes.buckets)
        max_batch_size, no_batch = self._wanted_batch()
        self._step("proving that requests may be joined and padded")
        tried = self._try(max_batch_size, wished)
        if max_batch_size and not tried.findings.can_join and self._wishes.max_batch_size is None:
            no_batch = _reason(tried.findings, "requests are never joined: ") or _first(tried.findings)
            no_batch += self._hint(tried)
            max_batch_size = 0
            tried = self._try(0, wished)
        elif max_batch_size:
            tried = self._with_mask_ranges(tried, max_batch_size, wished)
        self._step("choosing buckets")
        proven = tried if wished else self._with_buckets(tried, max_batch_size)
        proposal = self._leave_unproven_out(proven, max_batch_size)
        self._explain(proposal, max_batch_size, no_batch)
        return proposal

    def _read_tensors(self) -> None:
        """The model's tensors, as ONNX Runtime gives them. Raises LoadError for what Triton cannot carry."""
        for value in (*self._model.graph.input, *self._model.graph.output):
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                raise CommandError(
                    f"the model gives '{value.name}' no shape; export it with its axes, dynamic ones with a name"
                )
        provider = open_provider(self._settings(ModelConfig(self._wishes.name, "1", self._path, graph_level=2)))
        try:
            self._inputs, self._outputs = provider.inputs, provider.outputs
            if provider.not_tensors:
                raise CommandError(f"{provider.not_tensors[0]}; only tensors of known element types can be served")
        finally:
            provider.close()
        for spec in self._inputs + self._outputs:
            if spec.is_required and not spec.dtype.triton:
                raise CommandError(
                    f"'{spec.name}' is {spec.dtype.short}, which Triton cannot carry; cast it to another type inside"
                )
        self._inputs = tuple(spec for spec in self._inputs if spec.dtype.triton)

    def _settings(self, base: ModelConfig) -> ModelConfig:
        return replace(base, execution_provider=self._wishes.provider, instance_kind=self._kind, graph_capture="off")

    def _set_ranges(self) -> None:
        """What the user says, else what the graph says of inputs that are indices."""
        for part in filter(None, (part.strip() for part in self._wishes.value_ranges.split(";"))):
            name, _, text = part.partition("=")
            self._ranges[name.strip()] = text.strip()
        known = {spec.name for spec in self._inputs} - self._ranges.keys()
        for name, (low, high) in index_ranges(self._model).items():
            if name in known:
                self._ranges[name] = f"{low}..{high}"
                self._said_of_ranges.append(f"{name}={low}..{high}, the rows of the table that it looks up")

    def _wanted_batch(self) -> tuple[int, str]:
        """The max_batch_size to try, and why it is 0."""
        wish = self._wishes.max_batch_size
        reason = _why_no_batch(self._inputs, self._outputs)
        if wish is not None:
            return wish, "as asked" if wish == 0 else ""
        return (0, reason) if reason else (DEFAULT_MAX_BATCH_SIZE, "")

    def _config(self, max_batch_size: int, buckets: Mapping[str, tuple[int, ...]]) -> pbtxt.TritonConfig:
        """The config to try: requests of different sizes may share a batch wherever a size is dynamic."""
        config = pbtxt.TritonConfig(name=self._wishes.name, backend="ortgraph", max_batch_size=max_batch_size)
        if max_batch_size:
            config.dynamic_batching.SetInParent()
        first = 1 if max_batch_size else 0
        for spec in self._inputs:
            if max_batch_size and _has_no_rows(spec):
                continue  # Triton would ask for a batch axis; it keeps the value that the model gives it
            entry = config.input.add(**_entry(spec, first))
            is_dynamic = any(not isinstance(size, int) for size in spec.shape[first:])
            if max_batch_size and is_dynamic:
                entry.allow_ragged_batch = True
            if not spec.is_required:
                entry.optional = True
            if max_batch_size and len(spec.shape) == 1:
                entry.reshape.SetInParent()  # one number a row: clients send [rows, 1], the model takes [rows]
        for spec in self._outputs:
            config.output.add(**_entry(spec, first))
        for key, value in (
            ("buckets", "; ".join(f"{name}={','.join(map(str, sizes))}" for name, sizes in buckets.items())),
            ("value_ranges", "; ".join(f"{name}={text}" for name, text in self._ranges.items())),
            ("execution_provider", self._wishes.provider if self._wishes.provider != "auto" else ""),
            ("graph_capture", "off"),
        ):
            pbtxt.set_parameter(config, key, value)
        return config

    def _try(self, max_batch_size: int, buckets: Mapping[str, tuple[int, ...]]) -> Proposal:
        """Load the model once with this config, as the serving process would."""
        config = self._config(max_batch_size, buckets)
        return Proposal(config, *_preflight(config, self._path, self._kind))

    def _hint(self, tried: Proposal) -> str:
        """What usually helps: sizes where no trial ran, ranges where whole numbers were drawn at random."""
        sizes = [dim.name for dim in tried.signature.dims[1:] if dim.name not in tried.ladders]
        if sizes and any("no trial run succeeded" in note for note in tried.findings.notes):
            return f"; name sizes that the model takes: --buckets '{sizes[0]}=SIZE,SIZE'"
        names = [s.name for s in self._inputs if s.dtype.storage.kind in "iu" and s.name not in self._ranges]
        return f"; if its values lie in a range, say so: --value-ranges '{names[0]}=LOW..HIGH'" if names else ""

    def _with_mask_ranges(self, tried: Proposal, max_batch_size: int, wished: Mapping[str, Any]) -> Proposal:
        """A mask is 0 or 1, which the model cannot say: where padding is not proven without that, try with it."""
        masks = [
            spec.name
            for spec in self._inputs
            if _MASK.fullmatch(spec.name) and spec.dtype.storage.kind in "iu" and spec.name not in self._ranges
        ]
        if not masks or all(tried.findings.padded):
            return tried
        before = dict(self._ranges)
        self._ranges |= dict.fromkeys(masks, "0..1")
        again = self._try(max_batch_size, wished)
        if sum(again.findings.padded) > sum(tried.findings.padded):
            found = ", ".join(f"{name}=0..1" for name in masks)
            self._said_of_ranges.append(f"{found}, with which padding is proven")
            return again
        self._ranges = before
        return tried

    def _with_buckets(self, tried: Proposal, max_batch_size: int) -> Proposal:
        """Buckets for each dimension that may be padded: as far up as the model runs, at most 512."""
        ladders: dict[str, tuple[int, ...]] = {}
        for place, dim in list(enumerate(tried.signature.dims))[1 if max_batch_size else 0 :]:
            is_candidate = tried.findings.padded[place] if max_batch_size else self._can_capture()
            for top in range(len(_LADDER), 0, -1) if is_candidate else ():
                trial = self._try(max_batch_size, {**ladders, dim.name: _LADDER[:top]})
                if trial.findings.padded[place]:
                    ladders[dim.name] = _LADDER[:top]
                    tried = trial
                    break
        thinned = _thinned(ladders, len(default_batch_ladder(max_batch_size)) if max_batch_size else 1)
        return tried if thinned == ladders else self._try(max_batch_size, thinned)

    def _can_capture(self) -> bool:
        return self._wishes.provider in ("cuda", "webgpu") or (self._wishes.provider == "auto" and self._kind == "GPU")

    def _leave_unproven_out(self, proposal: Proposal, max_batch_size: int) -> Proposal:
        """Switch off what was tried and not proven, and capture on where it was off for the trials."""
        dims = proposal.signature.dims
        padded = {
            name
            for place, (dim, is_padded) in enumerate(zip(dims, proposal.findings.padded, strict=True))
            for name, _ in dim.axes
            if is_padded and not (max_batch_size and place == 0)
        }
        for entry in proposal.config.input:
            if entry.allow_ragged_batch and entry.name not in padded:
                entry.ClearField("allow_ragged_batch")
                proposal.is_tried = False
        pbtxt.set_parameter(proposal.config, "graph_capture", "")
        proposal.is_tried &= not self._can_capture()
        if self._can_capture() and any(dim.name not in proposal.ladders for dim in dims[1 if max_batch_size else 0 :]):
            pbtxt.set_parameter(proposal.config, "captures_on_demand", _CAPTURES_ON_DEMAND)
        return proposal

    def _explain(self, proposal: Proposal, max_batch_size: int, no_batch: str) -> None:
        findings = proposal.findings
        decisions = {}
        if not max_batch_size:
            decisions["joined"] = f"no, a request at a time: {no_batch}"
        elif findings.can_join:
            decisions["joined"] = (
                f"yes, up to {max_batch_size} rows in one run; measured: no row changes another's answer"
            )
        else:
            decisions["joined"] = f"no: {_reason(findings, 'requests are never joined: ') or _first(findings)}"
        decisions["padded"] = self._padded(proposal, max_batch_size)
        if alone := [note for note in findings.notes if note.startswith("requests with ")]:
            decisions["alone"] = "; ".join(alone)
        decisions["captured"] = self._captured()
        if self._said_of_ranges:
            decisions["value ranges"] = "; ".join(self._said_of_ranges)
        proposal.decisions = decisions

    def _padded(self, proposal: Proposal, max_batch_size: int) -> str:
        offset = 1 if max_batch_size else 0
        dims, padded = proposal.signature.dims[offset:], proposal.findings.padded[offset:]
        if not dims:
            return "nothing to pad: every size" + (" but the batch" if offset else "") + " is fixed"
        yes = []
        for dim, is_padded in zip(dims, padded, strict=True):
            if is_padded:
                sizes = proposal.ladders.get(dim.name)
                yes.append(f"{dim.name}{f' to {_listed(sizes)}' if sizes else ''}")
        no = [
            note for note in proposal.findings.notes if " is never padded: " in note or note.startswith("nothing is p")
        ]
        if yes:
            return "; ".join([f"{', '.join(yes)}; measured: padding changes no answer", *no])
        if no:
            return f"no, requests run at their exact sizes: {no[0]}" + (f" (and {len(no) - 1} more)" if no[1:] else "")
        return "no, requests run at their exact sizes" + ("" if max_batch_size else ", since they are not joined")

    def _captured(self) -> str:
        """What the graph says of captures; where there is a GPU the last check says what became of it."""
        if self._can_capture():
            return "yes"
        forbidden = [obstacle for obstacle in obstacles(self._model) if "cuda" in obstacle.providers]
        if forbidden:
            return (
                "no: the CPU captures no graphs; nor would a GPU: "
                f"{forbidden[0].nodes[0]} ({forbidden[0].reason}); 'ortgraph inspect' lists all"
            )
        return "no: the CPU captures no graphs; nothing in the graph forbids it on a GPU"


def _thinned(ladders: Mapping[str, tuple[int, ...]], batch_sizes: int) -> dict[str, tuple[int, ...]]:
    """The same ladders with so few sizes that all buckets together may be captured; the largest sizes stay."""
    thinned = dict(ladders)
    while math.prod(map(len, thinned.values())) * batch_sizes > MAX_BUCKETS:
        longest = max(thinned, key=lambda name: len(thinned[name]))
        if len(thinned[longest]) == 1:
            break
        thinned[longest] = thinned[longest][::-1][::2][::-1]
    return thinned


def check_copy(proposal: Proposal, path: Path) -> list[str]:
    """What `check` says of the proposal's model in its place; where all of it was tried, it only has to open there.

    Raises:
        LoadError: it cannot be served.
    """
    if not proposal.is_tried:
        return check(proposal.config, path)
    open_provider(pbtxt.settings(proposal.config, path, kind=instance_kind())).close()
    return proposal.findings.notes


def check(config: pbtxt.TritonConfig, path: Path, kind: str = "") -> list[str]:
    """Load the model just as it will be served, captures and all; what is not done, a sentence each.

    Args:
        kind: of the instance, "CPU" or "GPU"; by default where Triton would put it on this machine.

    Raises:
        LoadError: it cannot be served.
    """
    _, findings, _ = _preflight(config, path, kind or instance_kind())
    return findings.notes


def _preflight(
    config: pbtxt.TritonConfig, path: Path, kind: str
) -> tuple[Signature, Findings, dict[str, tuple[int, ...]]]:
    engine = Engine.load(pbtxt.settings(config, path, kind=kind))
    try:
        dims = zip(engine.signature.dims, engine.table.ladders, strict=True)
        return engine.signature, engine.findings, {dim.name: ladder for dim, ladder in dims if ladder}
    finally:
        engine.close()


def _parsed(buckets: str) -> dict[str, tuple[int, ...]]:
    try:
        return parse_buckets(buckets)
    except ValueError as rule:
        raise ConfigError(f"--buckets must be {rule}, got '{buckets}'") from None


def _entry(spec: TensorSpec, first: int) -> dict[str, Any]:
    dims = [size if isinstance(size, int) else -1 for size in spec.shape[first:]] or [1]
    return {"name": spec.name, "data_type": model_config_pb2.DataType.Value(spec.dtype.triton or ""), "dims": dims}


def _has_no_rows(spec: TensorSpec) -> bool:
    """An initializer of a fixed size that may be overridden."""
    return not spec.is_required and (not spec.shape or isinstance(spec.shape[0], int))


def _why_no_batch(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> str:
    """Why the first axis of the tensors cannot be a batch of requests; empty where it may be one."""
    required = [spec for spec in inputs if spec.is_required]
    for kind, specs in (("input", required), ("output", outputs)):
        for spec in specs:
            if not spec.shape and kind == "input":
                return f"input '{spec.name}' is a scalar"
            if spec.shape and isinstance(spec.shape[0], int):
                return f"{kind} '{spec.name}' has the fixed size {spec.shape[0]} on its first axis"
    if not required or all(len(spec.shape) < 2 for spec in required):
        return "every input has a single axis, which is its length"
    for spec in required:
        if isinstance(spec.shape[0], str) and _NOT_BATCH.fullmatch(spec.shape[0]):
            return f"the first axis of input '{spec.name}' is called '{spec.shape[0]}', which is no batch"
    return ""


def _reason(findings: Findings, start: str) -> str:
    return next((note.removeprefix(start) for note in findings.notes if note.startswith(start)), "")


def _first(findings: Findings) -> str:
    return findings.notes[0] if findings.notes else "the model was not examined"


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
