"""A model that copies from its context and has no weights, to solve the copying tasks."""

import itertools

import torch

SURE = 20.0  # a logit


class Copier:
    """Predicts the token after the latest match of its last `cue` tokens, at most `sight` tokens back; else token 0."""

    class position:
        max_positions = None

    training, device, trained_length = False, torch.device("cpu"), 64

    def __init__(self, cue, sight=10**9):
        self.cue, self.sight = cue, sight

    def __call__(self, tokens):
        logits = torch.zeros(*tokens.shape, 256)
        for row, here in itertools.product(range(len(tokens)), range(tokens.shape[1])):
            logits[row, here, self._next(tokens[row, : here + 1].tolist())] = SURE
        return logits

    def _next(self, seen):
        cue = seen[-self.cue :]
        for back in range(1, min(len(seen) - self.cue, self.sight) + 1):
            if seen[len(seen) - back - self.cue : len(seen) - back] == cue:
                return seen[len(seen) - back]
        return 0

    def stretched(self, stretch, length):
        return self

    def eval(self):
        return self

    def train(self, mode):
        return self
