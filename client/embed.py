"""`python -m client.embed "a sentence" "another"`: how alike sentences are, by a sentence embedding model on Triton.

The tokenizer is the client's part. Each sentence is a request of its own, all at once and each as long as it is; the
server puts them into one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from client.aio import AsyncClient, AsyncGrpcClient, AsyncHttpClient
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
from client.tensors import Array

MODEL = "text_embedding"
MAX_TOKENS = 256
TOKENIZER = MODEL_REPOSITORY / MODEL / "tokenizer.json"


def load_tokenizer(path: Path = TOKENIZER) -> Tokenizer:
    """The tokenizer of `text_embedding`: no padding, at most 256 tokens a sentence. Raises BadFile."""
    if not path.is_file():
        raise BadFile(f"no tokenizer at {path}; `make models` builds it")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def tokenize(tokenizer: Tokenizer, sentence: str) -> dict[str, Array]:
    """Inputs of the model for one sentence: `input_ids` and `attention_mask`, INT64 [1, tokens]."""
    ids = np.array([tokenizer.encode(sentence).ids], dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


async def embed(client: AsyncClient, tokenizer: Tokenizer, sentences: Sequence[str], model: str = MODEL) -> Array:
    """Unit-length embeddings, FP32 [sentences, 384]; one request a sentence, all at once."""
    answers = await asyncio.gather(
        *(client.infer(model, tokenize(tokenizer, sentence), outputs=["embedding"]) for sentence in sentences)
    )
    return np.concatenate([answer["embedding"] for answer in answers])


def similarity_table(sentences: Sequence[str], embeddings: Array) -> Table:
    """The cosine of each pair; embeddings have length 1, so it is their dot product."""
    similarities = embeddings @ embeddings.T
    table = Table(title="Similarity (1 = same meaning)", title_justify="left")
    table.add_column("")
    table.add_column("sentence", overflow="fold")
    for number in range(1, len(sentences) + 1):
        table.add_column(str(number), justify="right")
    for number, (sentence, row) in enumerate(zip(sentences, similarities, strict=True), start=1):
        table.add_row(str(number), sentence, *(f"{value:.3f}" for value in row))
    return table


def main(
    sentences: Annotated[list[str], typer.Argument(help="Two or more sentences.")],
    url: Url = None,
    protocol: ProtocolOption = Protocol.http,
    model: Annotated[str, typer.Option(help="Name of the embedding model.")] = MODEL,
    tokenizer: Annotated[Path, typer.Option(help="Its tokenizer.json.", show_default=False)] = TOKENIZER,
    deadline_s: DeadlineS = 10.0,
) -> None:
    """Print how alike SENTENCES are, each pair of them."""
    if len(sentences) < 2:
        raise typer.BadParameter("give two or more sentences, each in quotes")

    async def run() -> Array:
        client_class = AsyncHttpClient if protocol is Protocol.http else AsyncGrpcClient
        async with client_class(server_url(url, protocol), deadline_s=deadline_s) as client:
            return await embed(client, load_tokenizer(tokenizer), sentences, model)

    with one_line_errors():
        embeddings = asyncio.run(run())
    Console().print(similarity_table([_printable(sentence) for sentence in sentences], embeddings))


def _printable(sentence: str) -> str:
    return sentence.replace("[", r"\[")


if __name__ == "__main__":
    typer.run(main)
