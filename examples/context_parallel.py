"""How much data do processes exchange when they share one long text?

python examples/context_parallel.py                  # two processes on this machine, 4,096 tokens each
"""

import argparse
import tempfile

import torch
from torch import distributed, multiprocessing

from alibi_attn import alibi_attention
from alibi_attn.distributed import context_parallel_attention, plan_halo

RANKS, HEADS, SIZE = 2, 8, 64


def whole(tokens: int) -> torch.Tensor:
    """Query, key and value of the whole text, the same in every process: [3, 1, HEADS, tokens, SIZE]."""
    return torch.randn(3, 1, HEADS, tokens, SIZE, generator=torch.Generator().manual_seed(0))


def one_rank(rank: int, meeting: str, length: int) -> None:
    """One process: it has its rows of the text, and computes its rows of the output."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    q, k, v = whole(RANKS * length)
    rows = slice(rank * length, (rank + 1) * length)
    output = context_parallel_attention(q[:, :, rows], k[:, :, rows], v[:, :, rows])
    wrong = (output - alibi_attention(q, k, v)[:, :, rows]).abs().max()
    print(f"rank {rank}: its {length:,} rows differ by {wrong:.0e} from those of one process", flush=True)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens per process (default 4,096)")
    options = parser.parse_args()

    q, k, v = whole(RANKS * options.length)
    sent = plan_halo(q, k, v, lengths=[options.length] * RANKS).rows.sum().item()
    everything = HEADS * options.length * RANKS
    print(f"sent: {sent:,} rows of keys and the same number of values; an all-gather sends {everything:,} rows of each")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(one_rank, (f"{folder}/meeting", options.length), nprocs=RANKS)


if __name__ == "__main__":
    main()
