"""A PTX text: its kernels and module-level variables."""

from __future__ import annotations

import re

import numpy as np

from .buffers import Buffer
from .errors import ParseError, PTXError
from .launch import Launch
from .program import Program
from .syntax import RE_DF, RE_HD, RE_HF, RE_INT, Func, Scope, Var, match_brace, parse_int, split_top
from .types import SIZE, SLOT, npdt, slot_base, u8


class Module:
    def __init__(self, ptx):
        if isinstance(ptx, bytes):
            ptx = ptx.decode()
        ptx = ptx.rstrip("\0")
        t = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), ptx, flags=re.S)
        t = re.sub(r"(?m)^[ \t]*\.(loc|file)\b[^\n]*", lambda m: "", t)
        t = re.sub(r"//[^\n]*", "", t)
        self.text = t
        self.globals = Scope()
        self.vars = []  # module-level .global/.const
        self.shared = []  # module-level .shared
        self.funcs = {}
        self.protos = {}
        self.target = ""
        self.next_slot = 1
        self.mbufs = {}  # slot -> Buffer for module variables
        self._compiled = {}
        self._lines = np.array([m.start() for m in re.finditer("\n", t)])
        self._parse()
        self._layout()

    def _line(self, pos):
        return int(np.searchsorted(self._lines, pos)) + 1

    def _parse(self):
        t, i, n = self.text, 0, len(self.text)
        ws = re.compile(r"\s*")
        while True:
            i = ws.match(t, i).end()
            if i >= n:
                break
            m = re.compile(r"\.(version|target|address_size)\b([^\n]*)").match(t, i)
            if m:
                if m[1] == "target":
                    self.target = m[2].strip()
                i = m.end()
                continue
            m = re.compile(r"\.section\b[^{]*").match(t, i)
            if m:
                i = match_brace(t, m.end()) + 1
                continue
            m = re.compile(r"((?:\.(?:extern|visible|weak|common)\s+)*)\.(entry|func)\b").match(
                t, i
            )
            if m:
                i = self._parse_func(m, i)
                continue
            m = re.compile(r"(\.pragma|\.alias)[^;]*;").match(t, i)
            if m:
                i = m.end()
                continue
            if t[i] in ";}":
                i += 1
                continue
            j = i
            d = 0
            while j < n and not (t[j] == ";" and d == 0):
                d += (t[j] == "{") - (t[j] == "}")
                j += 1
            v = self._parse_var(t[i:j], self.globals, i)
            for w in v:
                if w.space == "shared":
                    self.shared.append(w)
                elif w.space in ("global", "const"):
                    self.vars.append(w)
            i = j + 1

    def _parse_var(self, s, scope, pos, default_space=None):
        s0 = s.strip()
        init = None
        if "=" in s0:
            s0, init = s0.split("=", 1)
            init = init.strip()
        words = re.findall(r"\.?[\w$%]+(?:::\w+)?|\[[^\]]*\]|<[^>]*>|,", s0.strip())
        space, align, typ, ext = default_space, None, None, False
        k = 0
        isptr = False
        while k < len(words) and (words[k].startswith(".") or (words[k].isdigit())):
            w = words[k].lstrip(".")
            if w in ("extern", "weak", "visible", "common", "volatile"):
                ext |= w == "extern"
            elif w in ("global", "const", "shared", "local", "param", "reg"):
                if not isptr:
                    space = w
            elif w == "ptr":
                isptr = True
            elif w == "align":
                k += 1
                if not isptr:
                    align = int(words[k])
            elif w in ("v2", "v4") or w == "attribute":
                pass
            elif w in SIZE:
                typ = w
            k += 1
        out = []
        if typ is None:
            raise ParseError(
                f"PTX line {self._line(pos)}: cannot parse declaration: {s.strip()[:120]}"
            )
        rest = words[k:]
        names, cur = [], []
        for w in [*rest, ","]:
            if w == ",":
                if cur:
                    names.append(cur)
                cur = []
            else:
                cur.append(w)
        for nm in names:
            name = nm[0]
            cnt = 1
            arr = False
            for d in nm[1:]:
                if d.startswith("["):
                    arr = True
                    d = d[1:-1].strip()
                    cnt *= parse_int(d) if d else 0
            ini = None
            if init is not None:
                ini = self._flat_init(init)
                if arr and cnt == 0:
                    cnt = len(ini)
            v = Var(name, space, align or SIZE[typ], cnt * SIZE[typ], typ, ini, ext)
            v.ptr = isptr
            scope.syms[name] = v
            out.append(v)
        return out

    def _flat_init(self, s):
        s = s.strip()
        if s.startswith('"'):
            return [str(b) for b in s[1:-1].encode()] + ["0"]
        if s.startswith("{"):
            r = []
            for e in split_top(s[1 : match_brace(s, 0)]):
                if e:
                    r += self._flat_init(e)
            return r
        return [s]

    def _parse_func(self, m, i):
        t = self.text
        f = Func()
        f.kind = m[2]
        f.extern = ".extern" in m[1]
        j = m.end()
        f.ret = []
        ws = re.compile(r"\s*")
        j = ws.match(t, j).end()
        if t[j] == "(":
            e = match_brace(t, j, "(", ")")
            f.ret = [p for p in split_top(t[j + 1 : e]) if p]
            j = ws.match(t, e + 1).end()
        mm = re.compile(r"[\w$%.]+").match(t, j)
        f.name = mm[0]
        j = ws.match(t, mm.end()).end()
        f.params = []
        if t[j] == "(":
            e = match_brace(t, j, "(", ")")
            f.params = [p for p in split_top(t[j + 1 : e]) if p]
            j = e + 1
        k = j
        while t[k] not in "{;":
            k += 1
        f.attrs = t[j:k].strip()
        if t[k] == ";":
            f.body = None
            self.protos[f.name] = f
            return k + 1
        e = match_brace(t, k)
        f.body = (k + 1, e)
        self.funcs[f.name] = f
        return e + 1

    def _layout(self):
        """Module .global and .const variables become buffers with their own windows."""
        for v in self.vars:
            v.addr = slot_base(self.next_slot)
            self.mbufs[self.next_slot] = Buffer(np.zeros(max(v.size, 0), u8), v.addr, v.name)
            self.next_slot += 1
        for v in self.vars:
            if v.init:
                b = self.mbufs[v.addr >> SLOT].arr
                n = SIZE[v.type]
                for k, e in enumerate(v.init):
                    b[k * n : (k + 1) * n] = np.frombuffer(self._const_bytes(e, v.type), u8)

    def _const_bytes(self, e, typ):
        n = SIZE[typ]
        e = e.strip()
        if RE_INT.match(e):
            if typ in ("f32", "f64"):
                return npdt(typ)(parse_int(e)).tobytes()
            return (parse_int(e) & ((1 << 8 * n) - 1)).to_bytes(n, "little")
        h = RE_HF.match(e)
        if h:
            return int(h[2], 16).to_bytes(4, "little")
        h = RE_HD.match(e)
        if h:
            return int(h[2], 16).to_bytes(8, "little")
        if RE_DF.match(e):
            return npdt(typ)(float(e)).tobytes()
        g = re.match(r"^(?:generic\()?\s*([\w$%.]+)\s*\)?\s*([+-]\s*\d+)?$", e)
        if g:
            v = self.globals.find(g[1])
            if v is not None:
                return ((v.addr or 0) + int((g[2] or "0").replace(" ", ""))).to_bytes(8, "little")[
                    :n
                ]
        raise ParseError("initialiser " + e)

    def set_global(self, name, arr):
        """CudaMemcpyToSymbol."""
        v = self.globals.find(name)
        a = np.ascontiguousarray(arr).reshape(-1).view(u8)
        self.mbufs[v.addr >> SLOT].arr[: a.size] = a

    def get_global(self, name, dtype=u8):
        v = self.globals.find(name)
        return self.mbufs[v.addr >> SLOT].arr.view(dtype).copy()

    @property
    def kernels(self):
        return [n for n, f in self.funcs.items() if f.kind == "entry"]

    def kernel(self, name):
        if name not in self._compiled:
            if name not in self.funcs:
                raise PTXError(f"no kernel {name}; have {self.kernels}")
            self._compiled[name] = Program(self, self.funcs[name])
        return self._compiled[name]

    def unsupported(self, name):
        """Instructions of a kernel that the emulator does not know (they raise when executed)."""
        return [repr(i) for i in self.kernel(name).code if i.aux == "unknown"]

    def launch(self, name, grid=(1, 1, 1), block=(1, 1, 1), args=(), shared_bytes=0, **kw):
        return Launch(self, self.kernel(name), grid, block, args, shared_bytes, **kw).go()
