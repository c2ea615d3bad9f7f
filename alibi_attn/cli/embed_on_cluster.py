"""`alibi embed --ray`: embeds with the workers of a Ray cluster into a folder (`hf/embedding/ray_embedding.py`)."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import Progress, TaskID

from alibi_attn.cli.cluster import cluster
from alibi_attn.cli.console import check_writable, console, interrupted, progress
from alibi_attn.cli.text_files import Text

if TYPE_CHECKING:
    from alibi_attn.hf.embedding.ray_embedding import Settings


def check_cluster(out: Path, device: str) -> None:
    """Raises an error if a cluster cannot write there, or has no such device."""
    if out.suffix in (".npy", ".parquet"):
        raise ValueError(
            f"--ray writes a folder of Parquet files; pass a name without {out.suffix} instead of {out.name}"
        )
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r} but Ray gives each worker a device; pass --device cpu or --device cuda")
    check_writable(out / "part")


def embed_on_cluster(found: Sequence[Text], settings: "Settings", out: Path, address: str, workers: int | None) -> None:
    """Embeds the texts, and prints what was written."""
    from alibi_attn.hf.embedding import ray_embedding

    texts = ray_embedding.Texts([one.file for one in found], [one.start for one in found], [one.text for one in found])
    with cluster(address), progress() as bar:
        on_shard = functools.partial(_show, bar, bar.add_task("shards"))
        try:
            made = ray_embedding.embed(texts, settings, out, workers=workers, on_resume=_resume, on_shard=on_shard)
        except KeyboardInterrupt:
            interrupted("run the same command again to resume")
    cut = f", {made.cut:,} cut" if made.cut else ""
    about = f"{len(made.parts):,} files, {made.tokens:,} tokens computed{cut}"
    console.print(f"vectors  {escape(str(out))}  {made.rows:,} × {made.width:,}  ({about})", soft_wrap=True)


def _show(bar: Progress, task: TaskID, done: int, shards: int) -> None:
    bar.update(task, completed=done, total=shards)


def _resume(done: int, shards: int) -> None:
    if done:
        console.print(f"resuming: {shards - done:,} of {shards:,} shards are left")
