"""If a package is missing, every command and every subpackage names the extra to install, in one sentence."""

import json
import os

import pytest
from programs import printed

from alibi_lab.measure.benchmarks import BENCHMARKS

OF_MODELS = [f"bench {name}" for name, each in BENCHMARKS.items() if each.extra == "hf"]
MISSING = """
import importlib, json, sys
MISSING = sys.argv[1]

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
COMMANDS = """
from alibi_lab.cli import main as cli
from alibi_attn.cli import console as cli_words
messages, commands = {}, sys.argv[2:]
for command in commands:
    sys.argv = ["alibi", *command.split()]
    with cli_words.errors.capture() as words:
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    messages[command] = [code, words.get()]
print(json.dumps(messages))
"""
IMPORTS = """
messages = {}
for name in sys.argv[2:]:
    try:
        module, _, attribute = name.partition(":")
        loaded = importlib.import_module(module)
        if attribute:
            getattr(loaded, attribute)
        messages[name] = None
    except ImportError as error:
        messages[name] = f"{type(error).__name__}: {error}"
print(json.dumps(messages))
"""


def _run_without(program: str, *arguments: str) -> dict[str, object]:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return json.loads(printed("-c", MISSING + program, *arguments, **environment).splitlines()[-1])


@pytest.mark.parametrize(
    ("missing", "extras"),
    [
        (
            "torch",
            {
                **{f"bench {name}": each.extra for name, each in BENCHMARKS.items()},
                "explain": "torch",
                "embed x FILE --out y": "hf",
                "run quick --scale smoke": "lab",
                "eval x --text y": "lab",
                "generate x --prompt y": "lab",
                "export x y": "hf",
            },
        ),
        (
            "transformers",
            dict.fromkeys((*OF_MODELS, "export x y", "embed x FILE --out y"), "hf"),
        ),
        ("ray", dict.fromkeys(("embed x FILE --out y --ray local", "run quick --scale smoke --ray local"), "ray")),
        ("jax", {"bench attention --framework jax": "jax"}),
        ("matplotlib", {"heads slopes --picture heads.png": "lab", "report RESULTS": "lab"}),
        ("jinja2", {"report RESULTS": "lab"}),
    ],
)
def test_every_command_names_the_extra_that_it_needs(missing, extras, tmp_path, monkeypatch):
    results = os.path.abspath("results")
    monkeypatch.chdir(tmp_path)
    here = os.path.abspath(__file__)
    asked = {command.replace("RESULTS", results).replace("FILE", here): extra for command, extra in extras.items()}
    for command, (code, words) in _run_without(COMMANDS, missing, *asked).items():
        assert code == 1, command
        assert words.startswith("error: "), command
        assert words.endswith(f'; install it with: pip install ".[{asked[command]}]" in a clone\n'), (command, words)
        assert len(words.splitlines()) == 1, words
    assert not list(tmp_path.iterdir())


# The package that is missing, the extra that the error names, and what is imported; None = it loads.
MODULES = [
    ("torch", "torch", "alibi_attn.nn alibi_attn.nn.cache"),
    ("torch", "torch", "alibi_attn:KVCache alibi_attn:alibi_attention alibi_attn:alibi_bias"),
    ("torch", "hf", "alibi_attn.hf alibi_attn.hf.readers.export"),
    ("torch", None, "alibi_attn alibi_lab alibi_lab.lab alibi_lab.measure alibi_lab.recipes.index"),
    ("torch", None, "alibi_lab.report.page alibi_attn.attention"),
    ("jax", "jax", "alibi_attn.jax alibi_attn.jax.flax"),
    ("flax", "jax", "alibi_attn.jax.flax alibi_attn.jax:mha_alibi"),
    ("flax", None, "alibi_attn.jax"),
    ("matplotlib", "lab", "alibi_lab.report:plot_alibi_bias alibi_lab.report.page"),
    ("matplotlib", None, "alibi_lab.report"),
    ("jinja2", "lab", "alibi_lab.report.page"),
    ("jinja2", None, "alibi_lab.report.tables"),
    ("scipy", None, "alibi_lab.cli.main alibi_lab.report.page"),
]


@pytest.mark.parametrize("missing", dict.fromkeys(missing for missing, _, _ in MODULES))
def test_every_subpackage_names_the_extra_that_it_needs(missing):
    extras = {name: extra for other, extra, names in MODULES if other == missing for name in names.split()}
    for name, words in _run_without(IMPORTS, missing, *extras).items():
        if extras[name] is None:
            assert words is None, name
        else:
            assert words.startswith("ImportError: "), (name, words)
            assert words.endswith(f'; install it with: pip install ".[{extras[name]}]" in a clone'), (name, words)
