"""Makes every call of the case list as on a GPU, but compiles the kernels instead of launching them.

    python tests/support/interpreter/as_on_a_device.py sm_90 bfloat16 [case, case …]        default: all cases

A launch determines details that neither the interpreter nor hand-written signatures cover: which arguments are given, and which
types and alignments Triton compiles for. Do not set TRITON_INTERPRET.
"""

import collections
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from attention_cases import CASES, INSIDE, KEY_BIASES, Case
from attention_checks import arguments
from torch import Tensor

from alibi_attn import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.toeplitz import toeplitz_attention
from alibi_lab.measure.absent_device import absent_device


def compiled(target: str, dtype: torch.dtype, cases: Sequence[Case]) -> dict[str, int]:
    """Returns the number of launches of each kernel; raises if one does not compile or is called wrongly."""
    counts: collections.Counter[str] = collections.Counter()
    capability = divmod(int(target.removeprefix("sm_")), 10)
    for case in cases:
        args, options = arguments(case, dtype)
        with absent_device(capability=capability, compiles=True) as launches:
            spec = make_spec(*args, **options)
            _call(spec, *args[:3], None)
            at_the_end = isinstance(spec.query_offset, int) and spec.query_offset == spec.key_len - spec.query_len
            if spec.causal and not spec.hides_keys and at_the_end:
                _call(spec, *args[:3], Norms.of(*args[1:3]))
            counts.update(x.kernel for x in launches)
            print(f"{case}: {len(launches)} launches", file=sys.stderr, flush=True)
    return dict(counts)


def compiled_with_gates(target: str, dtype: torch.dtype) -> dict[str, int]:
    """`compiled`, for forget gates and a key mask, through the public function."""
    query, key, value = (torch.randn(2, h, 200, 64).to(dtype).requires_grad_() for h in (4, 2, 2))
    gates = torch.nn.functional.logsigmoid(torch.randn(2, 4, 200)).requires_grad_()
    with absent_device(capability=divmod(int(target.removeprefix("sm_")), 10), compiles=True) as launches:
        output = forgetting_attention(query, key, value, gates, key_mask=torch.ones(2, 200, dtype=torch.bool))
        torch.autograd.grad(output, [query, key, value, gates], output)
    return dict(collections.Counter(x.kernel for x in launches))


def compiled_with_dropout(target: str, dtype: torch.dtype) -> dict[str, int]:
    """`compiled`, with dropout through the public function: of keys in order, and of parts that keep their numbers."""
    query, key, value = (torch.randn(2, h, 200, 64).to(dtype).requires_grad_() for h in (4, 2, 2))
    moved = {"causal": False, "positions": torch.arange(200.0).expand(2, -1)}
    with absent_device(capability=divmod(int(target.removeprefix("sm_")), 10), compiles=True) as launches:
        for options in ({}, moved):
            output = alibi_attention(query, key, value, dropout_p=0.2, **options)
            torch.autograd.grad(output, [query, key, value], output)
    return dict(collections.Counter(x.kernel for x in launches))


def compiled_with_table(target: str, dtype: torch.dtype) -> dict[str, int]:
    """`compiled`, for tables of distances and a key mask, through the public function: many queries, and few."""
    table, mask = torch.randn(4, 1199).requires_grad_(), torch.ones(2, 600, dtype=torch.bool)
    with absent_device(capability=divmod(int(target.removeprefix("sm_")), 10), compiles=True) as launches:
        for queries in (200, 3):
            shapes = (2, 4, queries, 64), (2, 2, 600, 64), (2, 2, 600, 64)
            leaves = [*(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes), table]
            output = toeplitz_attention(*leaves, causal=False, key_mask=mask)
            torch.autograd.grad(output, leaves, output)
    return dict(collections.Counter(x.kernel for x in launches))


def _call(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, known_norms: Norms | None) -> None:
    """Runs forward, and backward with and without gradients of slopes and lse."""
    tiles = fused.plan(spec, query, key, value, known_norms)
    given_lse = torch.empty(query.shape[:3]) if spec.key_bias is None else None
    output, lse = fused.forward(spec, query, key, value, tiles, given_lse=given_lse)
    for wanted in (True, False):
        fused.backward(
            spec,
            query,
            key,
            value,
            output,
            lse,
            output,
            lse if wanted else None,
            tiles,
            slopes_wanted=wanted,
            biases_wanted=wanted and spec.key_bias is not None,
        )


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "a process that interprets cannot compile"
    every = {case.name: case for case in (*CASES, *INSIDE, *KEY_BIASES)}
    others = {"gates": compiled_with_gates, "dropout": compiled_with_dropout, "table": compiled_with_table}
    names = sys.argv[3:] or [*every, *others]
    target, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    found = compiled(target, dtype, [every[name] for name in names if name in every])
    for name, compile_them in others.items():
        for kernel, launches in (compile_them(target, dtype) if name in names else {}).items():
            found[kernel] = found.get(kernel, 0) + launches
    print(json.dumps(found))
