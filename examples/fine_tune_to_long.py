"""Can a GPT-2, which has learned 64 positions, be turned into a model for 8 times that length?

python examples/fine_tune_to_long.py                  # two minutes: trains a small GPT-2 first
python examples/fine_tune_to_long.py --steps 400      # longer before and after
"""

import argparse
import math
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from alibi_attn.hf import to_alibi

LENGTH = 64
NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal")
THINGS = ("a red box", "an old map", "some green tea", "the long rope", "a tin cup", "two keys")


def text(sentences: int, seed: int) -> torch.Tensor:
    """Bytes of sentences in which names and things recur."""
    draw = random.Random(seed)
    lines = (f"{draw.choice(NAMES)} gave {draw.choice(NAMES)} {draw.choice(THINGS)}. " for _ in range(sentences))
    return torch.tensor(list("".join(lines).encode()))


def train(model: PreTrainedModel, tokens: torch.Tensor, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (16,), generator=generator)
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float:
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return math.exp(model.eval()(input_ids=rows, labels=rows).loss.item())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200, help="before the surgery, and after it")
steps = parser.parse_args().steps
torch.manual_seed(0)
tokens, test = text(4000, seed=1), text(130, seed=2)[: 8 * LENGTH * 6]
sizes = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
train(model, tokens, steps, seed=3)
print(f"GPT-2, {steps} steps: {perplexity(model, test, LENGTH):.2f} at {LENGTH}; its table ends there")
model = to_alibi(model)
for done in ("before any step", f"after {steps} steps"):
    short, long = (perplexity(model, test, length) for length in (LENGTH, 8 * LENGTH))
    print(f"with ALiBi, {done}: {short:.2f} at {LENGTH}, {long:.2f} at {8 * LENGTH}")
    if done == "before any step":
        train(model, tokens, steps, seed=4)
