"""A stand-in for a CUDA device: tensors in CPU memory that say they are on one, and launches that are counted and run nothing.

What a call costs the host can then be measured on any machine: Python, torch's dispatcher and Triton's handling of arguments are
real; Triton's compiler, its last call into the driver, and the kernels are left out. Results are whatever memory holds.
Use it in a process of its own: constants that are cached for the device stay.
"""

import collections
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


class Launches:
    """The launches since `clear`."""

    def __init__(self) -> None:
        self.all: list[Launch] = []

    def clear(self) -> None:
        self.all.clear()

    def record(self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        assert 0 not in grid, f"{kernel} is launched with a grid of {grid}"
        self.all.append(Launch(kernel, grid, arguments))

    def by_kernel(self) -> dict[str, int]:
        return dict(collections.Counter(launch.kernel for launch in self.all))


@contextlib.contextmanager
def absent_device(*, capability: tuple[int, int] = (9, 0), compiles: bool = False) -> Iterator[Launches]:
    """Inside, every CPU tensor says that it is on `DEVICE`. Yields the launches.

    Args:
        capability: the device's compute capability.
        compiles: compile each kernel for the device, and launch it through Triton's own code; by default nothing is compiled.
    """
    from triton import compiler
    from triton.runtime import driver

    launches = Launches()
    with contextlib.ExitStack() as stack:
        before = driver.active if driver._active is not None else None
        driver.set_active(_Driver(launches, capability))
        stack.callback(driver.set_active, before)
        if not compiles:
            stack.enter_context(mock.patch.object(compiler, "compile", functools.partial(_Kernel, launches)))
        for name, x in (("device", DEVICE), ("is_cpu", False), ("is_cuda", True)):
            stack.enter_context(mock.patch.object(Tensor, name, _always(x)))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda,
                device=contextlib.nullcontext,
                current_device=lambda: 0,
                is_current_stream_capturing=lambda: False,
                get_device_capability=lambda device=None: capability,
                get_device_properties=lambda device=None: types.SimpleNamespace(multi_processor_count=PROCESSORS),
            )
        )
        yield launches


def _always(x: object) -> property:
    return property(lambda tensor: x)


class _Driver:
    """In place of Triton's driver: it loads no code, and its launcher records the launch."""

    def __init__(self, launches: Launches, capability: tuple[int, int]) -> None:
        self.launches, self.capability, self.utils = launches, capability, _Utilities

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        expected = len(source.fn.arg_names)

        def run(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            assert len(rest[4:]) == expected, (
                f"{metadata.name} has {expected} parameters but got {len(rest[4:])} arguments"
            )
            self.launches.record(metadata.name, (x, y, z), rest[4:])

        return run


class _Utilities:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    @staticmethod
    def unload_module(module: int) -> None:
        pass


class _Kernel:
    """In place of Triton's compiled kernel, where nothing is compiled."""

    function = 0
    packed_metadata = ()

    def __init__(self, launches: Launches, source: Any, **options: Any) -> None:
        self.launches, self.name = launches, source.fn.__name__

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
