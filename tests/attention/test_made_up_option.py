"""A new option takes five places: then the definition computes it, and every other consumer of a call refuses it."""

import re
from pathlib import Path

from programs import printed

from alibi_attn.attention.run.dispatch import BACKENDS

EXAMPLE = Path(__file__).parents[2] / "examples/extending/attention_option.py"
FUNCTIONS = "invariant", "head_reach", "certified_block_mask", "attention_rows", "explain", "varlen", "gates"


def test_what_declares_a_made_up_option_computes_it_and_all_else_refuses_it() -> None:
    said = printed(EXAMPLE)
    errors = re.findall(r"(\S+) computes (\d+) queries, off by (\S+)", said)
    assert [found[:2] for found in errors] == [(x, n) for n in ("200", "3") for x in ("reference", "dense", "auto")]
    assert all(float(error) < 1e-5 for *_, error in errors), said
    refused = dict(re.findall(r"^(.+?) refuses: (.*logit_cap.*)$", said, re.MULTILINE))
    kernels = {*BACKENDS} - {"reference", "dense"}
    assert {*refused} - {"jax"} == {*kernels, "native, with sinks", *FUNCTIONS}, said
    assert "logit_cap is -1.0 but must be at least 0" in said
