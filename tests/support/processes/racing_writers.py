"""Processes that write a cache to one new path at the same moment: racing_writers.py FOLDER TRIALS.

In each trial one process must win without an error, the others must get one, and the path must hold all of the winner's text.
Prints JSON: the trials of each kind, and what was wrong.
"""

import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import KVCache
from alibi_attn.hf import ALiBiCache, patch, read

WRITERS, LAYERS = 3, 4
FORKS = multiprocessing.get_context("fork")


def text(number: int) -> torch.Tensor:
    return torch.full((1, 700), 3 + number)


def save_all(model: BloomForCausalLM, number: int) -> Callable[[Path], None]:
    cache = ALiBiCache()
    read(model, text(number), cache)
    return cache.save


def save_one(_: BloomForCausalLM, number: int) -> Callable[[Path], None]:
    cache = KVCache()
    with torch.no_grad():
        cache.append(*(torch.full((1, 4, 20000, 8), float(number)) for _ in range(2)))
    return cache.save


def read_into(model: BloomForCausalLM, number: int) -> Callable[[Path], None]:
    return lambda path: read(model, text(number), ALiBiCache(path))


def wrong_all(path: Path, winner: int) -> str | None:
    cache = ALiBiCache.open(path)
    cache.verify()
    found = cache.tokens()
    return None if found is not None and torch.equal(found, text(winner)) else "other tokens"


def wrong_one(path: Path, winner: int) -> str | None:
    cache = KVCache.open(path)
    cache.verify()
    return None if bool((cache.key == winner).all()) and len(cache) == 20000 else "other keys"


KINDS = {"save": (save_all, wrong_all), "KVCache.save": (save_one, wrong_one), "read": (read_into, wrong_all)}


def write(path: Path, act: Callable[[Path], None], number: int, barrier: Barrier, results) -> None:
    torch.set_num_threads(1)
    barrier.wait()
    try:
        act(path)
    except Exception as error:
        results.put((number, f"{type(error).__name__}: {error}"))
    else:
        results.put((number, None))


def main() -> None:
    folder, trials = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=LAYERS, n_head=4, vocab_size=50)).eval()
    patch(model)
    counts, faults = dict.fromkeys(KINDS, 0), []
    for kind, (prepare, wrong) in KINDS.items():
        acts = [prepare(model, number) for number in range(WRITERS)]
        for trial in range(trials):
            path, barrier, results = folder / f"{kind}-{trial}", FORKS.Barrier(WRITERS), FORKS.SimpleQueue()
            processes = [
                FORKS.Process(target=write, args=(path, act, n, barrier, results)) for n, act in enumerate(acts)
            ]
            for process in processes:
                process.start()
            answers = [results.get() for _ in processes]
            for process in processes:
                process.join()
            winners = [number for number, error in answers if error is None]
            if len(winners) != 1:
                faults.append(f"{kind}: {len(winners)} winners: {answers}")
            elif any(
                error is not None and not re.match("ValueError: .* exists; continue", error) for _, error in answers
            ):
                faults.append(f"{kind}: {answers}")
            else:
                try:
                    fault = wrong(path, winners[0])
                except (OSError, ValueError) as error:
                    fault = str(error)
                faults += [f"{kind}: {fault}"] if fault else []
            counts[kind] += 1
    left = [path.name for path in folder.iterdir() if path.name.startswith(".") or path.name.endswith(".partial")]
    print(json.dumps({"counts": counts, "faults": faults, "left": left}))


if __name__ == "__main__":
    main()
