"""Speed and memory of a method: training steps and one evaluation (figures 2 and 7, table 1).

Each measurement runs in a separate process, because a process's peak memory includes everything it ran before. Speed does
not depend on the text, so the tokens are random.
"""

import datetime
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from alibi_attn.nn.allocator import peak_memory_bytes, reset_peak_memory
from alibi_lab import records
from alibi_lab.lab.config import RunConfig, Scale
from alibi_lab.lab.config_io import from_json, to_json
from alibi_lab.lab.data.corpus import random_corpus
from alibi_lab.lab.evaluation.evaluate import evaluate
from alibi_lab.lab.training.checkpoint import load_checkpoint
from alibi_lab.lab.training.train import train
from alibi_lab.measure.timing import in_fresh_process
from alibi_lab.recipes.paper.studies import WARM_STEPS
from alibi_lab.records import Json


def record_speed(config: RunConfig, folder: Path, *, scale: Scale) -> Path:
    """The record of a new measurement; at smoke scale it is measured in this process."""
    started = datetime.datetime.now(datetime.UTC)
    name, config_json = _identity(config, scale)
    metrics = measure(to_json(config)) if scale == "smoke" else in_fresh_process(measure, to_json(config))
    record = records.make("speed", name, config=config_json, metrics=metrics, started=started)
    return records.save(record, folder)


def recorded(config: RunConfig, folder: Path, *, scale: Scale) -> Path | None:
    """The record of a measurement; None if there is none."""
    return records.recorded(folder, "speed", *_identity(config, scale))


def _identity(config: RunConfig, scale: Scale) -> tuple[str, dict[str, Json]]:
    """The name and the config of the record."""
    name = f"speed/{config.model.method}-{config.train.length}/seed-{config.train.seed}"
    return name, {**to_json(config), "process": "shared" if scale == "smoke" else "its own"}


def measure(config_json: Mapping[str, Json]) -> dict[str, float | None]:
    """Tokens per second in training (median over steps) and in evaluation, and the peak memory of the training."""
    config = from_json(config_json)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    count = 2 * max(config.train.batch_tokens, config.eval.tokens) + 2 * config.train.length
    corpus = random_corpus(min(config.model.vocab_size, 256), count)
    idle = peak_memory_bytes(device) if reset_peak_memory(device) else None
    ends: list[float] = []  # in seconds of training
    with tempfile.TemporaryDirectory() as folder:
        peak = train(config, corpus, Path(folder), on_step=lambda now: ends.append(now.seconds)).peak_memory_bytes
        model = load_checkpoint(Path(folder), method=config.model.method)[0].to(device)
    steps = [after - before for before, after in itertools.pairwise(ends[WARM_STEPS - 1 :])]
    return {
        "train_tokens_per_second": config.train.batch_tokens / statistics.median(steps),
        "evaluation_tokens_per_second": evaluate(model, corpus.valid, config.eval)["by_length"]["tokens_per_second"][0],
        "memory_bytes": peak,
        "memory_above_idle_bytes": None if peak is None or idle is None else peak - idle,
    }
