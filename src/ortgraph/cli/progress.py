"""The progress bar of commands that measure."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console import errors


def progress_bar() -> Progress:
    """On standard error, with the time left; nothing where that is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
