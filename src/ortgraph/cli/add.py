"""`ortgraph add`: from an ONNX file to a model directory that serves it, with what was decided and why."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from . import pbtxt
from .console import console
from .files import CommandError, copy_model, load_model, new_folder, reported
from .progress import steps
from .proposal import Proposal, Wishes, check_copy, propose

ModelFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The ONNX file.", show_default=False)]
Repository = Annotated[Path, typer.Option("--repository", "-m", help="The model repository; made if it is not there.")]
Name = Annotated[str, typer.Option(help="The model's name. By default that of the file.", show_default=False)]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(min=0, max=65536, help="By default 32 where requests may be joined, else 0.", show_default=False),
]
Buckets = Annotated[
    str, typer.Option(help="Sizes, such as 'batch=1,2,4; sequence=32,64'. By default measured.", show_default=False)
]
Ranges = Annotated[
    str, typer.Option(help="Values that inputs may have, such as 'input_ids=0..30521'.", show_default=False)
]
Provider = Annotated[str, typer.Option(help="auto, cpu, cuda or webgpu.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a model of that name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

_STEPS = 5


def add(
    model: ModelFile,
    repository: Repository = Path("model_repository"),
    name: Name = "",
    max_batch_size: MaxBatchSize = None,
    buckets: Buckets = "",
    value_ranges: Ranges = "",
    provider: Provider = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a model directory for an ONNX file. Example: ortgraph add my_model.onnx -m my_models"""
    with reported():
        wishes = Wishes(_name(name, model), max_batch_size, buckets, value_ranges, _provider(provider))
        target = repository / wishes.name
        with steps(_STEPS) as step, new_folder(target, force=force) as folder:
            proposal = propose(load_model(model, with_data=False), model, wishes, step)
            version = folder / "1"
            version.mkdir()
            (folder / "config.pbtxt").write_text(pbtxt.text(proposal.config), encoding="utf-8")
            step("copying the model")
            copy_model(model, version / "model.onnx")
            step("checking the copy")
            notes = check_copy(proposal, version / "model.onnx")
    _report(proposal, notes, repository, target, as_json)


def _name(wished: str, model: Path) -> str:
    """The wished name, or the file's; `model.onnx` is called like its folder (not like a version's).

    Raises:
        CommandError: it is no name for a folder.
    """
    parents = [parent.name for parent in model.absolute().parents if not re.fullmatch(r"\d*|onnx", parent.name)]
    name = wished or (model.stem if model.stem != "model" else next(iter(parents), "model"))
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+-]*", name):
        raise CommandError(f"a model's name is made of letters, digits, '_', '-' and '.', got '{name}'; give --name")
    return name


def _provider(name: str) -> str:
    if name not in ("auto", "cpu", "cuda", "webgpu"):
        raise typer.BadParameter(f"auto, cpu, cuda or webgpu, got '{name}'", param_hint="--provider")
    return name


def _captured(proposal: Proposal, notes: list[str]) -> str:
    """What the check on a GPU said of captures."""
    if limit := pbtxt.parameter(proposal.config, "captures_on_demand"):
        return f"as they are seen, up to {limit} exact shapes at a time, since a size has no buckets"
    eager = [note for note in notes if "captured" in note or "run eager" in note]
    return "; ".join(eager) or "yes, every bucket; each replay was compared with an eager run"


def _report(proposal: Proposal, notes: list[str], repository: Path, target: Path, as_json: bool) -> None:
    decisions = dict(proposal.decisions)
    if decisions["captured"] == "yes":
        decisions["captured"] = _captured(proposal, notes)
    following = f"ortgraph serve -m {shlex.quote(str(repository))}"
    if as_json:
        result = {
            "name": proposal.config.name,
            "directory": str(target),
            "config": pbtxt.text(proposal.config),
            "decisions": decisions,
            "notes": notes,
            "next": following,
        }
        print(json.dumps(result))
        return
    console.print(f"[bold]{proposal.config.name}[/bold] is in {target}")
    width = max(map(len, decisions))
    for topic, decision in decisions.items():
        console.print(f"  {topic:<{width}}  {decision}", markup=False)
    console.print(f"Next: {following}", markup=False)
