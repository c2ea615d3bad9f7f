"""The Triton kernels, interpreted, compute every field that they declare."""

from concurrent.futures import ProcessPoolExecutor

import pytest
from used_fields import assert_computes

from alibi_attn.attention.run.dispatch import BACKENDS


@pytest.mark.parametrize("field", sorted(BACKENDS["fused"].READS))
def test_the_kernels_compute_what_they_declare(interpreter: ProcessPoolExecutor, field: str) -> None:
    interpreter.submit(assert_computes, field, "fused").result()
