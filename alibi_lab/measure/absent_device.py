"""A stand-in for a CUDA device: tensors in CPU memory that say they are on one, and launches that are counted and run nothing.

What a call costs the host can then be measured on any machine: Python, torch's dispatcher and Triton's handling of arguments are
real; Triton's compiler, its last call into the driver, and the kernels are left out. Results are whatever memory holds.
Use it in a process of its own: constants that are cached for the device stay.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
PROCESSORS = 132  # of an H100
_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros")


class Launch(NamedTuple):
    """One launch: the kernel's name, the grid, and the number of arguments with tuples flattened."""

    kernel: str
    grid: tuple[int, ...]
    arguments: int


class Launches:
    """The launches since `clear`."""

    def __init__(self) -> None:
        self.all: list[Launch] = []

    def clear(self) -> None:
        self.all.clear()

    def record(self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        assert all(size > 0 for size in grid), f"{kernel} is launched with a grid of {grid}"
        self.all.append(Launch(kernel, grid, _count(arguments)))

    def by_kernel(self) -> dict[str, int]:
        return dict(collections.Counter(launch.kernel for launch in self.all))


@contextlib.contextmanager
def absent_device(*, compiles: bool = False) -> Iterator[Launches]:
    """Inside, every CPU tensor says that it is on `DEVICE`. Yields the launches.

    Args:
        compiles: compile each kernel for the device, to see that it compiles; by default nothing is compiled.
    """
    from triton import compiler
    from triton.runtime import driver

    launches = Launches()
    with contextlib.ExitStack() as stack:
        before = driver.active if driver._active is not None else None
        driver.set_active(_Driver())
        stack.callback(driver.set_active, before)
        compile = functools.partial(_Kernel, launches, compiler.compile if compiles else None)
        stack.enter_context(mock.patch.object(compiler, "compile", compile))
        stack.enter_context(mock.patch.object(Tensor, "device", property(lambda tensor: DEVICE)))
        stack.enter_context(mock.patch.object(Tensor, "is_cpu", property(lambda tensor: False)))
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", property(lambda tensor: True)))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.cuda, "device", _Current))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", _capability))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", _Properties))
        yield launches


def _capability(device: object = None) -> tuple[int, int]:
    return CAPABILITY


class _Properties:
    multi_processor_count = PROCESSORS

    def __init__(self, device: object = None) -> None:
        pass


class _Current:
    """In place of `torch.cuda.device`."""

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _Driver:
    """In place of Triton's driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Kernel:
    """In place of Triton's compiled kernel: running it records the launch."""

    function = 0
    packed_metadata = ()

    def __init__(self, launches: Launches, compile: Callable[..., Any] | None, source: Any, **options: Any) -> None:
        self.launches, self.name = launches, source.fn.__name__
        if compile is not None:
            compile(source, **options)

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launches.record(self.name, (x, y, z), rest[4:])

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def runner(*arguments: Any, stream: int | None = None) -> None:
            self.launches.record(self.name, grid, arguments)

        return runner


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*arguments: Any, device: object = None, **options: Any) -> Tensor:
        return factory(*arguments, **options)

    return made


def _count(arguments: tuple[Any, ...]) -> int:
    return sum(_count(x) if isinstance(x, tuple) else 1 for x in arguments)
