"""The kernel repository of `release/hub_kernel.py`: loaded without a network and next to the package, as `kernels` loads it."""

import importlib
import importlib.util
import json
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from programs import printed

from alibi_attn import __version__

ROOT = Path(__file__).parent.parent
# What `kernels` does with a folder, then one call in each way that a process could mix the copies up.
LOADED = """
import importlib, importlib.util, json, pkgutil, sys
from pathlib import Path

def load(folder, file="__init__.py"):
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name if file == "__init__.py" else "older", folder / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

folders = [Path(argument) for argument in sys.argv[1:]]
copies = [load(folder) for folder in folders]
older = load(folders[0], "alibi_attn/__init__.py")
assert older.alibi_attention is copies[0].alibi_attention, "the older place has the same functions"
for copy in copies:
    for module in pkgutil.walk_packages(copy.__path__, copy.__name__ + "."):
        last = module.name.split(".")[-1]  # Triton, which only the kernels of `fused` need, may be missing
        if ".fused.kernels" not in module.name and last != "alibi_attn" and not last.startswith("kernels-"):
            importlib.import_module(module.name)
assert not any(name.split(".")[0] in ("alibi_attn", "alibi_lab", "transformers") for name in sys.modules)

import torch
query, key, value = torch.randn(3, 1, 4, 300, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
truth = copies[0].alibi_attention(*wide, backend="reference")
gradients = torch.autograd.grad(truth.sum(), wide)
for copy in copies:
    for backend in ("banded", "dense", "auto"):
        ours = torch.stack([x.detach() for x in (query, key, value)]).requires_grad_()
        output = copy.alibi_attention(*ours, backend=backend)
        torch.testing.assert_close(output, truth.float(), atol=1e-5, rtol=1e-5)
        grads = torch.autograd.grad(output.sum(), ours)[0]
        torch.testing.assert_close(grads, torch.stack(gradients).float(), atol=1e-4, rtol=1e-4)
print(copies[0].explain(query, key, value))
"""


@pytest.fixture
def hub_kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`release/hub_kernel.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module("hub_kernel")


@pytest.fixture
def folder(hub_kernel: ModuleType, tmp_path: Path) -> Path:
    """A repository of the tree's files, in two wheels that hold made-up kernels of another system each."""
    (tmp_path / "dist").mkdir()
    for system in ("riscv", "s390x"):
        with zipfile.ZipFile(tmp_path / "dist" / f"alibi_attn-{__version__}-py3-none-{system}.whl", "w") as wheel:
            for path in (ROOT / "alibi_attn").rglob("*"):
                if path.suffix in {".py", ".cpp", ".hpp"}:
                    wheel.write(path, path.relative_to(ROOT).as_posix())
            wheel.writestr(f"alibi_attn/attention/backends/native/kernels-{system}.so", system)
    hub_kernel.main([str(tmp_path / "dist"), str(tmp_path / "kernel")])
    return tmp_path / "kernel"


def test_two_variants_are_loaded_in_one_process_and_compute(folder: Path) -> None:
    folders = (folder / "build" / f"torch-{backend}" for backend in ("cpu", "cuda"))
    told = printed("-W", "error", "-c", LOADED, *folders, cwd=Path("/"))
    assert "banded" in told


def test_the_folders_are_named_and_described_as_kernels_expects(folder: Path, hub_kernel: ModuleType) -> None:
    assert sorted(path.name for path in (folder / "build").iterdir()) == ["torch-cpu", "torch-cuda"]
    for backend in ("cpu", "cuda"):
        variant = folder / "build" / f"torch-{backend}"
        about = json.loads((variant / "metadata.json").read_text())
        assert about["id"].startswith(f"_alibi_attn_{backend}_")
        assert about | {"python-depends": [], "backend": {"type": backend}} == about
        kernels = {path.name for path in (variant / "attention/backends/native").glob("kernels-*")}
        assert kernels == {"kernels-riscv.so", "kernels-s390x.so"}, "of every wheel"
        assert not list(variant.glob("nn")), "layers are in the wheel only"


def test_a_changed_module_gets_another_namespace(hub_kernel: ModuleType) -> None:
    def operators(source: str) -> bytes:
        files = {"alibi_attn/attention/one.py": source.encode()}
        return hub_kernel.repository(files)["build/torch-cpu/attention/one.py"]

    source = (
        'from alibi_attn.slopes import a\n\n    from alibi_attn.attention.call.spec import b\nname = "alibi_attn::x"\n'
    )
    first, second = operators(source), operators(source + "\n")
    assert first.startswith(b"from ..slopes import a\n\n    from ..attention.call.spec import b\n")
    assert b"alibi_attn::" not in first.replace(b"_alibi_attn_cpu_", b"")
    assert first.splitlines()[-1] != second.splitlines()[-2]
