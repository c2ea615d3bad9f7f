"""Tries a position method from outside of the package in a small model, before it is trained, or evaluated from a checkpoint.

It checks the values that the hooks return, that gradients are finite, that two passes over the same tokens are equal, and that
a token changes nothing before it: a method that sees the future would be trained and recorded with losses that mean nothing.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_lab.lab.config import IMPORT_PATH, ModelConfig, RunConfig, Stretch
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.method_checks import is_built_in, located
from alibi_lab.lab.model.position_method import PositionError

_TOKENS = 64
# Of the last logits' change, in the logits before them; rounding is below 1e-5, a key seen above 1e-3.
_LARGEST_SHARE = 1e-4


def try_imported_methods(configs: Sequence[RunConfig], device: torch.device | str = "cpu") -> None:
    """Tries every position method from outside once, with every stretch.

    Raises:
        PositionError: see `try_method`.
    """
    tried = {(run.model.method, run.eval.stretch): run for run in configs if IMPORT_PATH.fullmatch(run.model.method)}
    for run in tried.values():
        try_method(run.model, run.train.length, stretch=run.eval.stretch, device=device)


def try_method(
    config: ModelConfig, trained_length: int, *, stretch: Stretch = "none", device: torch.device | str = "cpu"
) -> None:
    """Calls every hook in a model of at most two layers, in training and in evaluation, also stretched.

    Raises:
        PositionError: a hook returns something invalid, or the method sees the future; names the file and line.
    """
    small = dataclasses.replace(config, vocab_size=16, cutoffs=(), num_layers=min(config.num_layers, 2))
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        model = LanguageModel(small, trained_length=trained_length).to(device)
        model.checks_values = True
        tokens = (torch.arange(min(trained_length, _TOKENS), device=device) % small.vocab_size)[None]
        model.train().progress = 0.0
        _try_gradients(model, tokens)
        with torch.no_grad():
            _try_order(model, tokens)
            model.eval().progress = 1.0
            _try_order(model, tokens)
            if stretch != "none":
                _try_order(model.stretched(stretch, 2 * trained_length), tokens)


def _try_gradients(model: LanguageModel, tokens: Tensor) -> None:
    place = f"{located(type(model.position))}: {type(model.position).__name__}"
    loss = model(tokens, targets=tokens.roll(-1, 1)).mean()
    try:
        loss.backward()
    except RuntimeError as error:
        raise PositionError(f"{place} has no gradients ({str(error).splitlines()[0]})") from error
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            raise PositionError(f"{place} gives {name} a gradient with NaN or infinite numbers, before any training")


def _try_order(model: LanguageModel, tokens: Tensor) -> None:
    """Checks that logits depend on the tokens only, and only on earlier ones."""
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % model.config.vocab_size
    logits = []
    for given in (tokens, tokens, changed):
        torch.manual_seed(0)
        logits.append(model(given))
    first, again, other = logits
    kind, hooks = type(model.position), ("attend", "bias", "rotate", "add")
    overridden = next((hook for hook in hooks if not is_built_in(getattr(kind, hook))), "")
    place = f"{located(kind, overridden)}: {kind.__name__}"
    if not first.isfinite().all():
        raise PositionError(f"{place} makes the logits of a new model NaN or infinite")
    largest = (other - first)[:, -1].abs().max() * _LARGEST_SHARE
    if (again - first).abs().max() > largest:
        raise PositionError(
            f"{place} gives other logits when the same tokens are read again, from the same random state; keep no state "
            "between passes"
        )
    if tokens.shape[1] > 1 and (other - first)[:, :-1].abs().max() > largest:
        raise PositionError(
            f"{place} sees the future: another last token changes the logits before it; mask scores with "
            "at.visible(q.device), give a bias [H, T, S] −inf where a key is to the right, or call default(q, k, v)"
        )
