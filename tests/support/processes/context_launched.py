"""Context parallelism under torchrun, for three ranks: FOLDER, and torch or accelerate to create the group.

Shards of 41, 0 and 7 rows give the rows of one process. Then rank 2 stops answering, and later rank 1 exits: the errors that
rank 0 gets are written to FOLDER/errors.txt.
"""

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from torch import distributed as dist

from alibi_attn.attention.api import alibi_attention
from alibi_attn.distributed import context_parallel_attention

LENGTHS = (41, 0, 7)
PATIENCE = 1.5  # seconds


def error_of_exchange(group: dist.ProcessGroup, timeout: float) -> str:
    q = torch.zeros(1, 4, 10, 8)
    begin = time.monotonic()
    try:
        context_parallel_attention(q, q, q, group=group, timeout=timeout)
    except RuntimeError as error:
        return f"{time.monotonic() - begin < 30} {error}"
    return "no error"


def equals_one_process(rank: int, group: dist.ProcessGroup) -> bool:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 4, sum(LENGTHS), 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    shard = [x.split(LENGTHS, dim=2)[rank] for x in whole]
    output = context_parallel_attention(*shard, window=10**30, group=group, timeout=60.0)
    expected = alibi_attention(*whole)
    assert isinstance(output, Tensor)
    assert isinstance(expected, Tensor)
    return torch.allclose(output, expected.split(LENGTHS, dim=2)[rank], rtol=0.0, atol=1e-12)


def main(folder: Path, start: str) -> None:
    if start == "accelerate":
        PartialState(cpu=True)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole, hanging, dying = (dist.new_group([0, 1, 2]) for _ in range(3))
    (folder / f"equal-{rank}.txt").write_text(str(equals_one_process(rank, whole)))
    if rank == 0:
        errors = [error_of_exchange(hanging, PATIENCE), error_of_exchange(dying, 120.0)]
        (folder / "errors.txt").write_text("\n".join(errors))
    else:
        time.sleep(2 * PATIENCE)  # long enough for rank 0 to give up on the first exchange
    os._exit(0)  # without shutting the group down, as a crash would


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
