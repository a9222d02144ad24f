"""fastaug COMMAND ...: the same as python -m fastaug.COMMAND ..."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import fastaug
from fastaug import cli
from fastaug.errors import ConfigError, suggest

COMMANDS = {
    "train": "train a classifier",
    "evaluate": "measure the accuracy of a checkpoint",
    "predict": "print the most probable classes of images",
    "export": "write a trained network for other programs: safetensors, ONNX, torch.export",
    "preview": "draw the views that the network will see",
    "report": "write one page about runs: the paper's claims, settings, figures, every run",
    "sweep": "train a grid of runs, and choose the best of each setting",
    "figures": "draw the paper's figures and write its tables, from finished runs",
    "scan": "find images that cannot be used",
    "pack": "write any data set as tar shards with an index, with smaller images if you like",
    "doctor": "show what works on this machine, and what to do about the rest",
}


def main(args: Sequence[str]) -> int:
    if args and args[0] == "--version":
        print(f"fastaug {fastaug.__version__}")
        return 0
    if not args or args[0] in ("-h", "--help"):
        print("usage: fastaug COMMAND [flags]; fastaug COMMAND --help lists the flags\n")
        print("\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items()))
        return 0
    command, *rest = args
    if command not in COMMANDS:
        raise ConfigError(f"no command {command!r}: {suggest(command, COMMANDS)}")
    return importlib.import_module(f"fastaug.{command}").main(rest)


def script() -> None:
    """Entry point of the console script. Like python -m, it imports from the current folder."""
    sys.path.insert(0, "")
    sys.exit(cli.run(main))


if __name__ == "__main__":
    script()
