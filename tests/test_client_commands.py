"""The client's own half of the samples: drawing a line, reading CTC, tokens; and the commands' one-line errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from client import InvalidInput
from client.command import BadFile
from client.embed import load_tokenizer, similarity_table, tokenize
from client.read import decode_line, line_tensor, load_labels, load_line

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "client" / "samples" / "hello.png"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_a_line_is_48_high_blue_first_and_padded_with_0_to_a_bucket_width() -> None:
    image = Image.new("RGB", (100, 24), (255, 0, 0))
    tensor = line_tensor(image)
    assert tensor.shape == (1, 3, 48, 320)
    assert tensor.dtype == np.float32
    assert tensor[0, :, 10, 10].tolist() == [-1.0, -1.0, 1.0]
    assert not tensor[..., 200:].any()


@pytest.mark.parametrize(("size", "width"), [((10, 48), 320), ((321, 48), 480), ((961, 48), 1280), ((1, 900), 320)])
def test_line_widths_are_those_of_the_buckets(size: tuple[int, int], width: int) -> None:
    assert line_tensor(Image.new("L", size)).shape == (1, 3, 48, width)


def test_a_transparent_background_is_white() -> None:
    tensor = line_tensor(Image.new("RGBA", (10, 48), (0, 0, 0, 0)))
    assert (tensor[..., :10] == 1).all()


def test_ctc_joins_repeats_drops_blanks_and_averages_what_is_left() -> None:
    labels = ["<blank>", "a", "b", " "]
    probabilities = np.full((7, 4), 0.01, np.float32)
    for step, (label, value) in enumerate([(0, 0.9), (1, 0.8), (1, 0.7), (0, 0.9), (1, 0.6), (3, 1.0), (2, 0.4)]):
        probabilities[step, label] = value
    reading = decode_line(probabilities, labels)
    assert reading.text == "aa b"
    assert reading.confidence == pytest.approx((0.8 + 0.6 + 1.0 + 0.4) / 4)


def test_a_blank_line_has_no_text_and_no_confidence() -> None:
    reading = decode_line(np.array([[0.9, 0.1]], np.float32), ["<blank>", "a"])
    assert (reading.text, reading.confidence) == ("", 0.0)


def test_labels_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 classes, the labels file 2 lines"):
        decode_line(np.zeros((1, 3), np.float32), ["<blank>", "a"])


def test_labels_keep_their_last_line_a_space() -> None:
    labels = load_labels()
    assert len(labels) == 6625
    assert labels[-1] == " "
    assert all(len(label) == 1 for label in labels[1:])


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for load in (load_labels, load_line, load_tokenizer):
        with pytest.raises(BadFile, match="missing"):
            load(tmp_path / "missing")  # type: ignore[operator]
    text = tmp_path / "text.png"
    text.write_text("no image")
    with pytest.raises(BadFile, match="no image that Pillow can read"):
        load_line(text)


def test_tokens_have_the_length_of_their_sentence_and_at_most_256() -> None:
    tokenizer = load_tokenizer()
    short = tokenize(tokenizer, "a cat sits on the mat")
    assert short["input_ids"].tolist() == [[101, 1037, 4937, 7719, 2006, 1996, 13523, 102]]
    assert short["attention_mask"].tolist() == [[1] * 8]
    assert tokenize(tokenizer, "cat " * 1000)["input_ids"].shape == (1, 256)


def test_the_table_has_each_pair() -> None:
    table = similarity_table(["a", "b"], np.array([[1, 0], [0.6, 0.8]], np.float32))
    assert [list(column.cells) for column in table.columns[2:]] == [["1.000", "0.600"], ["0.600", "1.000"]]


@pytest.mark.parametrize("arguments", [("client.read", str(SAMPLE)), ("client.embed", "a", "b")])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_a_server_the_commands_say_so_in_one_line(arguments: tuple[str, ...], protocol: str) -> None:
    done = command(*arguments, "--url", "127.0.0.1:1", "--protocol", protocol)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Connection refused; is the server running? `make serve` starts it" in done.stderr
    assert done.stderr.count("\n") == 1


def test_bad_files_and_usage_have_their_exit_codes() -> None:
    missing = command("client.read", "no-such.png", "--url", "127.0.0.1:1")
    assert (missing.returncode, missing.stderr) == (1, "error: cannot read no-such.png: No such file or directory\n")
    assert command("client.embed", "only one").returncode == 2
