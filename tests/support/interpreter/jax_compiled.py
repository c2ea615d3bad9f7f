"""What a training step in JAX launches on an absent device, compared with PyTorch; a standalone program, which prints JSON.

python tests/support/interpreter/jax_compiled.py causal     what Triton is asked to compile, and the grids; or symmetric
python tests/support/interpreter/jax_compiled.py sm_90      the parameters of the compiled code
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax_in_interpreter import launched_by

from alibi_attn.attention.api import alibi_attention as in_torch
from alibi_attn.jax import alibi_attention
from alibi_attn.jax.backends import launching
from alibi_attn.jax.backends.launching import Launch

SHAPE, KV_HEADS, WIDTHS = (2, 300, 4, 128), 2, {"i32": "u32", "i64": "u64", "fp32": "f32"}


def launched(**options: Any) -> Iterator[tuple[Launch, int]]:
    """The launches and numbers of programs of a training step in JAX, in bf16."""
    found = []

    def seen(
        kernel: Any, programs: int, arguments: Sequence[Any], *, num_warps: int = 4, num_stages: int = 3, **more: Any
    ) -> list[jax.Array]:
        asked = Launch(kernel, arguments, more, {"num_warps": num_warps, "num_stages": num_stages})
        found.append((asked, programs))
        return [asked.arrays[at] for at in asked.changed]

    def loss(*arrays: jax.Array) -> jax.Array:
        return alibi_attention(*arrays, backend="fused", **options).astype(jnp.float32).sum()

    b, t, h, d = SHAPE
    shapes = SHAPE, *((b, t, KV_HEADS, d),) * 2
    rows = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with launched_by(seen):
        jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), *rows, jax.ShapeDtypeStruct((h,), jnp.float32))
    yield from found


def in_pytorch(**options: Any) -> dict[str, tuple[Any, int]]:
    """By kernel, what the same step in PyTorch asks Triton to compile, and its number of programs."""
    from offline_compile import asked_to_compile

    with asked_to_compile() as (asked, launches):
        b, t, h, d = SHAPE
        shapes = SHAPE, *((b, t, KV_HEADS, d),) * 2
        rows = [torch.zeros(x, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for x in shapes]
        slopes = torch.ones(b, h, requires_grad=True)
        output = in_torch(*rows, slopes, backend="fused", **options)
        torch.autograd.grad(output, [*rows, slopes], torch.zeros_like(output))
    grids = {x.kernel: x.grid[0] for x in launches}
    return {name: (source, grids[name]) for name, (source, _) in asked.items()}


def differences(**options: Any) -> dict[str, list[str]]:
    """By kernel, what differs between the two."""
    theirs, found = in_pytorch(**options), {}
    for asked, programs in launched(**options):
        name, ours = asked.source.kernel.fn.__name__, asked.source
        source, their_programs = theirs[name]
        pairs = {
            "types": (ours.types, source.signature),
            "constants": (ours.constants, source.constants),
            "aligned": ({x: y for x, y in ours.aligned.items() if y}, {x: y for x, y in source.attrs.items() if y}),
            "programs": (programs, their_programs),
        }
        found[name] = [what for what, (a, b) in pairs.items() if a != b]
    return found


def parameters(capability: int) -> dict[str, bool]:
    """By kernel, whether the code's parameters are what JAX's launcher passes: pointers, numbers, and two more pointers."""
    found = {}
    for asked, _ in launched():
        code = launching.compiled(asked.source, capability)
        entry = re.search(r"\.entry \w+\((.*?)\)", code.asm["ptx"], re.DOTALL)
        assert entry is not None
        passed = ["u64" if x is None else WIDTHS[x[1]] for x in asked.numbers] + ["u64"] * 2
        is_alike = re.findall(r"\.param \.(\w+)", entry[1]) == passed and code.metadata.global_scratch_size == 0
        found[asked.source.kernel.fn.__name__] = is_alike
    return found


if __name__ == "__main__":
    (what,) = sys.argv[1:]
    is_target = what.startswith("sm_")
    print(json.dumps(parameters(int(what[3:])) if is_target else differences(causal=what == "causal")))
