"""The imports of a Python source."""

from __future__ import annotations

import ast


def imports(source: str) -> list[tuple[str, bool]]:
    """(module, whether at the top level of the file) of each import in a source."""
    tree = ast.parse(source)
    top = set(tree.body)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
            if node.module == "fastaug":
                names = [f"fastaug.{alias.name}" for alias in node.names]
            found += [(name, node in top) for name in names]
    return found
