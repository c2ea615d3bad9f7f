"""Adaptive inputs and adaptive softmax: frequent tokens get wide vectors, rare ones narrow vectors.

Tokens are sorted by frequency and cut into bands at `cutoffs`. Band n has vectors of E / 4ⁿ channels and a matrix that projects
them to E (Baevski and Auli 2019, sec. 3, arXiv:1809.10853). At the output, the first band and one class per further band form
the head; a further band is computed only for targets of its class (Grave et al. 2017, arXiv:1609.04309). Vectors and matrices
are shared with the input: `AdaptiveSoftmax` owns only its classes and receives the bands in every call.

As in fairseq, which trained the paper's model, the first band has a matrix at the input (E × E) and none at the output.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn.nn.linear.fastest import Linear, linear
from alibi_lab.lab.config import ConfigError

FACTOR = 4  # each band is narrower than the previous one by this factor; Baevski and Auli 2019, sec. 4.2


class AdaptiveInput(nn.Module):
    """Maps tokens [...] to vectors [..., E].

    Raises:
        ConfigError: a cutoff outside of the vocabulary, or too many bands for the width.
    """

    def __init__(self, vocab_size: int, embed_dim: int, cutoffs: Sequence[int]) -> None:
        super().__init__()
        narrowest = embed_dim // FACTOR ** len(cutoffs)
        if not all(0 < cutoff < vocab_size for cutoff in cutoffs) or narrowest < 1:
            raise ConfigError(
                f"model.cutoffs is {tuple(cutoffs)} for {vocab_size} tokens and vectors of {embed_dim}; cutoffs lie between 0 "
                f"and model.vocab_size, and each narrows the vectors by {FACTOR}: pass lower ones, or fewer"
            )
        self.edges = (0, *cutoffs, vocab_size)  # band n holds the tokens edges[n] ... edges[n + 1] − 1
        self.embed_dim = embed_dim
        sizes = [stop - start for start, stop in itertools.pairwise(self.edges)]
        widths = [embed_dim // FACTOR**n for n in range(len(sizes))]
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True))
        self.widen = nn.ModuleList(Linear(width, embed_dim, bias=False) for width in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.flatten()
        edges = itertools.pairwise(self.edges)
        rows = [((flat >= start) & (flat < stop)).nonzero().squeeze(1) for start, stop in edges]
        # Bands without tokens are computed too, so that every process of a training has every gradient.
        bands = zip(rows, self.edges[:-1], self.tables, self.widen, strict=True)
        vectors = [widen(table(flat[row] - start)) for row, start, table, widen in bands]
        order = torch.cat(rows).argsort()
        return torch.cat(vectors)[order].view(*tokens.shape, self.embed_dim)


class AdaptiveSoftmax(nn.Module):
    """ln p(token) of hidden states x [..., E], with the vectors and matrices of the `bands` passed to each call.

    Args:
        dropout: of x, and of its projection for a further band, as in fairseq.
    """

    def __init__(self, embed_dim: int, cutoffs: Sequence[int], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.classes = Linear(embed_dim, len(cutoffs), bias=False)
        self.dropout = nn.Dropout(dropout)

    def log_prob(self, x: Tensor, bands: AdaptiveInput) -> Tensor:
        """ln p of every token, [..., V] fp32."""
        x = self.dropout(x)
        head = self._head(x, bands)
        first, numbers = bands.edges[1], range(1, len(bands.tables))
        further = [head[..., first + n - 1, None] + self._band(x, bands, n).log_softmax(-1) for n in numbers]
        return torch.cat([head[..., :first], *further], dim=-1)

    def loss(self, x: Tensor, targets: Tensor, bands: AdaptiveInput) -> Tensor:
        """−ln p(target), [...] fp32; a further band is computed for its own targets only."""
        x, flat = self.dropout(x.flatten(0, -2)), targets.flatten()
        first = bands.edges[1]
        band = torch.bucketize(flat, torch.tensor(bands.edges[1:-1], device=flat.device), right=True)
        label = torch.where(band == 0, flat, first + band - 1)
        losses = -self._head(x, bands).gather(-1, label[:, None]).squeeze(-1)
        for n in range(1, len(bands.tables)):
            row = (band == n).nonzero().squeeze(1)
            inside = F.cross_entropy(self._band(x[row], bands, n), flat[row] - bands.edges[n], reduction="none")
            losses = losses.index_add(0, row, inside)
        return losses.view(targets.shape)

    def _head(self, x: Tensor, bands: AdaptiveInput) -> Tensor:
        """ln p of the first band's tokens and of the further bands' classes, [..., edges[1] + bands − 1]."""
        return linear(x, torch.cat([_weight(bands.tables[0]), self.classes.weight])).float().log_softmax(-1)

    def _band(self, x: Tensor, bands: AdaptiveInput, n: int) -> Tensor:
        """The scores inside a further band, [..., tokens of the band] fp32."""
        narrow = self.dropout(linear(x, _weight(bands.widen[n]).T))
        return linear(narrow, _weight(bands.tables[n])).float()


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module, nn.Embedding | nn.Linear)
    return module.weight
