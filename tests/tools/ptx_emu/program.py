"""A kernel as a list of instructions, each compiled to a function over the threads of a batch."""

from __future__ import annotations

import re

import numpy as np

from .bits import Bits
from .buffers import Buffer
from .comparisons import Comparisons
from .control import ControlFlow
from .conversions import Conversions
from .errors import ParseError, UnknownInstruction
from .float_arithmetic import FloatArithmetic
from .integer_arithmetic import IntegerArithmetic
from .matrix_instructions import MatrixInstructions
from .memory_instructions import MemoryInstructions
from .moves import Moves
from .operands import Operands
from .syntax import (
    K_RUN,
    RE_DF,
    RE_HD,
    RE_HF,
    RE_INT,
    RE_LABEL,
    RE_NAME,
    SREGS,
    Inst,
    Reg,
    Scope,
    Var,
    parse_int,
    split_top,
)
from .types import SIZE, slot_base, u8
from .warp_instructions import WarpInstructions


class Program(
    Operands,
    ControlFlow,
    Moves,
    IntegerArithmetic,
    FloatArithmetic,
    Comparisons,
    Bits,
    Conversions,
    MemoryInstructions,
    WarpInstructions,
    MatrixInstructions,
):
    def __init__(self, mod, func):
        self.mod, self.func, self.name = mod, func, func.name
        self.regs, self.slots, self.slotmap = [], [], {}
        self.code, self.shared_vars, self.saddr, self.laddr = [], [], {}, {}
        self.local_size, self.nlab, self.depth = 0, 0, 0
        self.min_sh = self.min_gl = 8
        scope = Scope(mod.globals)
        self.params, off = [], 0
        for p in func.params:
            v = mod._parse_var(p, scope, func.body[0], "param")[0]
            off = -(-off // v.align) * v.align
            v.addr = off
            off += v.size
            self.params.append(v)
        self.param_size = max(off, 8)
        m = re.search(r"\.reqntid\s+([\d,\s]+)", func.attrs)
        self.reqntid = [int(a) for a in re.findall(r"\d+", m[1])] if m else None
        m = re.search(r"\.maxntid\s+([\d,\s]+)", func.attrs)
        self.maxntid = [int(a) for a in re.findall(r"\d+", m[1])] if m else None
        self._body(func, scope, None)
        self._emit("exit", "exit", None, [], scope, 0)
        self._shared_layout()
        for k, ins in enumerate(self.code):
            ins.pc = k
        for ins in self.code:
            self._compile(ins)

    def _body(self, func, scope, retlab):
        t = self.mod.text
        i, end = func.body
        ws = re.compile(r"[\s;]*")
        while True:
            i = ws.match(t, i, end).end()
            if i >= end:
                break
            ch = t[i]
            if ch == "{":
                scope = Scope(scope)
                i += 1
                continue
            if ch == "}":
                scope = scope.parent
                i += 1
                continue
            m = RE_LABEL.match(t, i, end)
            if m:
                j = ws.match(t, m.end(), end).end()
                mm = re.compile(r"\.(branchtargets|calltargets|callprototype)([^;]*);").match(
                    t, j, end
                )
                if mm:
                    scope.labels[m[1]] = ("targets", [a.strip() for a in mm[2].split(",")])
                    i = mm.end()
                    continue
                scope.labels[m[1]] = len(self.code)
                i = m.end()
                continue
            j = i
            d = 0
            q = False
            while j < end:
                c = t[j]
                if c == '"':
                    q = not q
                elif not q:
                    if c in "{(":
                        d += 1
                    elif c in "})":
                        d -= 1
                    elif c == ";" and d == 0:
                        break
                j += 1
            self._stmt(t[i:j], scope, i, retlab)
            i = j + 1

    def _stmt(self, s, scope, pos, retlab):
        s = " ".join(s.split())
        if s.startswith("."):
            m = re.match(r"\.(\w+)", s)
            if m[1] == "reg":
                mm = re.match(r"\.reg\s*\.(\w+)\s+(.*)", s)
                for nm in split_top(mm[2]):
                    g = re.match(r"^([\w$%]+)\s*<\s*(\d+)\s*>$", nm)
                    if g:
                        for k in range(int(g[2])):
                            scope.syms[f"{g[1]}{k}"] = Reg(None, mm[1], f"{g[1]}{k}")
                    else:
                        scope.syms[nm] = Reg(None, mm[1], nm)
            elif m[1] in ("local", "shared", "param", "const", "global"):
                for v in self.mod._parse_var(s, scope, pos):
                    if v.space in ("local", "param"):
                        v.space = "local"
                        self._alloc_local(v)
                    elif v.space in ("global", "const"):
                        self.mod.vars.append(v)
                        v.addr = slot_base(self.mod.next_slot)
                        b = Buffer(np.zeros(v.size, u8), v.addr, v.name)
                        self.mod.mbufs[self.mod.next_slot] = b
                        self.mod.next_slot += 1
                        n = SIZE[v.type]
                        for k, e in enumerate(v.init or []):
                            b.arr[k * n : (k + 1) * n] = np.frombuffer(
                                self.mod._const_bytes(e, v.type), u8
                            )
            return
        line = self.mod._line(pos)
        text = s
        pred = None
        m = re.match(r"@\s*(!?)\s*([\w$%]+)\s+(.*)", s)
        if m:
            r = scope.find(m[2])
            if not isinstance(r, Reg):
                raise ParseError(f"PTX line {line}: predicate {m[2]} undeclared")
            pred = (r, bool(m[1]))
            s = m[3]
        m = re.match(r"([\w.:]+)\s*(.*)", s)
        op, rest = m[1], m[2]
        if op.split(".")[0] == "call":
            self._call(op, rest, pred, scope, line, text)
            return
        if op.startswith("ret") and retlab is not None:
            self._emit("bra", text, pred, [("l", retlab)], scope, line)
            return
        ops = [self._operand(o, scope) for o in split_top(rest)] if rest else []
        self._emit(op, text, pred, ops, scope, line)

    def _alloc_local(self, v):
        if id(v) in self.laddr:
            return
        a = max(v.align, 1)
        self.local_size = -(-self.local_size // a) * a
        self.laddr[id(v)] = self.local_size
        self.local_size += max(v.size, 1)

    def _emit(self, op, text, pred, ops, scope, line):
        ins = Inst()
        ins.op, ins.parts, ins.text, ins.ops, ins.scope, ins.line = (
            op,
            op.split("."),
            text,
            ops,
            scope,
            line,
        )
        ins.pred = pred
        ins.neg = bool(pred and pred[1])
        ins.pslot = self.vslot(pred[0], np.bool_) if pred else None
        ins.fn = ins.target = ins.aux = None
        ins.kind = K_RUN
        self.code.append(ins)
        return ins

    def _call(self, op, rest, pred, scope, line, text):
        parts = split_top(rest)
        ret = []
        if parts and parts[0].startswith("("):
            ret = [a for a in split_top(parts[0][1:-1]) if a]
            parts = parts[1:]
        name = parts[0]
        args = (
            [a for a in split_top(parts[1][1:-1]) if a]
            if len(parts) > 1 and parts[1].startswith("(")
            else []
        )
        self.nlab += 1
        lab = f"$$ret{self.nlab}"
        f = self.mod.funcs.get(name)
        if f is None:
            ins = self._emit("call_extern", text, pred, [], scope, line)
            ins.aux = (
                name,
                [self._operand(a, scope) for a in ret],
                [self._operand(a, scope) for a in args],
            )
            return
        self.depth += 1
        if self.depth > 64:
            raise ParseError(
                f"PTX line {line}: recursive call of {name}: "
                "calls are inlined, recursion is not supported"
            )
        s = Scope(self.mod.globals)
        if pred:
            self._emit("bra", text, (pred[0], not pred[1]), [("l", lab)], s, line)
        for formal, actual in list(zip(f.ret, ret, strict=False)) + list(
            zip(f.params, args, strict=False)
        ):
            mm = re.match(r"\.reg\s+\.\w+\s+([\w$%]+)$", " ".join(formal.split()))
            nm = mm[1] if mm else self.mod._parse_var(formal, Scope(), 0, "param")[0].name
            a = scope.find(actual)
            if a is None:
                raise ParseError(f"PTX line {line}: call argument {actual}")
            s.syms[nm] = a
        s2 = Scope(s)
        self._body(f, s2, lab)
        s.labels[lab] = len(self.code)
        self.depth -= 1

    def _operand(self, o, scope):
        o = o.strip()
        if o == "_":
            return ("_",)
        if o.startswith("{"):
            return ("v", [self._operand(a, scope) for a in split_top(o[1:-1].strip())])
        if o.startswith("["):
            parts = split_top(o[1:-1].strip())
            inner = parts[0]
            m = re.match(r"^([\w$%.]+)\s*(?:([+-])\s*(-?\s*\w+))?$", inner)
            if m and len(parts) == 1:
                off = 0
                if m[3]:
                    off = parse_int(m[3].replace(" ", ""))
                    if m[2] == "-":
                        off = -off
                return ("m", self._operand(m[1], scope), off)
            return ("?", o)
        if o.startswith("("):
            return ("list", [self._operand(a, scope) for a in split_top(o[1:-1])])
        if "|" in o:
            a, b = o.split("|")
            return ("pair", self._operand(a, scope), self._operand(b, scope))
        if o.startswith("!"):
            return ("n", self._operand(o[1:], scope))
        if RE_INT.match(o):
            return ("i", parse_int(o))
        h = RE_HF.match(o)
        if h:
            b = int(h[2], 16)
            return ("f", b ^ (0x80000000 if h[1] else 0), 4)
        h = RE_HD.match(o)
        if h:
            b = int(h[2], 16)
            return ("f", b ^ ((1 << 63) if h[1] else 0), 8)
        if RE_DF.match(o):
            return ("d", float(o))
        v = scope.find(o)
        if isinstance(v, Reg):
            return ("r", v)
        if isinstance(v, Var):
            return self._var(v, 0)
        base = o.split(".")[0]
        if base in SREGS or re.match(r"^%(envreg|pm)\d", base):
            return ("s", o)
        m = re.match(r"^([\w$%.]+)\s*([+-])\s*(\w+)$", o)
        if m:
            v = scope.find(m[1])
            if isinstance(v, Var):
                return self._var(v, parse_int(m[3]) * (-1 if m[2] == "-" else 1))
        m = re.match(r"^generic\(\s*([\w$%.]+)\s*\)$", o)
        if m:
            v = scope.find(m[1])
            return ("gen", v, 0)
        if RE_NAME.match(o):
            return ("l", o)
        return ("?", o)

    def _var(self, v, off):
        if v.space == "shared" and v not in self.shared_vars:
            self.shared_vars.append(v)
        if v.space == "local":
            self._alloc_local(v)
        return ("var", v, off)

    def _shared_layout(self):
        off = 0
        for v in self.shared_vars:
            if not (v.extern or v.size == 0):
                off = -(-off // v.align) * v.align
                self.saddr[id(v)] = off
                off += v.size
        self.static_shared = off
        al = max([v.align for v in self.shared_vars if v.extern or v.size == 0] + [16])
        self.dyn_base = -(-off // al) * al
        for v in self.shared_vars:
            if v.extern or v.size == 0:
                self.saddr[id(v)] = self.dyn_base
        self.local_size = -(-self.local_size // 16) * 16

    def addr(self, v):
        if v.space == "shared":
            return self.saddr[id(v)]
        if v.space == "local":
            return self.laddr[id(v)]
        return v.addr

    def _compile(self, ins):
        try:
            c = getattr(self, "c_" + ins.parts[0].replace("::", "_"), None)
            if c is None:
                raise UnknownInstruction(ins.op)
            fn = c(ins)
            if fn is not None:
                ins.fn = fn
        except (
            UnknownInstruction,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            ValueError,
        ) as e:
            msg = f"unknown instruction or form `{ins.op}` at {ins!r} ({type(e).__name__}: {e})"

            def fn(x, m, msg=msg):
                raise UnknownInstruction(msg)

            ins.fn, ins.kind, ins.aux = fn, K_RUN, "unknown"
        except ParseError as e:
            raise ParseError(f"{ins!r}: {e}") from None

    @staticmethod
    def _types(parts):
        return [p for p in parts[1:] if p in SIZE]

    @staticmethod
    def _mode(parts):
        for p in ("rn", "rz", "rm", "rp", "rna"):
            if p in parts:
                return p
        return None
