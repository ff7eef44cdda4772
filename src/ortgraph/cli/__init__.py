"""The `ortgraph` command; one file a command."""

from __future__ import annotations

import typer

from .add import add
from .convert import convert
from .doctor import doctor
from .fetch import fetch
from .inspect import inspect
from .optimize import optimize
from .quantize import quantize
from .serve import serve

app = typer.Typer(
    help="Serve ONNX models on NVIDIA Triton with a captured graph per shape bucket.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(add)
app.command()(inspect)
app.command()(convert)
app.command()(serve)
app.command()(doctor)
app.command()(fetch)
app.command()(optimize)
app.command()(quantize)
