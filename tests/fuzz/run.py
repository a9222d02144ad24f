"""Fuzz the readers of strangers' files with coverage feedback: atheris, which drives libFuzzer.

Allowed for any input: a result, or a FastaugError. Everything else is a finding, whose input is
saved: another exception, more than 5 seconds of the processor, or 600 MB more memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from target import scratch_folder

MAX_SECONDS = 5
"""Processor time for one input: other programs may keep the machine busy."""
MAX_WAIT = 60
"""Seconds after which libFuzzer ends an input that waits for something."""
MAX_GROWTH = 600
"""MB beyond what the process has after its imports."""
PARSERS = ("tarfile", "zipfile", "pickletools", "yaml", "csv")
"""Python modules that readers build on: their branches guide the fuzzer, too."""
ALL, KERNEL = "all", "view-kernel"


class Outcome(NamedTuple):
    target: str
    inputs: int
    seconds: int
    edges: int
    new_entries: int
    peak_mb: int
    crashes: list[Path]

    def line(self) -> str:
        rate = self.inputs / max(self.seconds, 1)
        return (
            f"{self.target:18}{self.inputs:9,} inputs {self.seconds:5} s {rate:7,.0f} inputs/s"
            f"{self.edges:6,} edges {self.new_entries:5,} new entries {self.peak_mb:5,} MB  "
            f"{len(self.crashes)} crashes" + "".join(f"\n    {file}" for file in self.crashes)
        )


def main() -> int:
    options = parse_options()
    try:
        if options.child:
            fuzz_here(options)
        outcomes = [fuzz(name, options) for name in chosen_targets(options)]
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    inputs, crashes = sum(o.inputs for o in outcomes), sum(len(o.crashes) for o in outcomes)
    print(f"{len(outcomes)} targets, {inputs:,} inputs, {crashes} crashes")
    return 1 if crashes else 0


class UsageError(Exception):
    """A mistake in the command, or a tool that is not installed, as one line."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("target", metavar="TARGET", help=f"name of a target, or {ALL}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--runs", type=int, default=-1, help="inputs for each target, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: 0)")
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("build/fuzz"),
        help="folder of inputs, in which later runs continue, and of crashes (default: build/fuzz)",
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # its scratch folder
    return parser.parse_args()


def chosen_targets(options: argparse.Namespace) -> list[str]:
    if options.seconds < 1:
        raise UsageError(f"--seconds must be at least 1, got {options.seconds}")
    if options.target != KERNEL and importlib.util.find_spec("atheris") is None:
        raise UsageError("atheris is not installed: pip install atheris")
    if options.target != ALL:
        return [options.target]
    from targets import TARGETS

    return [*TARGETS, KERNEL]


def fuzz(name: str, options: argparse.Namespace) -> Outcome:
    """Fuzz a target in a process of its own, which libFuzzer ends, and print the outcome."""
    (options.corpus / "crashes").mkdir(parents=True, exist_ok=True)
    with scratch_folder() as folder:
        if name == KERNEL:
            outcome = fuzz_kernel(options, folder)
        else:
            outcome = fuzz_reader(name, options, folder)
    print(outcome.line(), flush=True)
    return outcome


def fuzz_reader(name: str, options: argparse.Namespace, folder: Path) -> Outcome:
    command = [sys.executable, __file__, name, "--child", str(folder / "files")]
    command += [f"--{own}={getattr(options, own)}" for own in ("seconds", "runs", "seed", "corpus")]
    cache = os.environ.get("FASTAUG_CACHE", str(options.corpus.absolute() / "cache"))
    env = {"FASTAUG_CACHE": cache, "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}
    return run_fuzzer(name, command, options, env)


def fuzz_kernel(options: argparse.Namespace, folder: Path) -> Outcome:
    import native_plan

    clang = native_plan.compiler()
    if clang is None:
        raise UsageError(f"{KERNEL} needs clang++ with libFuzzer: apt install clang")
    program = native_plan.build(clang, folder, "-O1" if options.seconds > 60 else "-O0")
    write_seeds(options.corpus / KERNEL, native_plan.seeds())
    flags = fuzzer_flags(KERNEL, options, max_len=2048)
    # Idle threads of the kernel are never ended. The quarantine is memory that is kept after free.
    env = {"ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=32"}
    return run_fuzzer(KERNEL, [str(program), *flags], options, env)


def write_seeds(corpus: Path, seeds: Iterable[bytes]) -> None:
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)


def fuzzer_flags(name: str, options: argparse.Namespace, max_len: int) -> list[str]:
    """Arguments of libFuzzer. It compares the peak of the process, which a child inherits."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return [
        f"-max_total_time={options.seconds}",
        f"-runs={options.runs}",
        f"-seed={options.seed + 1}",  # libFuzzer's 0 means a random one
        f"-max_len={max_len}",
        f"-timeout={MAX_WAIT}",
        f"-rss_limit_mb={used + MAX_GROWTH}",
        f"-artifact_prefix={options.corpus / 'crashes' / name}-",
        "-print_final_stats=1",
        str(options.corpus / name),
    ]


def run_fuzzer(
    name: str, command: list[str], options: argparse.Namespace, env: Mapping[str, str]
) -> Outcome:
    corpus, crashes = options.corpus / name, options.corpus / "crashes"
    before, known = entries(corpus), set(crashes.glob(f"{name}-*"))
    begin = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, errors="replace"
    )
    log = options.corpus / f"{name}.log"
    log.write_text(done.stdout + done.stderr)
    if done.returncode == 2 and (said := re.search(r"^error: (.*)\Z", done.stderr.rstrip(), re.M)):
        raise UsageError(said[1])
    found = sorted(set(crashes.glob(f"{name}-*")) - known)
    if done.returncode and not found:
        found = [log]  # it ended before its first input
    return Outcome(
        name,
        inputs=_last(r"stat::number_of_executed_units: (\d+)", done.stderr),
        seconds=_last(r"^Done \d+ runs in (\d+) second", done.stderr)
        or round(time.monotonic() - begin),
        edges=_last(r" cov: (\d+)", done.stderr),
        new_entries=entries(corpus) - before,
        peak_mb=_last(r"stat::peak_rss_mb: +(\d+)", done.stderr),
        crashes=found,
    )


def entries(corpus: Path) -> int:
    """Inputs that the fuzzer has added because they reach new code."""
    return sum(not file.name.startswith("seed-") for file in corpus.glob("*"))


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text, re.MULTILINE)
    return int(found[-1]) if found else 0


def fuzz_here(options: argparse.Namespace) -> None:
    """In the child: read inputs until the time is over. Does not return."""
    import atheris

    name, folder = options.target, options.child

    def read(content: bytes) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin = time.process_time()
        try:
            target.read(content, folder)
        except FastaugError as error:
            if not str(error):
                raise ValueError("an error without a message") from error
        if (seconds := time.process_time() - begin) > MAX_SECONDS:
            raise TimeoutError(f"{seconds:.1f} seconds of the processor")

    with atheris.instrument_imports(include=["fastaug", *PARSERS]):
        from targets import TARGETS, TOGETHER

        from fastaug.errors import FastaugError

        if name not in (known := TARGETS | TOGETHER):
            raise UsageError(f"no target {name}: one of {', '.join([ALL, KERNEL, *known])}")
        target = known[name]
        with scratch_folder() as made:
            seeds = target.seeds(made)
        for seed in seeds:  # imports the rest
            read(seed)
    write_seeds(options.corpus / name, seeds)
    atheris.Setup([sys.argv[0], *fuzzer_flags(name, options, target.max_len)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
