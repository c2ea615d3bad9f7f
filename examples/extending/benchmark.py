"""`alibi bench made-up`: ours compared with a loop over queries.

    python examples/extending/benchmark.py

runs it: a benchmark with a new peer. To add it for good, copy this file without its last part to alibi_lab/measure/, and give it
a row in `BENCHMARKS` of alibi_lab/measure/benchmarks.py:

    "made-up": Benchmark("--lengths 8,16", function="alibi_lab.measure.benchmark:made_up"),
"""

from collections.abc import Callable, Sequence
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


def made_up(out: Path, *, lengths: Sequence[int] = (16,), say: Callable[[str], None] = print) -> list[Path]:
    """Measures, saves one record, and returns its path.

    Args:
        lengths: tokens, as in 8,16.
    """
    peers = [Peer("ours", ours("auto")), Peer("by query", by_query)]
    cases = {"made-up/noise": [Case("noise", length) for length in lengths]}
    configs = {"made-up/noise": {"lengths": list(lengths), "peers": [peer.name for peer in peers]}}
    return keep(out, configs, table(cases, lambda case, inputs: peers, Budget(repeats=1, seconds=1.0)), say=say)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made_up(Path(folder))
