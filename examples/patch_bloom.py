"""What changes when a BLOOM's attention is replaced by alibi_attention? Only the time.

python examples/patch_bloom.py                         # random weights, nothing is downloaded
python examples/patch_bloom.py bigscience/bloom-560m   # or a folder
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, PreTrainedModel

from alibi_attn.hf import ALiBiCache, patch


def logits_and_seconds(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The logits of one forward pass and its time (the last of three)."""
    with torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            logits = model(tokens, use_cache=False).logits
    return logits, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or the name of a repository; default: random weights")
    parser.add_argument("--length", type=int, default=2048, help="tokens to read (default 2,048)")
    options = parser.parse_args()
    torch.manual_seed(0)

    if options.model is None:
        model = BloomForCausalLM(BloomConfig(hidden_size=256, n_layer=2, n_head=8, vocab_size=1000)).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    tokens = torch.randint(3, model.config.vocab_size, (1, options.length))

    before, seconds_before = logits_and_seconds(model, tokens)
    handle = patch(model)  # patches this instance in memory; handle.undo() restores it
    after, seconds_after = logits_and_seconds(model, tokens)
    print(f"{len(handle.layers)} layers patched; {options.length:,} tokens")
    print(f"one pass: {seconds_before:.2f} s before, {seconds_after:.2f} s after")
    print(f"logits differ by {(after - before).abs().max() / before.abs().max():.0e} of the largest")

    # ALiBiCache stores the norms of its keys, so a new token reads only the keys that can matter.
    longer = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), past_key_values=ALiBiCache(), max_new_tokens=5, do_sample=False
    )
    print(f"generated: {longer[0, options.length :].tolist()}")


if __name__ == "__main__":
    main()
