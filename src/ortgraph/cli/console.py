"""What every command prints with."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """One line on standard error, then exit."""
    errors.print(f"error: {message}", style="bold red", markup=False)
    raise typer.Exit(code)
