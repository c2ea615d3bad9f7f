"""`alibi bench gpu-models`: what `gpu` leaves out, in two minutes: CUDA graphs, gates, masks, static caches, each kernel, BLOOM,
an encoder, JAX.

Training steps and decoding through CUDA graphs, forget gates, key masks, each kernel by name, a BLOOM, an encoder, JAX. Each
part makes a record, has a share of the time, and a failure in it is the reason in a row. The scale "smoke" tests this file: the
same code at tiny sizes on a CPU, in Triton's interpreter.
"""

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from alibi_lab.measure.gpu_decoding import DECODING
from alibi_lab.measure.gpu_encoders import DOCUMENT, ENCODER, MIXED, TEXTS
from alibi_lab.measure.gpu_jax import JAX, JAX_TRITON
from alibi_lab.measure.gpu_kernels import OF_KERNELS
from alibi_lab.measure.gpu_linears import LINEARS, LINEARS_COMPILED
from alibi_lab.measure.gpu_networks import BLOOM, BLOOM_STEP
from alibi_lab.measure.gpu_parts import Case, Part, device_at, empty_row, failures, number_type
from alibi_lab.measure.gpu_steps import GATED, PLAIN, WITH_MASK
from alibi_lab.measure.harness import Config, Row, Rows, Say, keep

PARTS = (PLAIN, DECODING, OF_KERNELS, GATED, WITH_MASK, BLOOM, BLOOM_STEP, ENCODER, JAX, JAX_TRITON)
ENCODERS = (LINEARS, MIXED, DOCUMENT, TEXTS, LINEARS_COMPILED)  # on demand


def gpu_models(
    out: Path,
    *,
    parts: Sequence[str] = (),
    seconds: float = 155.0,
    scale: str = "full",
    say: Say = print,
) -> list[Path]:
    """Checks and measures, saves a record per part, and returns their paths.

    `relative_error` is a share of the largest number of its tensor. `forward_ms` is a call without gradients, `backward_ms` the
    rest of a training step; `host_us` is the time until the host has launched the step.

    Args:
        parts: parts to measure, in this order; default all but `make gpu --only encoders`.
        seconds: time limit in seconds for the whole benchmark; each part has its share, and what an earlier one leaves.
        scale: "full"; or "smoke", which runs on a CPU in Triton's interpreter (set TRITON_INTERPRET=1).

    Raises:
        ValueError: no CUDA device, or an unknown part.
        RuntimeError: one of our results was wrong; the records are kept. A wrong peer has a row without times.
    """
    known = {part.name: part for part in (*PARTS, *ENCODERS)}
    if unknown := [name for name in parts if name not in known]:
        raise ValueError(f"parts has {', '.join(unknown)} but must be of {', '.join(known)}")
    device = device_at(scale, "gpu-models")
    folder = "gpu-smoke" if device.type == "cpu" else "gpu"
    dtype = str(number_type(device)).removeprefix("torch.")
    chosen = {f"{folder}/models-{part.name}": part for part in [known[name] for name in parts] or PARTS}
    configs: dict[str, Config] = {}
    for name, part in chosen.items():
        cases = [str(case) for case in part.cases[scale]]
        configs[name] = {"cases": cases, "dtype": dtype, "device": device.type, "peers": dict(part.peers)}

    def steps() -> Iterator[Mapping[str, Rows]]:
        end, share = time.perf_counter(), seconds / sum(part.seconds for part in chosen.values())
        for name, part in chosen.items():
            end += part.seconds * share
            for case in part.cases[scale]:
                yield {name: measured(part, case, device, end)}

    for module in {module for part in chosen.values() for module in part.imports}:
        with contextlib.suppress(ImportError):  # the reason in the rows of the part
            importlib.import_module(module)
    return keep(out, configs, steps(), ours=lambda name, peer: peer.startswith(chosen[name].ours), say=say)


@torch.no_grad()
def measured(part: Part, case: Case, device: torch.device, end: float) -> dict[str, Row]:
    """The rows of a case by peer. After `end` the rest is left out. Only training steps have gradients."""
    known = failures()
    try:
        _check_time(end)
        calls = part.calls(case, device)
    except known as failure:
        return dict.fromkeys(part.peers, empty_row(part, case, failure))
    rows = {}
    for peer, call in calls.items():
        try:
            _check_time(end)
            rows[peer] = empty_row(part, case) | call()
        except known as failure:
            rows[peer] = empty_row(part, case, failure)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _check_time(end: float) -> None:
    if time.perf_counter() > end:
        raise TimeoutError("no time was left")
