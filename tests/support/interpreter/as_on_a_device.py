"""Makes every call of the case list as on a GPU, but compiles the kernels instead of launching them.

    python tests/support/interpreter/as_on_a_device.py sm_90 bfloat16 [case, case …]        default: all cases

A launch determines details that neither the interpreter nor `offline_compile.py` covers: which arguments are given, and which
types and alignments Triton compiles for. Do not set TRITON_INTERPRET.
"""

import collections
import functools
import json
import os
import sys
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from attention_cases import CASES, INSIDE, KEY_BIASES, Case
from attention_checks import arguments
from offline_compile import BATCH, FEW, HEADS, LENGTH, step
from torch import Tensor
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.norms import Norms
from alibi_lab.measure.absent_device import absent_device


def of_case(case: Case, dtype: torch.dtype) -> None:
    args, options = arguments(case, dtype)
    spec = make_spec(*args, **options)
    _call(spec, *args[:3], None)
    at_the_end = isinstance(spec.query_offset, int) and spec.query_offset == spec.key_len - spec.query_len
    if spec.causal and not spec.hides_keys and at_the_end:
        _call(spec, *args[:3], Norms.of(*args[1:3]))


def of_function(name: str, dtype: torch.dtype) -> None:
    """Calls of a public function: gates; dropout, also of parts that keep their numbers; tables, also of few queries."""
    mask, moved = torch.ones(BATCH, LENGTH, dtype=torch.bool), torch.arange(float(LENGTH)).expand(BATCH, -1)
    if name == "gates":
        gates = logsigmoid(torch.zeros(BATCH, HEADS, LENGTH))
        step(forgetting_attention, LENGTH, 64, gates, key_mask=mask, dtype=dtype)
    elif name == "dropout":
        for options in ({}, {"causal": False, "positions": moved}):
            step(alibi_attention, LENGTH, 64, torch.ones(HEADS), dropout_p=0.2, dtype=dtype, **options)
    else:
        for queries in (LENGTH, FEW):
            table = torch.zeros(HEADS, 2 * LENGTH - 1)
            step(toeplitz_attention, queries, 64, table, causal=False, key_mask=mask, dtype=dtype)


def _call(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor, known_norms: Norms | None) -> None:
    """Runs forward, and backward with and without gradients of slopes and lse."""
    tiles = fused.plan(spec, query, key, value, known_norms)
    given_lse = torch.empty(query.shape[:3]) if spec.key_bias is None else None
    output, lse = fused.forward(spec, query, key, value, tiles, given_lse=given_lse)
    for wanted in (True, False):
        biases = wanted and spec.key_bias is not None
        grads = output, lse if wanted else None
        fused.backward(spec, query, key, value, output, lse, *grads, tiles, slopes_wanted=wanted, biases_wanted=biases)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "a process that interprets cannot compile"
    steps = {case.name: functools.partial(of_case, case) for case in (*CASES, *INSIDE, *KEY_BIASES)}
    steps |= {name: functools.partial(of_function, name) for name in ("gates", "dropout", "table")}
    capability, found = divmod(int(sys.argv[1].removeprefix("sm_")), 10), collections.Counter()
    for name in sys.argv[3:] or steps:
        with absent_device(capability=capability, compiles=True) as launches:
            steps[name](getattr(torch, sys.argv[2]))
        found.update(x.kernel for x in launches)
        print(f"{name}: {len(launches)} launches", file=sys.stderr, flush=True)
    print(json.dumps(found))
