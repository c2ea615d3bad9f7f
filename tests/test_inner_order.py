"""The order inside folders: a part imports only the parts before it. The folders of `attention/` are in test_architecture.py."""

from pathlib import Path

import pytest
from import_graph import edges

ROOT = Path(__file__).parent.parent
# By folder: its modules and folders, lowest first. Those in one row do not import one another.
ORDERS = {
    "alibi_attn.attention.call": (
        ("options", "spec", "transforms"),
        ("checks", "hints", "reads"),
        ("explanation", "query_positions", "visibility"),
        ("bias", "cuts", "dropout", "part_options"),
        ("validation",),
    ),
    "alibi_attn.attention.operators": (
        ("derivatives", "schema"),
        ("eager", "finite_numbers", "vmap"),
        ("operator",),
    ),
    "alibi_attn.attention.run": (
        ("few_queries", "invariant", "near_keys", "space", "splitting"),
        ("guards", "merging"),
        ("dispatch",),
        ("execution",),
        ("decoding",),
    ),
    "alibi_attn.jax": (
        ("call",),
        ("backends",),
        ("attention",),
        ("explanation", "forgetting", "multihead"),
        ("flax",),
    ),
    "alibi_attn.jax.call": (("dropout",), ("plan",), ("merging", "operands", "validation")),
    "alibi_attn.jax.backends": (
        ("launching", "native", "tiles"),
        ("certificate", "dense", "fused"),
        ("loop",),
        ("xla",),
    ),
    "alibi_attn.hf": (("caches",), ("attention",), ("readers",), ("patching",), ("embedding",)),
    "alibi_attn.hf.readers": (
        ("checkpoint_files", "inputs", "tokenizing"),
        ("decoder_config", "encoder_config"),
        ("families",),
        ("checkpoint", "tokenizer_files"),
        ("folder_check",),
        ("export",),
        ("decoder", "encoder"),
    ),
    "alibi_lab.lab": (
        ("clock", "config", "sealed_folder"),
        ("config_io", "data", "model"),
        ("evaluation", "folder_lock", "planning"),
        ("systems", "training"),
        ("progress", "tracker"),
        ("run",),
        ("ray_trainings",),
        ("experiment",),
    ),
    "alibi_lab.report": (
        ("published", "series"),
        ("answers", "intervals"),
        ("method_comparison", "rollouts"),
        ("verdicts",),
        ("tables",),
        ("exports", "plots"),
        ("section",),
        ("sections",),
        ("page",),
    ),
}


def assert_inner_order(root: Path, folder: str) -> None:
    place = {name: row for row, names in enumerate(ORDERS[folder]) for name in names}
    for module, imported in edges(root):
        if not (module.startswith(f"{folder}.") and f"{imported}.".startswith(f"{folder}.")):
            continue
        assert imported != folder or module == f"{folder}.__init__", f"{module} imports the folder {folder}"
        here, there = (name.removeprefix(f"{folder}.").split(".")[0] for name in (module, imported))
        if here == "__init__":
            continue  # it names what it loads lazily
        for name in (here, there):
            assert name in place, f"{name} has no place in the order of {folder}; add it to ORDERS"
        own = here == there and module != f"{folder}.{here}"
        assert own or place[there] < place[here], f"{module} imports {imported}, which does not come before it"


@pytest.mark.parametrize("folder", ORDERS)
def test_every_folder_keeps_its_order(folder):
    assert_inner_order(ROOT, folder)


@pytest.mark.parametrize("folder", ORDERS)
def test_an_import_of_a_later_part_is_noticed(folder, tmp_path):
    lowest, highest = ORDERS[folder][0][0], ORDERS[folder][-1][0]
    for name, source in ((lowest, f"import {folder}.{highest}.a"), (highest, "")):
        path = tmp_path.joinpath(*folder.split("."), name, "a.py")
        path.parent.mkdir(parents=True)
        path.write_text(source, encoding="utf-8")
    with pytest.raises(AssertionError, match="does not come before it"):
        assert_inner_order(tmp_path, folder)


WRONG = [
    ("lab/config.py", "import alibi_lab.lab.data.tokens", "does not come before"),
    ("lab/new.py", "import alibi_lab.lab.config", "no place in the order"),
    ("lab/config.py", "import alibi_lab.lab", "imports the folder"),
    ("report/tables/a.py", "import alibi_lab.report.page", "does not come before"),
]


@pytest.mark.parametrize(("path", "source", "message"), WRONG)
def test_a_wrong_import_inside_the_laboratory_is_noticed(path, source, message, tmp_path):
    (tmp_path / "alibi_lab" / path).parent.mkdir(parents=True)
    (tmp_path / "alibi_lab" / path).write_text(source, encoding="utf-8")
    with pytest.raises(AssertionError, match=message):
        assert_inner_order(tmp_path, f"alibi_lab.{path.split('/')[0]}")
