"""Settings for every test: the same examples each time, no wall-clock deadline on a busy machine, quick compiling in XLA, and
collections of garbage that pass over what was imported.

Compiling is most of what tests of JAX do: with level 1 its conformance tests take 1.4 times as long, and with the usual one the
examples of docs/jax.md 1.3 times. XLA's newer way to generate fused loops takes three times as long as the older one, which means
the same; the long lists are computed by the newer one, as users have it.
"""

import gc
import os

import pytest
from hypothesis import settings

QUICK_XLA = "--xla_backend_optimization_level=0"
QUICKER_XLA = "--xla_cpu_use_fusion_emitters=false"

settings.register_profile("alibi-attn", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("alibi-attn")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module loads JAX, which reads this once."""
    flags = [os.environ.get("XLA_FLAGS", ""), QUICK_XLA]
    if config.option.markexpr == "not long":
        flags.append(QUICKER_XLA)
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))


def pytest_collection_finish() -> None:
    """The frameworks, which the test modules have loaded by now, stay; every training ends with a collection, and many train."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_modules_before_left_stays() -> None:
    """As well: what torch.compile and JAX keep for good makes each later collection a second long, and every training has one."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What extensions hold is given back at the end, or they say that it leaked."""
    gc.unfreeze()
