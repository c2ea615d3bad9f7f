"""`alibi bench made-up`: ours compared with a loop over queries.

A test adds it to the table: one file with its own peer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from alibi_lab.measure.harness import Budget, keep, table
from alibi_lab.measure.inputs import Case, Inputs
from alibi_lab.measure.peers import Attention, Peer
from alibi_lab.measure.peers.ours import ours


def by_query(inputs: Inputs) -> Attention:
    """A peer that computes one query at a time."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for i in range(q.shape[2]):
            distance = i - torch.arange(i + 1)
            scores = q[:, :, i : i + 1] @ k[:, :, : i + 1].mT * q.shape[-1] ** -0.5
            rows.append((scores - inputs.slopes[:, None, None] * distance).softmax(-1) @ v[:, :, : i + 1])
        return torch.cat(rows, 2)

    return attention


def shifted(inputs: Inputs) -> Attention:
    """A wrong peer: every head has the slope of another head."""
    return by_query(replace(inputs, slopes=inputs.slopes.roll(1)))


def made_up(
    out: Path, *, lengths: Sequence[int] = (16,), peer: str = "by query", say: Callable[[str], None] = print
) -> list[Path]:
    """Measures ours and a loop over queries.

    Args:
        lengths: tokens, as in 8,16.
        peer: which loop.
    """
    peers = [Peer("ours", ours("auto"), "backend='auto'")]
    peers.append(Peer("by query", by_query if peer == "by query" else shifted, "a loop over the queries"))
    cases = {"made-up/noise": [Case("noise", length) for length in lengths]}
    configs = {"made-up/noise": {"lengths": list(lengths), "peers": {peer.name: peer.note for peer in peers}}}
    return keep(out, configs, table(cases, lambda case, inputs: peers, Budget(repeats=1, seconds=1.0)), say=say)


def typed(
    out: Path,
    *,
    count: int = 8,
    share: float = 0.5,
    folder: Path = Path("runs"),
    texts: Sequence[Path] = (),
    heads: Sequence[tuple[int, int]] = (),
    flag: bool = False,
    unlisted: str = "",
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Says its arguments.

    Args:
        count: a whole number.
        share: a number.
        folder: a path.
        texts: paths.
        heads: pairs.
        flag: whether.
    """
    say(repr((count, share, folder, texts, heads, flag)))
    return []
