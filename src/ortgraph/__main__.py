"""`python -m ortgraph`."""

from .cli import app

app()
