"""Settings for every test: fixed examples, no deadlines, quick XLA compilation, cheap garbage collection.

JAX's tests mostly compile: with level 1 its conformance tests take 1.4 times as long, and with the default level the
examples of docs/jax.md 1.3 times. XLA's newer code generator for fused loops takes three times as long as the older,
equivalent one, and splitting each program for several compiling threads costs a tenth; the long tests do as users do.
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from importlib import metadata

import pytest
from hypothesis import settings
from lesser_processor import ENVIRONMENTS, hide
from processor_time import ProcessorTime

QUICK_XLA = "--xla_backend_optimization_level=0"
QUICKER_XLA = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

settings.register_profile("alibi-attn", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("alibi-attn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", action="store_true", help="print the processor time of each file")
    parser.addoption("--processor", choices=ENVIRONMENTS, help="hide what a lesser processor does not have")


def pytest_configure(config: pytest.Config) -> None:
    """Sets flags before a test module loads torch or JAX, which read them once."""
    if config.option.processor and not hasattr(config, "workerinput"):  # xdist's workers inherit it
        config.add_cleanup(hide(config.option.processor).cleanup)
    if config.option.processor_time:
        config.pluginmanager.register(ProcessorTime(config))
    flags = [os.environ.get("XLA_FLAGS", ""), QUICK_XLA]
    # XLA ends the process at a flag that it does not know; JAX 0.12 has dropped one of these.
    if config.option.markexpr == "not long":
        flags += [QUICKER_XLA for found in metadata.distributions(name="jaxlib") if found.version.startswith("0.10.")]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # by default, processes that each import torch
    if sys.version_info >= (3, 14):  # a false alarm of hypothesis 6.170 about its own generator, in its first test
        config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random`")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Loads frameworks without garbage collections and freezes them: every training ends with one, and many tests train."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_modules_before_left_stays() -> None:
    """Also freezes torch.compile's and JAX's caches, which make every later collection a second long."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """For most tests of a file: `pytestmark = pytest.mark.usefixtures("no_gradients")`."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Decoding reads near keys only, however few there are. The options of every such call, and "length": its keys."""
    from alibi_attn.attention.run import decoding, near_keys

    calls, attend_near = [], decoding.attend_near

    def recorded(query, key, *given, **options):
        calls.append({"length": key.shape[2], **options})
        return attend_near(query, key, *given, **options)

    monkeypatch.setattr(decoding, "LONG", 0)
    monkeypatch.setattr(decoding, "attend_near", recorded)
    monkeypatch.setattr(near_keys, "FEW", 32)
    return calls


def pytest_unconfigure() -> None:
    """Unfreezes at the end, or extensions would report leaks."""
    gc.unfreeze()
