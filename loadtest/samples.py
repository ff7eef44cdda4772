"""Inputs to send and the answers that plain onnxruntime gives for them, computed once at the start."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from loadtest.answers import Array
from loadtest.lengths import Lengths
from ortgraph.config import parse_ranges
from ortgraph.errors import first_line

DTYPES: Mapping[str, type] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
# Integers without value_ranges are ids into some table of unknown size: small ones are in most.
MAX_ID = 1000


class LoadTestError(Exception):
    """The load test cannot start; one line says what to change."""


@dataclass(frozen=True)
class Sample:
    """One request and its right answer."""

    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]


def build_pool(
    model_folder: Path,
    lengths: Lengths,
    *,
    count: int,
    rows: int = 1,
    version: str = "1",
    texts: Path | None = None,
    images: Path | None = None,
    seed: int = 0,
    is_gpu: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """`count` different requests of `rows` rows each for the model in `model_folder`.

    Args:
        lengths: the size of every dynamic dimension except the batch.
        texts: a file with one text a line to send instead of random ids; needs the model's tokenizer.json.
        images: a folder of images to send instead of random values.
        progress: called after each sample.

    Raises:
        LoadTestError: the model, texts or images are not there, or the model has an input of another kind.
    """
    path = model_folder / version / "model.onnx"
    if not path.is_file():
        raise LoadTestError(
            f"the right answers are computed from the model, but {path} is not there; run `make models`"
        )
    # Where there is a GPU, an eager run on it: in half precision a CPU is slow.
    session = ort.InferenceSession(str(path), providers=["CUDAExecutionProvider", "CPUExecutionProvider"][not is_gpu :])
    config = read_config(model_folder)
    shapes = input_shapes(session, config)
    if texts is not None:
        feeds = text_feeds(model_folder / "tokenizer.json", texts)
    elif images is not None:
        feeds = image_feeds(session, shapes, images)
    else:
        rng = random.Random(seed)
        draws = ((lengths.draw(rng), rng.getrandbits(32)) for _ in range(count))
        ranges = value_ranges(config)
        feeds = [random_feed(session, shapes, ranges, rows, *draw) for draw in draws]
    if texts is not None or images is not None:
        feeds = [{name: np.repeat(array, rows, axis=0) for name, array in feed.items()} for feed in feeds[:count]]
    names = [output.name for output in session.get_outputs()]
    pool = []
    for feed in feeds:
        try:
            found = session.run(names, feed)
        except Exception as error:  # each of ONNX Runtime's has a type of its own
            raise LoadTestError(
                f"onnxruntime cannot run the model on what is to be sent: {first_line(error)}; give its whole numbers "
                "a range in value_ranges of config.pbtxt, or send --texts"
            ) from error
        pool.append(Sample(feed, dict(zip(names, found, strict=True))))
        progress()
    return pool


def read_config(model_folder: Path) -> Any:
    """Triton's message; an empty one where there is no config.pbtxt."""
    path = model_folder / "config.pbtxt"
    return text_format.Parse(path.read_text() if path.is_file() else "", model_config_pb2.ModelConfig())


def value_ranges(config: Any) -> Mapping[str, tuple[float, float]]:
    """The parameter's, by input; none for another backend's model."""
    written = config.parameters["value_ranges"].string_value if "value_ranges" in config.parameters else ""
    return parse_ranges(written) if written else {}


def input_shapes(session: ort.InferenceSession, config: Any) -> Mapping[str, Sequence[int | None]]:
    """Each input's sizes, None where they are open: the model's, and what config.pbtxt says of them more narrowly."""
    shapes = {spec.name: [n if isinstance(n, int) else None for n in spec.shape] for spec in session.get_inputs()}
    for tensor in config.input:
        dims = [None] * (config.max_batch_size > 0) + [size if size >= 0 else None for size in tensor.dims]
        if len(dims) == len(shapes.get(tensor.name, ())):
            shapes[tensor.name] = [own or narrow for own, narrow in zip(shapes[tensor.name], dims, strict=True)]
    return shapes


def random_feed(
    session: ort.InferenceSession,
    shapes: Mapping[str, Sequence[int | None]],
    ranges: Mapping[str, tuple[float, float]],
    rows: int,
    length: int,
    seed: int,
) -> dict[str, Array]:
    """Rows of random values for every input: masks are ones, whole numbers in their range or small, the rest normal."""
    rng = np.random.default_rng(seed)
    feed: dict[str, Array] = {}
    for spec in session.get_inputs():
        dtype = DTYPES.get(spec.type)
        if dtype is None:
            raise LoadTestError(
                f"input '{spec.name}' is {spec.type}; random values are made only for {', '.join(DTYPES)}"
            )
        sizes = enumerate(shapes[spec.name])
        shape = [size if size is not None else (rows if axis == 0 else length) for axis, size in sizes]
        if "mask" in spec.name.lower() or dtype is np.bool_:
            feed[spec.name] = np.ones(shape, dtype)
        elif np.issubdtype(dtype, np.integer):
            low, high = ranges.get(spec.name, (0, min(MAX_ID, np.iinfo(dtype).max) - 1))
            feed[spec.name] = rng.integers(int(low), int(high) + 1, shape).astype(dtype)
        else:
            feed[spec.name] = rng.standard_normal(shape).astype(dtype)
    return feed


def text_feeds(tokenizer_path: Path, texts: Path) -> Sequence[dict[str, Array]]:
    """One feed of ids and mask for each line of `texts` that is not empty."""
    from tokenizers import Tokenizer  # only needed with --texts

    for path in (tokenizer_path, texts):
        if not path.is_file():
            raise LoadTestError(f"texts need {path}, which is not there")
    lines = [line.strip() for line in texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise LoadTestError(f"{texts} must have at least one line of text")
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.no_padding()
    rows = [np.array([encoding.ids], dtype=np.int64) for encoding in tokenizer.encode_batch(lines)]
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]


def image_feeds(
    session: ort.InferenceSession, shapes: Mapping[str, Sequence[int | None]], folder: Path
) -> Sequence[dict[str, Array]]:
    """One feed for each image: RGB from -1 to 1, scaled to the height and width that the model fixes.

    Where the model leaves one of them open, the image keeps its aspect; where it leaves both, its size.
    """
    from PIL import Image, UnidentifiedImageError  # only needed with --images

    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise LoadTestError("images need a model with one input, float [batch, 3, height, width]")
    height, width = shapes[inputs[0].name][2:]
    feeds = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError):
            continue
        high = height or (round(image.height * width / image.width) if width else image.height)
        wide = width or max(1, round(image.width * high / image.height))
        pixels = np.asarray(image.resize((wide, max(high, 1))), dtype=np.float32)
        feeds.append({inputs[0].name: np.ascontiguousarray(pixels.transpose(2, 0, 1)[None] / 127.5 - 1)})
    if not feeds:
        raise LoadTestError(f"{folder} must be a folder with images, but none can be read there")
    return feeds
