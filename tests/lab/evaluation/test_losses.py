"""A batch that does not fit in memory is halved, reported, and changes no loss; with allocators that really fail."""

import pytest
import torch

from alibi_lab.lab.evaluation.losses import EvaluationError, token_losses

TEXT = torch.randint(64, (400,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
WINDOWS = [(begin, begin + 10, 10) for begin in range(0, 380, 10)]
PETABYTE = 1 << 50


class Cramped(torch.nn.Module):
    """A model with memory for a limited number of windows; more windows request more memory than any machine has."""

    def __init__(self, model, room):
        super().__init__()
        self.model, self.room, self.seen = model, room, []
        self.device = model.device

    def forward(self, tokens, **options):
        self.seen.append(len(tokens))
        if len(tokens) > self.room:
            torch.empty(PETABYTE)
        return self.model(tokens, **options)


@pytest.mark.parametrize("room", [1, 3, 8, 38])
def test_a_batch_without_room_is_halved_and_no_loss_changes(tiny_model, room):
    model, said = tiny_model("alibi"), []
    cramped = Cramped(model, room)
    found = token_losses(cramped, TEXT, WINDOWS, batch_tokens=10_000, say=said.append)
    truth = token_losses(model, TEXT, WINDOWS, batch_tokens=10_000)
    assert torch.equal(found.target, truth.target)
    torch.testing.assert_close(found.loss_nats, truth.loss_nats)
    halvings = [size for size in (38, 19, 9, 4, 2) if size > room]
    assert said == [
        f"{size} windows of 10 tokens do not fit in memory; going on with {size // 2} at a time" for size in halvings
    ]
    assert cramped.seen[: len(halvings)] == halvings
    assert max(cramped.seen[len(halvings) :]) <= room


def test_one_window_without_room_ends_with_what_to_do(tiny_model):
    with pytest.raises(EvaluationError, match="one window of 10 tokens does not fit in memory; pass shorter"):
        token_losses(Cramped(tiny_model("alibi"), 0), TEXT, WINDOWS, batch_tokens=10_000)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_an_accelerators_and_pythons_own_errors_count(tiny_model, error, monkeypatch):
    model, said = tiny_model("alibi"), []
    forward = model.forward

    def fail_once(tokens, **options):
        monkeypatch.setattr(model, "forward", forward)
        raise error

    monkeypatch.setattr(model, "forward", fail_once)
    token_losses(model, TEXT, WINDOWS, batch_tokens=10_000, say=said.append)
    assert len(said) == 1


def test_other_errors_are_not_swallowed(tiny_model, monkeypatch):
    model = tiny_model("alibi")

    def broken(tokens, **options):
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(RuntimeError, match="must match"):
        token_losses(model, TEXT, WINDOWS, batch_tokens=10_000)
