"""What a long command shows while it works: what it does and the time left, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console import errors

Step = Callable[[str], None]


def progress_bar() -> Progress:
    """With the time left; nothing where standard error is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True))
    return Progress(*columns, *left, console=errors, transient=True, disable=not errors.is_terminal)


@contextlib.contextmanager
def steps(total: int) -> Iterator[Step]:
    """A function that says what begins now; each call after the first ends the step before it.

    Args:
        total: how many steps there are, or about so many: more calls than that stretch it.
    """
    with progress_bar() as progress:
        task, done = progress.add_task("", total=total), -1

        def step(text: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=text, completed=done, total=max(total, done + 1))

        yield step
