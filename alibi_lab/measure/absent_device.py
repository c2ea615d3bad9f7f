"""A stand-in for a CUDA device: tensors in CPU memory that say they are on one, and launches that are counted and run nothing.

What a call costs the host can then be measured on any machine: Python, torch's dispatcher and Triton's handling of arguments are
real; Triton's compiler, its last call into the driver, and the kernels are left out. Results are whatever memory holds.
Use it in a process of its own: constants that are cached for the device stay.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
PROCESSORS = 132  # of an H100
_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "randint", "tensor", "zeros")


class Launch(NamedTuple):
    """One launch: the kernel's name, the grid, and the arguments, some of which are tuples."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]

    @property
    def size(self) -> int:
        """The number of arguments, with tuples flattened."""
        return _count(self.arguments)


@contextlib.contextmanager
def absent_device(*, capability: tuple[int, int] = (9, 0), compiles: bool = False) -> Iterator[list[Launch]]:
    """Inside, every CPU tensor says that it is on `DEVICE`. Yields the launches.

    Args:
        capability: the device's compute capability.
        compiles: compile each kernel for the device, and launch it through Triton's own code; by default nothing is compiled.
    """
    from triton import compiler
    from triton.runtime import driver

    launches, before = list[Launch](), driver.active if driver._active is not None else None
    driver.set_active(_driver(launches, capability))
    compile_ = compiler.compile if compiles else functools.partial(_Kernel, launches)
    factories: dict[str, Any] = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    try:
        with (
            mock.patch.object(compiler, "compile", compile_),
            mock.patch.multiple(Tensor, device=DEVICE, is_cpu=False, is_cuda=True),
            mock.patch.multiple(torch, **factories),
            mock.patch.multiple(
                torch.cuda,
                device=contextlib.nullcontext,
                current_device=lambda: 0,
                is_current_stream_capturing=lambda: False,
                get_device_capability=lambda device=None: capability,
                get_device_properties=lambda device=None: types.SimpleNamespace(multi_processor_count=PROCESSORS),
            ),
        ):
            yield launches
    finally:
        driver.set_active(before)


def _driver(launches: list[Launch], capability: tuple[int, int]) -> types.SimpleNamespace:
    """In place of Triton's driver: it loads no code, and its launcher records the launch."""
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        launcher_cls=lambda source, metadata: _Kernel(launches, source).run,
        get_current_target=lambda: GPUTarget("cuda", capability[0] * 10 + capability[1], 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            load_binary=lambda name, kernel, shared, device: (0, 0, 0, 0, 1024),
            unload_module=lambda module: None,
        ),
    )


class _Kernel:
    """In place of Triton's launcher, and of its compiled kernel where nothing is compiled."""

    function = 0
    packed_metadata = ()

    def __init__(self, launches: list[Launch], source: Any, **options: Any) -> None:
        self.launches, self.name, self.parameters = launches, source.fn.__name__, len(source.fn.arg_names)

    def run(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        given = len(rest[4:])
        assert given == self.parameters, f"{self.name} has {self.parameters} parameters but got {given} arguments"
        record(self.launches, self.name, (x, y, z), rest[4:])

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream=None: record(self.launches, self.name, grid, arguments)


def record(launches: list[Launch], kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Adds a launch."""
    assert 0 not in grid, f"{kernel} is launched with a grid of {grid}"
    launches.append(Launch(kernel, grid, arguments))


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*arguments: Any, device: object = None, **options: Any) -> Tensor:
        return factory(*arguments, **options)

    return made


def _count(arguments: tuple[Any, ...]) -> int:
    return sum(_count(x) if isinstance(x, tuple) else 1 for x in arguments)
