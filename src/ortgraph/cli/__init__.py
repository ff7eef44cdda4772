"""The `ortgraph` command; one file a command."""

from __future__ import annotations

import typer

from .fetch import fetch
from .profile import profile
from .serve import serve
from .tune import tune

app = typer.Typer(
    help="Serve ONNX models on NVIDIA Triton with a captured graph per shape bucket.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(serve)
app.command()(fetch)
app.command()(profile)
app.command()(tune)
