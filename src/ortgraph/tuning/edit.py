"""Set parameters in the text of a config.pbtxt, with its comments and order left as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .axes import INSTANCES


def edited(text: str, settings: Mapping[str, str]) -> str:
    """The text with these settings; what is there is changed in its place, what is not is added at the end.

    It is the caller's to check that the result reads as wanted: a text may be written in other ways than this knows.
    """
    added = []
    for key, value in settings.items():
        if key == INSTANCES:
            text, count = re.subn(
                r"(?ms)^(\s*instance_group\s*:?\s*\[?\s*\{[^{}]*?\bcount\s*:\s*)\d+",
                lambda match, value=value: match[1] + value,  # type: ignore[misc]
                text,
                count=1,
            )
            if not count:
                added.append(f"instance_group [ {{ count: {value} }} ]\n")
            continue
        pattern = rf'(key\s*:\s*"{re.escape(key)}"\s*,?\s*value\s*:?\s*\{{\s*string_value\s*:\s*)"[^"\n]*"'
        text, count = re.subn(pattern, lambda match, value=value: f'{match[1]}"{value}"', text, count=1)  # type: ignore[misc]
        if not count:
            added.append(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n')
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(added)
