"""Five things people ask first about ALiBi, in a few seconds on any machine.

python examples/five_demonstrations.py                   # prints four of them
python examples/five_demonstrations.py --png heads.png   # and draws the fifth: the picture of the heads
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache

VOCABULARY, WIDTH, HEADS = 16, 32, 8


class LanguageModel(nn.Module):
    """Two blocks between an embedding and its way back. Nothing in it knows of positions, or of a longest sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ALiBiTransformerBlock(WIDTH, HEADS) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, caches: Sequence[KVCache | None] = (None, None)) -> Tensor:
        """Scores of the next token: tokens [B, T] → [B, T, VOCABULARY]."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache=cache)
        return self.head(x)


def text(batch: int, length: int) -> Tensor:
    """Made-up text, [B, length]: a token is followed by itself plus the one before it, so that order matters."""
    tokens = torch.randint(VOCABULARY, (batch, 2))
    while tokens.shape[1] < length:
        tokens = torch.cat([tokens, tokens[:, -2:].sum(1, keepdim=True) % VOCABULARY], dim=1)
    return tokens


def accuracy(model: LanguageModel, tokens: Tensor) -> float:
    """Share of the third and later tokens that the model predicts."""
    with torch.no_grad():
        predicted = model(tokens[:, :-1]).argmax(-1)
    return (predicted == tokens[:, 1:])[:, 1:].float().mean().item()


def trained(length: int, *, steps: int) -> LanguageModel:
    """A model trained on made-up text of one length."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = text(32, length)
        loss = F.cross_entropy(model(tokens[:, :-1])[:, 1:].flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def cached_steps(model: LanguageModel, tokens: Tensor, *, steps: int) -> float:
    """Decode the last tokens one at a time; returns the largest difference to the scores of one full pass."""
    caches = [KVCache() for _ in model.blocks]
    with torch.no_grad():
        scores = [model(tokens[:, :-steps], caches)]
        for step in range(steps):
            at = tokens.shape[1] - steps + step
            scores.append(model(tokens[:, at : at + 1], caches))
        return (torch.cat(scores, dim=1) - model(tokens)).abs().max().item()


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, help="save the picture of the heads here")
    parser.add_argument("--length", type=int, default=32, help="tokens of a training text (default 32)")
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    attention, x = ALiBiAttention(embed_dim=64, num_heads=8), torch.randn(2, 10, 64)
    print(f"1. Shapes: {list(x.shape)} in, {list(attention(x).shape)} out; a longer x needs no other module.")

    model = trained(options.length, steps=options.steps)
    for factor in (1, 2, 8):
        share = accuracy(model, text(64, factor * options.length))
        seen = "the trained length" if factor == 1 else f"{factor} times that length"
        print(f"2. Trained at {options.length} tokens; right at {seen}: {share:.1%} (chance is {1 / VOCABULARY:.1%})")

    difference = cached_steps(model, text(4, 2 * options.length), steps=5)
    print(f"3. Five cached steps differ from one full pass by {difference:.1e} at most.")

    linear_maps = 4 * 64 * 64
    print(
        f"4. Parameters of the layer: {parameters(attention):,}; of its four linear maps: {linear_maps:,}. ALiBi adds none."
    )

    if options.png is None:
        print("5. The picture of the heads: ask for it with --png heads.png")
    else:
        from alibi_attn.report import plot_alibi_bias  # needs matplotlib, which the others do not

        plot_alibi_bias(HEADS, 256).savefig(options.png, dpi=150)
        print(f"5. The picture of the heads: {options.png}")


if __name__ == "__main__":
    main()
