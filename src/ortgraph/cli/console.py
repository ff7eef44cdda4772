"""What every command prints with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """One line on standard error, then exit."""
    errors.print(f"error: {message}", style="bold red", markup=False)
    raise typer.Exit(code)


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, gone at the end; call what is yielded with a text as each step begins."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun = False

        def begin(text: str) -> None:
            nonlocal begun
            progress.update(task, description=text, advance=1 if begun else 0)
            begun = True

        yield begin
