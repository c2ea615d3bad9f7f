"""The order inside folders: a part imports only the parts before it."""

from pathlib import Path

import pytest
from import_graph import edges

ROOT = Path(__file__).parent.parent
# By folder: its modules and folders, lowest first. Those in one row do not import one another.
ORDERS = {
    "alibi_attn.attention": (
        ("call",),
        ("certificate",),
        ("operators",),
        ("backends",),
        ("run",),
        ("api", "forgetting", "toeplitz", "varlen"),
        ("kept", "rows"),
    ),
    "alibi_attn.jax": (
        ("call",),
        ("backends",),
        ("attention",),
        ("explanation", "forgetting", "multihead"),
        ("flax",),
    ),
    "alibi_attn.hf": (("caches",), ("attention",), ("readers",), ("patching",), ("embedding",)),
    "alibi_lab.lab": (
        ("clock", "config", "sealed_folder"),
        ("config_io", "data", "model", "scales"),
        ("evaluation", "planning"),
        ("systems", "training"),
        ("progress",),
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


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("config", "import alibi_lab.lab.data.tokens", "does not come before"),
        ("config", "import alibi_lab.lab", "imports the folder"),
        ("new", "import alibi_lab.lab.config", "no place in the order"),
    ],
)
def test_a_wrong_import_is_noticed(name, source, message, tmp_path):
    (tmp_path / "alibi_lab/lab").mkdir(parents=True)
    (tmp_path / "alibi_lab/lab" / f"{name}.py").write_text(source, encoding="utf-8")
    with pytest.raises(AssertionError, match=message):
        assert_inner_order(tmp_path, "alibi_lab.lab")
