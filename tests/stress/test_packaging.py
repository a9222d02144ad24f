"""What the wheel holds, and that it works where the tree is not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastaug.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
# Without what an editable install adds to Python's ways of finding modules.
NO_EDITABLE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git would have, so that no stray file of the tree helps."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "fastaug").rglob("*.py")}
    modules |= {f"fastaug/{p.relative_to(ROOT)}" for p in (ROOT / "pipelines").rglob("*.py")}
    sources = {f"fastaug/cuda/{p.name}" for p in (ROOT / "cuda").iterdir()}
    assert "fastaug/cuda/objective.cpp" in sources
    folder = "fastaug/experiments/templates"
    parts = ("report.html.j2", "paper.html.j2", "macros.html.j2", "report.css", "report.js")
    templates = {f"{folder}/{name}" for name in parts}
    folder = "fastaug/diagnostics/gpu_report/templates"
    templates |= {f"{folder}/gpu_report.{suffix}" for suffix in ("html.j2", "css")}
    assert names == modules | sources | templates | {"fastaug/py.typed"}


def test_the_wheel_names_its_script_and_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {n.rpartition("/")[2]: archive.read(n).decode() for n in archive.namelist()}
    assert "fastaug = fastaug.__main__:script" in texts["entry_points.txt"]
    needed = ("torch", "timm", "numpy", "tensorboard", "tyro", "rich", "pillow")
    for requirement in (*needed, "nvidia-dali-cuda120"):
        assert f"Requires-Dist: {requirement}" in texts["METADATA"]
    assert "License: Apache-2.0" in texts["METADATA"]


def test_it_runs_from_a_wheel_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    script = (
        "import fastaug, sys, torch\n"
        "assert fastaug.__file__.startswith(sys.argv[1]), fastaug.__file__\n"
        "assert not {'timm', 'PIL', 'nvidia.dali'} & set(sys.modules)\n"
        "from fastaug.toolchain.build import source_folder\n"
        "assert str(source_folder()).startswith(sys.argv[1])\n"
        "print(fastaug.pairwise_kl(torch.zeros(2, 3, 4)).tolist())\n"
        "fastaug.build_model('wrn-10-1', 3), fastaug.build_loader\n"
        "import fastaug.pipelines.loader\n"
    )
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", script, str(site)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[0.0, 0.0]"
    # Started in a source tree, Python takes the tree's fastaug, whatever is installed.
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            NO_EDITABLE + "import fastaug.pipelines.loader as l; print(l.__file__)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).resolve() == ROOT / "pipelines/loader.py"
    for module in COMMANDS:
        command = [sys.executable, "-m", f"fastaug.{module}", "--help"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
