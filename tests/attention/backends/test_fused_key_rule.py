"""No key loses its gradient in the Triton kernels because each query leaves out a little of it; interpreted."""

import math
from concurrent.futures import ProcessPoolExecutor

import key_rule_in_interpreter as inside
import pytest

from alibi_attn.attention.certificate.constants import TILE


@pytest.mark.parametrize("kind", inside.KINDS)
def test_a_key_loses_at_most_what_the_key_rule_allows(interpreter: ProcessPoolExecutor, kind: str) -> None:
    """With a limit per query alone, each leaves out 4 to 250 times as much of a query, and some keys lose their gradient."""
    call = inside.call_of(kind)
    certified, measured, lost = interpreter.submit(inside.left_out, call).result()
    assert max(certified, measured) <= 1
    (query, key, *_), _ = call
    group, blocks = query.shape[1] // key.shape[1], -(-query.shape[2] // TILE)
    assert lost <= inside.TOLERANCE * (1 + math.log(blocks)) * group


@pytest.mark.parametrize("biased", [False, True])
def test_attacks_obey_the_key_rule(interpreter: ProcessPoolExecutor, biased: bool) -> None:
    found = interpreter.submit(inside.attacked, range(30), biased=biased).result()
    certain = [drawn for drawn in found if drawn[3] < 0.5]
    assert max(max(certified, measured) / math.exp(2 * off) for certified, measured, _, off in certain) <= 1
    assert sum(lost > 0 for _, _, lost, _ in certain) >= 5, "an attack on nothing: too few draws leave out a key"
