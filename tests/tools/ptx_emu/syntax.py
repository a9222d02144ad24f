"""The parts of a PTX text: registers, variables, scopes, instructions and literals."""

from __future__ import annotations

import re

from .errors import ParseError
from .types import SIZE


class Reg:
    __slots__ = ("id", "name", "size", "type")

    def __init__(self, id, type, name):
        self.id, self.type, self.name = id, type, name
        self.size = SIZE[type]


class Var:
    __slots__ = ("addr", "align", "extern", "init", "name", "ptr", "size", "space", "type")

    def __init__(self, name, space, align, size, type, init=None, extern=False):
        self.name, self.space, self.align, self.size, self.type = name, space, align, size, type
        self.init, self.addr, self.extern, self.ptr = init, None, extern, False


class Scope:
    def __init__(self, parent=None):
        self.parent, self.syms, self.labels, self.patterns = parent, {}, {}, []

    def find(self, name):
        s = self
        while s is not None:
            v = s.syms.get(name)
            if v is not None:
                return v
            s = s.parent
        return None

    def label(self, name):
        s = self
        while s is not None:
            if name in s.labels:
                return s.labels[name]
            s = s.parent
        return None


class Inst:
    __slots__ = (
        "aux",
        "fn",
        "kind",
        "line",
        "neg",
        "op",
        "ops",
        "parts",
        "pc",
        "pred",
        "pslot",
        "scope",
        "target",
        "text",
    )

    def __repr__(self):
        return f"PTX line {self.line}: {self.text}"


class Func:
    pass


RE_INT = re.compile(r"^[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
RE_HF = re.compile(r"^(-?)0[fF]([0-9a-fA-F]{8})$")
RE_HD = re.compile(r"^(-?)0[dD]([0-9a-fA-F]{16})$")
RE_DF = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$")


def parse_int(s):
    s = s.rstrip("U")
    neg = s.startswith("-")
    s = s.lstrip("+-")
    if s[:2] in ("0x", "0X"):
        v = int(s, 16)
    elif s[:2] in ("0b", "0B"):
        v = int(s, 2)
    elif len(s) > 1 and s[0] == "0":
        v = int(s, 8)
    else:
        v = int(s)
    return -v if neg else v


def split_top(s, sep=","):
    out, d, cur = [], 0, []
    for ch in s:
        if ch in "([{":
            d += 1
        elif ch in ")]}":
            d -= 1
        if ch == sep and d == 0:
            out.append("".join(cur).strip())
            cur = []
        else:
            cur.append(ch)
    last = "".join(cur).strip()
    if last or out:
        out.append(last)
    return out


def match_brace(s, i, o="{", c="}"):
    d = 0
    q = False
    for j in range(i, len(s)):
        ch = s[j]
        if ch == '"':
            q = not q
        elif q:
            continue
        elif ch == o:
            d += 1
        elif ch == c:
            d -= 1
            if d == 0:
                return j
    raise ParseError("unbalanced " + o)


SREGS = {
    "%tid",
    "%ntid",
    "%ctaid",
    "%nctaid",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%clock",
    "%clock_hi",
    "%clock64",
    "%globaltimer",
    "%globaltimer_lo",
    "%globaltimer_hi",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%cluster_ctaid",
    "%cluster_nctaid",
    "%clusterid",
    "%nclusterid",
    "%is_explicit_cluster",
    "%aggr_smem_size",
    "%current_graph_exec",
    "WARP_SZ",
    "%reserved_smem_offset_begin",
}
K_RUN, K_BRA, K_EXIT, K_BAR, K_WARP, K_BRX = range(6)
RE_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
RE_NAME = re.compile(r"^[A-Za-z_$%][\w$%]*$")
