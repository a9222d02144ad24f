"""The view kernel on thousands of random plans, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain.build import source_folder

PROGRAM = Path(__file__).parents[1] / "helpers/fuzz_views.cpp"
# Not optimized: what is reported is the same, and compiling takes a third of the time.
FLAGS = ("-std=c++17", "-O0", "-g", "-pthread", "-w", "-ffp-contract=off")


def run(
    sources: Path, folder: Path, flags: tuple[str, ...], *arguments: int
) -> subprocess.CompletedProcess[str]:
    """arguments: batches, seed, threads beside the caller, teams and lanes of a block."""
    compiler = cpp_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    program = folder / "fuzz"
    command = [compiler, *FLAGS, *flags, f"-I{sources}", str(PROGRAM), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in made.stderr:
        pytest.skip(f"a sanitizer is not installed: {' '.join(flags)}")
    assert made.returncode == 0, made.stderr
    options = os.environ | {
        "ASAN_OPTIONS": "detect_leaks=0",  # idle threads of the kernel are never ended
        "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    words = [str(argument) for argument in arguments]
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, env=options, timeout=300
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


MEMORY = "-fsanitize=address,undefined"
RACES = ("-fsanitize=thread", "-DFUZZ_BLOCK_THREADS")


@pytest.mark.parametrize("vectors", ["least", "of this CPU"])
def test_no_access_beyond_its_memory(vectors: str, tmp_path: Path) -> None:
    """Vectors of this CPU are what the product uses: other instructions, other ends of rows."""
    flags = (MEMORY,) if vectors == "least" else (MEMORY, "-march=native")
    done = run(source_folder(), tmp_path, flags, 500, 0, 2, 1, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 batches, 0 wrong" in done.stdout


def test_no_race_between_threads(tmp_path: Path) -> None:
    """Neither of those that share out views, nor of those of a block that makes one."""
    done = run(source_folder(), tmp_path, RACES, 60, 1, 3, 2, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 batches, 0 wrong" in done.stdout


def broken(folder: Path, file: str, right: str, wrong: str) -> Path:
    """The sources with a mistake in them."""
    sources = folder / "cuda"
    shutil.copytree(source_folder(), sources)
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    return sources


def test_a_missing_sync_is_seen(tmp_path: Path) -> None:
    right = "for (int x = block.thread; x < 3 * 256; x += block.threads) counts[x] = 0;\n"
    sources = broken(tmp_path, "operations.h", f"{right}    block.sync();", right)
    done = run(sources, tmp_path, RACES, 60, 1, 0, 2, 2)
    assert done.returncode != 0
    assert "data race" in done.stderr


def test_a_pixel_beyond_the_image_is_seen(tmp_path: Path) -> None:
    right = "period - i - (border == MIRROR)"
    sources = broken(tmp_path, "views.h", right, "period - i")
    done = run(sources, tmp_path, ("-fsanitize=address",), 600, 0, 0, 1, 1)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
