"""A new option, complete: logit_cap, which bounds every score by cap·tanh(score / cap) before the bias.

    python examples/extending/attention_option.py

makes the five changes below in a copy of the package. Then `reference` and `dense` compute the option, and whatever has not
declared the field refuses it by itself: it never computes something else.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# By file of alibi_attn/attention: a text that is in it once, and what takes its place. {} is the text itself.
FIELD = ("call/spec.py", "    tolerance: float\n", "{}    logit_cap: float = 0.0\n")
OPTION = [
    ("call/options.py", "    query_positions: Array | None\n", "{}    logit_cap: float\n"),
    ("call/options.py", '    "registers": 0,\n', '{}    "logit_cap": 0.0,\n'),
]
CHECK = (
    "call/checks.py",
    "    return Checked(*sizes, scale, tolerance)\n",
    '    if not options["logit_cap"] >= 0.0:\n'
    "        raise ValueError(f\"logit_cap is {options['logit_cap']} but must be at least 0; 0 = no cap\")\n{}",
)
CAP = "    if spec.logit_cap > 0:\n        scores = spec.logit_cap * (scores / spec.logit_cap).tanh()\n"
READS = ('| {"table"', '| {"logit_cap", "table"')
REFERENCE = [
    ("backends/reference.py", *READS),
    ("backends/reference.py", "    return scores.masked_fill", CAP + "{}"),
]
DENSE = [
    ("backends/dense.py", *READS),
    ("backends/dense.py", "    scores = (scores if pairs", CAP + "{}"),
    ("backends/dense.py", "    if spec.return_lse or", "    if spec.logit_cap > 0 or spec.return_lse or"),
]
FIVE = (FIELD, *OPTION, CHECK, *REFERENCE, *DENSE)

PROGRAM = """
import torch
from alibi_attn import *
from alibi_attn.attention.run.dispatch import BACKENDS

q, k, v = 9 * torch.randn(1, 4, 200, 16), torch.randn(1, 4, 200, 16), torch.randn(1, 4, 200, 16)
gates, lengths, packed = -torch.rand(1, 4, 200), torch.tensor([0, 90, 200]), [x[0].transpose(0, 1) for x in (q, k, v)]
cap = {"logit_cap": 2.0}
scores = 2 * torch.tanh(q @ k.mT / 4 / 2) + alibi_bias(alibi_slopes(4), 200)
for rows in (slice(None), slice(197, None)):
    few = q[:, :, rows]
    for backend in ("reference", "dense", "auto"):
        with torch.no_grad():
            error = alibi_attention(few, k, v, backend=backend, **cap) - (scores.softmax(-1) @ v)[:, :, rows]
        print(f"{backend} computes {few.shape[2]} queries, off by {float(error.abs().max()):.0e}")
calls = {name: lambda name=name: alibi_attention(q, k, v, backend=name, **cap) for name in BACKENDS}
calls["native, with sinks"] = lambda: alibi_attention(q, k, v, window=9, sinks=2, backend="native", **cap)
calls["invariant"] = lambda: alibi_attention(q, k, v, invariant=True, **cap)
calls["head_reach"] = lambda: head_reach(q, k, **cap)
calls["certified_block_mask"] = lambda: certified_block_mask(q, k, **cap)
calls["attention_rows"] = lambda: attention_rows(q, k, rows=[0], **cap)
calls["explain"] = lambda: explain(q, k, v, **cap)
calls["varlen"] = lambda: alibi_attention_varlen(*packed, lengths, **cap)
calls["gates"] = lambda: forgetting_attention(q, k, v, gates, **cap)
try:
    from alibi_attn import jax
    calls["jax"] = lambda: jax.alibi_attention(*(x.transpose(1, 2).numpy() for x in (q, k, v)), **cap)
except ImportError:
    pass
for name, call in calls.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"{name} refuses: {error}")
try:
    alibi_attention(q, k, v, logit_cap=-1.0)
except ValueError as error:
    print(error)
"""


def with_option(folder: Path) -> None:
    """Copies the package there and makes the five changes."""
    import alibi_attn

    package = folder / "alibi_attn"
    shutil.copytree(Path(alibi_attn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, changed in FIVE:
        path = package / "attention" / name
        source = path.read_text(encoding="utf-8")
        assert source.count(text) == 1, f"{name} has {source.count(text)} times {text!r}"
        path.write_text(source.replace(text, changed.replace("{}", text, 1)), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with_option(Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder}
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, env=environment, check=True)
