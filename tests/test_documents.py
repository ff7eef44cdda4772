"""Documents agree with what they speak of."""

from __future__ import annotations

import re

from benchmarks.documents import DOCUMENTS, render
from ortgraph import config
from ortgraph.metrics import DESCRIPTIONS
from ortgraph.server import ROOT

README = (ROOT / "README.md").read_text()


def test_every_table_is_what_its_result_gives():
    for path in DOCUMENTS:
        assert path.read_text() == render(path.read_text()), f"run 'python -m benchmarks document' ({path.name})"
    assert "<!-- table: " in README


def test_the_readme_names_every_parameter_and_every_metric():
    keys = {*config._PARAMETERS, *config._PROVIDER_OPTIONS}
    assert not [key for key in keys if f"`{key}`" not in README]
    assert not [name for name in DESCRIPTIONS if f"`{name}" not in README]


def test_the_commands_and_files_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
