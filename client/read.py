"""`python -m client.read image.png`: the text on an image of one line, by PP-OCRv4's recognition model on Triton.

Drawing the line as the model wants it and reading its answer (CTC) are the client's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image, UnidentifiedImageError
from rich.console import Console

from client.command import (
    MODEL_REPOSITORY,
    BadFile,
    DeadlineS,
    Protocol,
    ProtocolOption,
    Url,
    one_line_errors,
    server_url,
)
from client.errors import InvalidInput
from client.grpc_client import GrpcClient
from client.http_client import HttpClient
from client.tensors import Array

MODEL = "text_recognition"
LABELS = MODEL_REPOSITORY / MODEL / "labels.txt"
HEIGHT_PX = 48
WIDTHS_PX = (320, 480, 640, 960)
BLANK_INDEX = 0


@dataclass(frozen=True)
class Reading:
    """A line of text; `confidence` is the mean probability of its characters, 0 to 1 (0 without text)."""

    text: str
    confidence: float


def load_labels(path: Path = LABELS) -> list[str]:
    """The text of each class, one a line: first CTC's blank, last a space. Raises BadFile."""
    if not path.is_file():
        raise BadFile(f"no labels at {path}; `make models` builds them")
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def load_line(path: Path) -> Array:
    """An image file as the model's input. Raises BadFile."""
    try:
        with Image.open(path) as image:
            return line_tensor(image)
    except UnidentifiedImageError:
        raise BadFile(f"{path} is no image that Pillow can read") from None
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror or error}") from None


def line_tensor(image: Image.Image) -> Array:
    """FP32 [1, 3, 48, width], blue green red, -1 to 1 (PP-OCRv4's preprocessing).

    The line keeps its aspect; it is padded on the right with 0 (middle grey) to the next width that the server has a
    bucket for, or beyond the last to a multiple of 320.
    """
    opaque = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    line_px = max(1, math.ceil(HEIGHT_PX * opaque.width / opaque.height))
    line = opaque.resize((line_px, HEIGHT_PX), Image.Resampling.BILINEAR)
    rgb = np.asarray(line, dtype=np.float32)
    width_px = next((width for width in WIDTHS_PX if width >= line_px), math.ceil(line_px / 320) * 320)
    tensor = np.zeros((1, 3, HEIGHT_PX, width_px), dtype=np.float32)
    tensor[0, :, :, :line_px] = (rgb[:, :, ::-1].transpose(2, 0, 1) / 255 - 0.5) / 0.5
    return tensor


def decode_line(probabilities: Array, labels: Sequence[str]) -> Reading:
    """CTC, greedy: the best class of each step of [steps, classes], repeats joined, blanks dropped."""
    if probabilities.shape[-1] != len(labels):
        raise InvalidInput(f"the model has {probabilities.shape[-1]} classes, the labels file {len(labels)} lines")
    best = probabilities.argmax(axis=-1)
    is_new = np.concatenate([[True], best[1:] != best[:-1]])
    steps = np.flatnonzero(is_new & (best != BLANK_INDEX))
    text = "".join(labels[label] for label in best[steps])
    return Reading(text, float(probabilities[steps, best[steps]].mean()) if len(steps) else 0.0)


def read_line(client: HttpClient | GrpcClient, line: Array, labels: Sequence[str], model: str = MODEL) -> Reading:
    """Send one line, [1, 3, 48, width], and read the answer."""
    (image_input,) = client.metadata(model).inputs
    (probabilities,) = client.infer(model, {image_input.name: line}).values()
    return decode_line(probabilities[0], labels)


def main(
    images: Annotated[list[Path], typer.Argument(help="Image files, each of one line of text.")],
    url: Url = None,
    protocol: ProtocolOption = Protocol.http,
    model: Annotated[str, typer.Option(help="Name of the recognition model.")] = MODEL,
    labels: Annotated[Path, typer.Option(help="Its labels, one a line.", show_default=False)] = LABELS,
    deadline_s: DeadlineS = 10.0,
) -> None:
    """Print the text on each of IMAGES and how sure the model is."""
    client_class = HttpClient if protocol is Protocol.http else GrpcClient
    console = Console(soft_wrap=True)
    with one_line_errors(), client_class(server_url(url, protocol), deadline_s=deadline_s) as client:
        texts = load_labels(labels)
        for path in images:
            reading = read_line(client, load_line(path), texts, model)
            prefix = f"{path}: " if len(images) > 1 else ""
            console.print(
                f"{prefix}{reading.text.strip()}  ({reading.confidence:.1%} sure)", markup=False, highlight=False
            )


if __name__ == "__main__":
    typer.run(main)
