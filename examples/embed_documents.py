"""What does it cost to embed a batch of long and short documents without splitting them?

python examples/embed_documents.py                                                  # random weights and texts
python examples/embed_documents.py jinaai/jina-embeddings-v2-base-en chapters/*.txt # published weights
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel, sentence_transformer


def embed_files(model: str, files: Sequence[Path]) -> None:
    """Embeds texts with a published encoder and prints their similarities."""
    encoder = sentence_transformer(model)
    vectors = encoder.encode([file.read_text(encoding="utf-8") for file in files])
    for file, row in zip(files, encoder.similarity(vectors, vectors), strict=True):
        print(file.name, " ".join(f"{similarity:.2f}" for similarity in row))


def embed_random(lengths: Sequence[int]) -> None:
    """Embeds a padded batch: padding costs nothing, and each text gets the same states as on its own."""
    config = ALiBiBertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=256
    )
    encoder = ALiBiBertModel(config).eval()
    texts = torch.randint(256, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        start = time.perf_counter()
        states = encoder(texts, mask.long()).last_hidden_state
        seconds = time.perf_counter() - start
        vectors = states.sum(1) / mask.sum(1, keepdim=True)  # the mean over a text; states at padding are 0
        alone = encoder(texts[:1, : lengths[0]]).last_hidden_state.mean(1)
    print(f"{mask.sum():,} tokens in a batch of {texts.numel():,}: {seconds:.2f} s")
    print(f"the first text alone differs by {(alone - vectors[0]).abs().max():.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder, or the name of a repository; default: random weights")
    parser.add_argument("files", nargs="*", type=Path, help="texts")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.model is None:
        embed_random([200, 30, 4000, 1000])
    else:
        embed_files(options.model, options.files)


if __name__ == "__main__":
    main()
