"""How do you read a long document once and continue it later, in another process?

python examples/long_document.py                    # trains a small model on bytes first; half a minute
python examples/long_document.py --text novel.txt
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, read


def trained(text: torch.Tensor, length: int, steps: int) -> ALiBiForCausalLM:
    """A small model of bytes, trained on pieces of the text."""
    torch.manual_seed(0)
    model = ALiBiForCausalLM(
        ALiBiCausalLMConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = text[torch.randint(len(text) - length, (4096 // length, 1)) + torch.arange(length)]
        optimizer.zero_grad()
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a file to train on and to read")
    parser.add_argument("--steps", type=int, default=300, help="training steps of 4,096 bytes (default 300)")
    parser.add_argument("--folder", type=Path, default=Path("document"), help="new folder (default document)")
    parser.add_argument("--again", action="store_true", help="open the folder and continue the text")
    options = parser.parse_args()
    text = torch.tensor([list(options.text.read_bytes())])

    if not options.again:
        model = trained(text[0], length=128, steps=options.steps)
        model.save_pretrained(options.folder / "model")
        start = time.perf_counter()
        read(model, text[:, :-1], ALiBiCache(options.folder / "cache"))
        print(f"read {text.shape[1] - 1:,} tokens in {time.perf_counter() - start:.1f} s")
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--again"], check=True)
        return
    model = ALiBiForCausalLM.from_pretrained(options.folder / "model")
    start = time.perf_counter()
    cache = ALiBiCache.open(options.folder / "cache", mode="c")
    tokens = model.generate(text, past_key_values=cache, max_new_tokens=40, do_sample=False)
    print(f"opened in another process, and 40 tokens generated in {time.perf_counter() - start:.1f} s:")
    print(repr(bytes(tokens[0, text.shape[1] :].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main()
