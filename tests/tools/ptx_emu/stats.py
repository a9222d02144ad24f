"""Statistics of a launch."""

from __future__ import annotations


class Stats(dict):
    """Dict with attribute access; str() gives a summary."""

    def __getattr__(self, k):
        try:
            return self[k]
        except KeyError:
            raise AttributeError(k) from None

    def __str__(self):
        g, s = self["global"], self["shared"]
        lines = [
            f"{self['kernel']} grid={self['grid']} block={self['block']} "
            f"time={self['seconds']:.2f}s",
            f"  thread instructions {self['thread_instructions']:,}  "
            f"warp instructions {self['warp_instructions']:,}",
            "  by class (warp): " + ", ".join(f"{k} {v:,}" for k, v in self["by_class"].items()),
            f"  global: read {g['bytes_read']:,} B (unique {g['unique_read']:,}), "
            f"written {g['bytes_written']:,} B (unique {g['unique_written']:,}), "
            f"sectors r/w {g['sectors_read']:,}/{g['sectors_written']:,}, "
            f"atomics {g['atomics']:,}",
            f"  shared: {s['size']} B/block, loads {s['loads']:,} stores {s['stores']:,} (thread), "
            f"bytes {s['bytes_read']:,}/{s['bytes_written']:,}, "
            f"uninitialised reads {s['uninit_reads']:,}; "
            f"barriers {self['barriers']:,} (block-level)",
        ]
        lines += [
            f"    arg {p['arg']}: {p['nbytes']:,} B, unique read {p['unique_read']:,}, "
            f"unique written {p['unique_written']:,}"
            for p in self["params"]
        ]
        lines += [f"  WARNING x{v}: {k}" for k, v in self["warnings"].items()]
        lines += [f"  RACE: {race}" for race in self["races"][:5]]
        lines += [f"  GLOBAL RACE?: {race}" for race in self["global_races"][:5]]
        return "\n".join(lines)


def op_class(op):
    p = op.split(".")
    h = p[0]
    if h in ("ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix"):
        sp = next(
            (
                q.split("::")[0]
                for q in p
                if q.split("::")[0] in ("global", "shared", "local", "param", "const")
            ),
            "generic",
        )
        return f"{h}.{sp}"
    if h in ("bra", "brx", "ret", "exit", "call_extern"):
        return "control"
    if h in ("bar", "barrier"):
        return "barrier"
    if h in ("shfl", "vote", "match", "redux", "elect", "activemask"):
        return "warp"
    if h in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh") or (
        h == "div" and p[-1][0] in "fb"
    ):
        return "special"
    if h == "mma":
        return "mma"
    if h == "mov":
        return "mov"
    if h == "cvt":
        return "cvt"
    t = p[-1]
    if t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2") and h not in ("selp", "setp"):
        return t
    if h in ("selp", "setp", "set", "slct"):
        return "select"
    return "int"
