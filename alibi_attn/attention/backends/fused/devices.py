"""What a CUDA device has, and whether a machine has what the kernels need."""

import functools
import importlib.util

import torch

from alibi_attn.attention.call.transforms import constant_when_compiled


def is_large(device: torch.device) -> bool:
    """Whether a device has the matrix units and 227 KiB of shared memory of Hopper and Blackwell; true for the interpreter."""
    return device.type != "cuda" or _capability(device.index) in (9, 10)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper; true for the interpreter. Triton 3.6 fails to compile descriptors of keys for Blackwell."""
    return device.type != "cuda" or _capability(device.index) == 9


def processors(device: torch.device) -> int:
    """The streaming multiprocessors of a device; two in the interpreter."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _capability(index: int | None) -> int:
    if torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(index)[0]


@constant_when_compiled
def missing(device: int | None) -> str | None:
    """The requirement that is missing on this machine, or None."""
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton; pip install triton"
    if device is not None and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"it needs compute capability 8.0 but the device has {capability[0]}.{capability[1]}"
    return None
