"""The `ortgraph` command; one file a command."""

from __future__ import annotations

import typer

from .add import add
from .convert import convert
from .doctor import doctor
from .fetch import fetch
from .inspect import inspect
from .optimize import optimize
from .profile import profile
from .quantize import quantize
from .serve import serve
from .tune import tune

app = typer.Typer(
    help="Serve ONNX models on NVIDIA Triton with a captured graph per shape bucket.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command in (add, inspect, convert, serve, doctor, profile, optimize, quantize, tune, fetch):
    app.command()(command)
