"""Checks the name of a device before anything is loaded onto it."""

import torch


def checked_device(name: str | torch.device) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: torch does not know it, or this machine does not have it.

    >>> checked_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists every device that torch was ever built for
        raise ValueError(
            f'device is {str(name)!r} but must be a device of torch, such as "cpu", "cuda" or "cuda:1"'
        ) from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises for a missing device
        reason = str(error).splitlines()[0]
        raise ValueError(
            f'device is {str(name)!r} but it cannot be used here ({reason}); pass another, such as "cpu"'
        ) from None
    return device
