"""ptx_emu: a SIMT emulator of NVIDIA PTX in Python/numpy (CPU only), for checking kernels numerically.

    import ptx_emu
    mod = ptx_emu.Module(ptx_text)                       # NVRTC's nvrtcGetPTX, Triton's k.asm['ptx'], nvcc -ptx
    st  = mod.launch('kernel', grid=(g,), block=(b,), args=[np_array, torch_cpu_tensor, 3, 1.5], shared_bytes=0)
    print(st)                                            # instruction counts, traffic, barriers, warnings, races

args: numpy arrays / torch CPU tensors (contiguous) are device pointers, modified in place; Ptr(arr, byte_offset) points inside;
None is a null pointer; python/numpy scalars follow the .param type; structs by value are bytes.  Missing trailing 8-byte
parameters are null pointers (the scratch pointers that Triton appends).  For Triton: block=(32*num_warps,),
shared_bytes=k.metadata.shared.

Execution: each register is an array over the threads of a batch of blocks; lowest-pc-first with active masks; a thread waits at
bar.sync until all live threads of its block stand there (else BarrierError), and at shfl/vote/... .sync until the lanes of its
membermask do.  Every access is checked: OutOfBounds / Misaligned name the thread, the PTX line and the instruction.
Shared-memory races within a barrier interval raise RaceError (race='record' collects them in st['races'], None switches off;
race_mode='strict' flags also accesses that do not change the value).  Unordered accesses to global memory by different
threads are only recorded, in st['global_races'].  Shared memory and registers start as 0xFF (NaN), not zero.
cp.async data arrive at the wait.  schedule='warp' runs one random warp at a time (seed=...); approx_ulp=1 gives the
approximate instructions (ex2, lg2, rcp, div.full, ...) a random error of the documented size, 0 rounds them exactly.

Statistics: st['inst_thread'], st['inst_warp'] (by opcode), st['by_class'], st['global'] (bytes_read/written as requested,
unique_read/written, 32-byte sectors per warp request), st['params'] (unique bytes per array argument), st['shared'], st['barriers'].

Not emulated: wgmma, tcgen05, TMA (cp.async.bulk), mbarrier, clusters, textures, sparse/integer mma, recursion (calls are inlined),
b128.  ptxas may fuse mul.f32 + add.f32 without rounding modifiers into an fma; here each is rounded.
"""

import re
import numpy as np

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64


# ---------------------------------------------------------------- errors
class PTXError(Exception):
    pass


class ParseError(PTXError):
    pass


class UnknownInstruction(PTXError, NotImplementedError):
    pass


class OutOfBounds(PTXError):
    pass


class Misaligned(PTXError):
    pass


class BarrierError(PTXError):
    pass


class RaceError(PTXError):
    pass


class StepLimit(PTXError):
    pass


class Trap(PTXError):
    pass


# ---------------------------------------------------------------- types
UDT = {1: u8, 2: u16, 4: u32, 8: u64}
SDT = {1: i8, 2: i16, 4: i32, 8: i64}
SIZE = {}
for _b in (8, 16, 32, 64):
    for _c in "usb":
        SIZE[f"{_c}{_b}"] = _b // 8
SIZE.update(
    {
        "f16": 2,
        "bf16": 2,
        "f32": 4,
        "f64": 8,
        "f16x2": 4,
        "bf16x2": 4,
        "f32x2": 8,
        "u16x2": 4,
        "s16x2": 4,
        "tf32": 4,
        "e4m3x2": 2,
        "e5m2x2": 2,
        "b128": 16,
        "pred": 1,
    }
)
FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"}
X2 = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32", "u16x2": "u16", "s16x2": "s16"}


def npdt(t):
    """storage dtype of a scalar PTX type (bf16 -> uint16)"""
    if t[0] == "f" and t in ("f16", "f32", "f64"):
        return {"f16": f16, "f32": f32, "f64": f64}[t]
    n = SIZE[t]
    return SDT[n] if t[0] == "s" else UDT[n]


SLOT = 36  # each buffer owns one 2**36-byte window, base in its middle


def slot_base(i):
    return (i << SLOT) + (1 << (SLOT - 1))


SH_SLOT, LO_SLOT, PA_SLOT = 0x3F0, 0x3F1, 0x3F2
WIN = {"shared": SH_SLOT << SLOT, "local": LO_SLOT << SLOT, "param": PA_SLOT << SLOT}
BIG = 1 << 30


# ---------------------------------------------------------------- floating-point helpers
def two_sum(a, b):
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def add_odd(a, b):
    """a+b in float64 rounded to odd (so that a later narrowing rounding is correct)"""
    s, e = two_sum(a, b)
    s = np.asarray(s, f64)
    bits = s.view(i64)
    fix = (e != 0) & ((bits & 1) == 0) & np.isfinite(s) & np.isfinite(e)
    if not np.any(fix):
        return s
    up = (e > 0) == (s > 0)  # away from zero when the error has the sign of s
    return np.where(fix, np.where(up, bits + 1, bits - 1), bits).view(f64)


def two_prod(a, b):
    p = a * b
    C = 134217729.0
    t = C * a
    ah = t - (t - a)
    al = a - ah
    t = C * b
    bh = t - (t - b)
    bl = b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a, b, c):
    """correctly rounded double fma (Boldo-Melquiond), barring under/overflow of the intermediates"""
    a, b, c = (np.asarray(v, f64) for v in (a, b, c))
    uh, ul = two_prod(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    z = add_odd(tl, vl)
    r = vh + z
    plain = a * b + c
    big = (
        ~np.isfinite(r)
        | (np.abs(a) > 1e150)
        | (np.abs(b) > 1e150)
        | (np.abs(uh) < 1e-290)
        | (uh == 0)
    )
    return np.where(big, plain, r)


def narrow(v, dt, mode="rn"):
    """float64 -> float32/float16 with rounding mode"""
    r = np.asarray(v).astype(dt)
    if mode in ("rn", None):
        return r
    r64 = r.astype(f64)
    if mode == "rz":
        return np.where(np.abs(r64) > np.abs(v), np.nextafter(r, dt(0)), r)
    if mode == "rm":
        return np.where(r64 > v, np.nextafter(r, dt(-np.inf)), r)
    if mode == "rp":
        return np.where(r64 < v, np.nextafter(r, dt(np.inf)), r)
    if mode == "rna":
        raise UnknownInstruction("rounding .rna here")
    raise UnknownInstruction("rounding " + mode)


def f64_to_f32_odd(v):
    v = np.asarray(v, f64)
    r = v.astype(f32)
    b = np.atleast_1d(r).view(u32)
    v1 = np.atleast_1d(v)
    r1 = np.atleast_1d(r).astype(f64)
    fix = (r1 != v1) & ((b & 1) == 0) & ~np.isnan(v1)
    if fix.any():
        up = np.abs(v1) > np.abs(r1)
        b = np.where(fix, np.where(up, b + u32(1), b - u32(1)), b)
    return b.view(f32).reshape(v.shape)


def bf2f(h):
    return (np.asarray(h, u16).astype(u32) << u32(16)).view(f32)


def f2bf(v, mode="rn"):
    """float32 or float64 -> bf16 bits"""
    v = np.asarray(v)
    if v.dtype != f32:
        v = f64_to_f32_odd(v)
    b = np.ascontiguousarray(v).view(u32).reshape(v.shape)
    if mode in ("rn", None):
        r = (b + u32(0x7FFF) + ((b >> u32(16)) & u32(1))) >> u32(16)
    else:
        r = b >> u32(16)
        inex = (b & u32(0xFFFF)) != 0
        neg = (b >> u32(31)) != 0
        if mode == "rm":
            r = r + (inex & neg)
        elif mode == "rp":
            r = r + (inex & ~neg)
        elif mode == "rna":
            r = (b + u32(0x8000)) >> u32(16)
        elif mode != "rz":
            raise UnknownInstruction("bf16 rounding " + mode)
    return np.where(np.isnan(v), u32(0x7FFF), r).astype(u16)


TINY = {"f32": f32(2.0**-126), "f16": f32(2.0**-14), "bf16": f32(2.0**-126), "f64": f64(2.0**-1022)}
MAXF = {
    "f16": 65504.0,
    "bf16": 3.3895313892515355e38,
    "f32": 3.4028234663852886e38,
    "f64": 1.7976931348623157e308,
}


def ftz(a, t="f32"):
    return np.where(np.abs(a) < TINY[t], np.copysign(a.dtype.type(0), a), a)


def fp8_decode(h, kind):
    h = np.asarray(h).astype(i32) & 0xFF
    s = np.where(h & 0x80, -1.0, 1.0)
    if kind == "e4m3":
        e, m = (h >> 3) & 15, h & 7
        v = np.where(e == 0, m * 2.0**-9, (1 + m / 8.0) * 2.0 ** (e - 7.0))
        v = np.where((e == 15) & (m == 7), np.nan, v)
    else:
        e, m = (h >> 2) & 31, h & 3
        v = np.where(e == 0, m * 2.0**-16, (1 + m / 4.0) * 2.0 ** (e - 15.0))
        v = np.where(e == 31, np.where(m == 0, np.inf, np.nan), v)
    return (s * v).astype(f32)


def fp8_encode(v, kind):
    """satfinite, round to nearest even"""
    v = np.asarray(v, f64)
    mb, emin, mx, nan = (3, -6, 448.0, 0x7F) if kind == "e4m3" else (2, -14, 57344.0, 0x7F)
    a = np.minimum(np.abs(v), mx)
    e = np.maximum(np.floor(np.log2(np.where(a > 0, a, 1e-300))), emin)
    q = np.rint(a / 2.0 ** (e - mb))  # in units of the last place
    up = q >= 2 ** (mb + 1)
    e = np.where(up, e + 1, e)
    q = np.where(up, q / 2, q)
    q = q.astype(i64)
    sub = q < 2**mb
    code = np.where(sub, q, ((e - emin + 1).astype(i64) << mb) | (q - 2**mb))
    mxc = 0x7E if kind == "e4m3" else 0x7B
    code = np.minimum(code, mxc)
    code = code | np.where(np.signbit(v), 0x80, 0)
    return np.where(np.isnan(v), nan, code).astype(u8)


# ---------------------------------------------------------------- program objects
class Reg:
    __slots__ = ("id", "size", "type", "name")

    def __init__(self, id, type, name):
        self.id, self.type, self.name = id, type, name
        self.size = SIZE[type]


class Var:
    __slots__ = ("name", "space", "align", "size", "type", "init", "addr", "extern", "ptr")

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
        "op",
        "parts",
        "pred",
        "neg",
        "pslot",
        "ops",
        "scope",
        "line",
        "text",
        "fn",
        "kind",
        "target",
        "aux",
        "pc",
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

    # ---- parsing
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
            elif w in ("v2", "v4"):
                pass
            elif w == "attribute":
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
        for w in rest + [","]:
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
        """module .global and .const variables become buffers with their own windows"""
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
        """cudaMemcpyToSymbol"""
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
        """instructions of a kernel that the emulator does not know (they raise when executed)"""
        return [repr(i) for i in self.kernel(name).code if i.aux == "unknown"]

    def launch(self, name, grid=(1, 1, 1), block=(1, 1, 1), args=(), shared_bytes=0, **kw):
        return Launch(self, self.kernel(name), grid, block, args, shared_bytes, **kw).go()


class Ptr:
    """device pointer into an array at a byte offset: Ptr(arr, 2)"""

    def __init__(self, arr, offset=0):
        self.arr, self.offset = arr, offset


class Buffer:
    def __init__(self, arr, base, name):
        self.arr, self.base, self.name, self.n = arr, base, name, arr.size
        self.v = {1: arr}
        for w in (2, 4, 8):
            self.v[w] = arr[: arr.size // w * w].view(UDT[w])
        self.rd = self.wr = None

    def mark(self, which, off, w):
        b = getattr(self, which)
        if b is None:
            b = {1: np.zeros((self.n + 15) // 16 * 16, u8)}
            for k in (2, 4, 8):
                b[k] = b[1].view(UDT[k])
            setattr(self, which, b)
        if w == 16:
            o = off >> u64(3)
            b[8][o] = 0x0101010101010101
            b[8][o + u64(1)] = 0x0101010101010101
        elif w == 32:
            o = off >> u64(3)
            for k in range(4):
                b[8][o + u64(k)] = 0x0101010101010101
        else:
            b[w][off // u64(w)] = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}[w]

    def unique(self, which):
        b = getattr(self, which)
        return 0 if b is None else int(np.count_nonzero(b[1]))


# ---------------------------------------------------------------- kernel -> instruction list
K_RUN, K_BRA, K_EXIT, K_BAR, K_WARP, K_BRX = range(6)
RE_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
RE_NAME = re.compile(r"^[A-Za-z_$%][\w$%]*$")


class Program:
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

    # ---- body
    def _body(self, func, scope, retlab):
        t = self.mod.text
        i, end = func.body
        ws = re.compile(r"[\s;]*")
        top = scope
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
        if retlab:
            pass

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
                f"PTX line {line}: recursive call of {name}: calls are inlined, recursion is not supported"
            )
        s = Scope(self.mod.globals)
        if pred:
            self._emit("bra", text, (pred[0], not pred[1]), [("l", lab)], s, line)
        for formal, actual in list(zip(f.ret, ret)) + list(zip(f.params, args)):
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

    # ---- operand access
    def vslot(self, reg, dt):
        if reg.id is None:
            reg.id = len(self.regs)
            self.regs.append(reg)
        k = (reg.id, np.dtype(dt))
        s = self.slotmap.get(k)
        if s is None:
            s = self.slotmap[k] = len(self.slots)
            self.slots.append(k)
        return s

    def src(self, o, t):
        k = o[0]
        if t == "pred":
            if k == "r":
                s = self.vslot(o[1], np.bool_)
                return lambda x: x.V[s]
            if k == "n":
                g = self.src(o[1], "pred")
                return lambda x: ~g(x)
            if k == "i":
                c = np.bool_(o[1] != 0)
                return lambda x: c
            raise ParseError("predicate operand")
        n, dt = SIZE[t], npdt(t)
        if k == "r":
            r = o[1]
            if r.size == n:
                s = self.vslot(r, dt)
                return lambda x: x.V[s]
            if r.size > n:
                s = self.vslot(r, UDT[r.size])
                ud = UDT[n]
                return lambda x: x.V[s].astype(ud).view(dt)
            raise ParseError(f"register {r.name} narrower than .{t}")
        if k == "i":
            if t in ("f32", "f64"):
                c = dt(o[1])
            else:
                c = UDT[n](o[1] & ((1 << 8 * n) - 1)).view(dt)
            return lambda x: c
        if k == "f":
            v = u32(o[1]).view(f32) if o[2] == 4 else u64(o[1]).view(f64)
            if o[2] == n:
                c = UDT[n](o[1]).view(dt)
            elif t in ("f32", "f64", "f16"):
                c = dt(v)
            elif t == "bf16":
                c = f2bf(f32(v))[()]
            else:
                c = UDT[n](o[1] & ((1 << 8 * n) - 1)).view(dt)
            return lambda x: c
        if k == "d":
            c = (
                dt(o[1])
                if t in ("f16", "f32", "f64")
                else (
                    f2bf(f32(o[1]))[()]
                    if t == "bf16"
                    else f32(o[1]).view(u32)
                    if n == 4
                    else f64(o[1]).view(u64)
                )
            )
            return lambda x: c
        if k == "s":
            nm = o[1]
            return lambda x: x.sreg(nm).astype(UDT[n]).view(dt)
        if k in ("var", "gen"):
            a = self.addr(o[1]) + o[2]
            if k == "gen":
                a += WIN.get(o[1].space, 0)
            c = UDT[n](a & ((1 << 8 * n) - 1)).view(dt)
            return lambda x: c
        raise ParseError(f"operand {o}")

    def dst(self, o, t):
        """put(x, m, val): full-width value, masked by m (None = all)"""
        if o[0] == "_":
            return lambda x, m, v: None
        r = o[1]
        if t == "pred":
            s = self.vslot(r, np.bool_)
        else:
            n = SIZE[t]
            if r.size == n:
                s = self.vslot(r, npdt(t))
            elif r.size > n:
                dt = npdt(t)
                if t[0] == "s":
                    s = self.vslot(r, SDT[r.size])
                else:
                    s = self.vslot(r, UDT[r.size])
                    dt = UDT[n]
                sdt = npdt(t)

                def put(x, m, v):
                    v = np.asarray(v).astype(sdt).view(dt)
                    if m is None:
                        x.V[s][...] = v
                    else:
                        np.copyto(x.V[s], v, where=m, casting="unsafe")

                return put
            else:
                raise ParseError(f"register {r.name} narrower than .{t}")

        def put(x, m, v):
            if m is None:
                x.V[s][...] = v
            else:
                np.copyto(x.V[s], v, where=m, casting="unsafe")

        return put

    def dsti(self, o, t):
        """puti(x, idx, val): val only for the active lanes idx (None = all)"""
        if o[0] == "_":
            return lambda x, idx, v: None
        r = o[1]
        n = SIZE[t]
        dt = npdt(t)
        if r.size < n:
            raise ParseError(f"register {r.name} narrower than .{t}")
        if r.size == n:
            s = self.vslot(r, dt)
        else:
            s = self.vslot(r, SDT[r.size] if t[0] == "s" else UDT[r.size])
            if t[0] != "s":
                dt = UDT[n]

        def put(x, idx, v):  # v: unsigned raw array of n bytes
            v = v.view(dt)
            if idx is None:
                x.V[s][...] = v
            else:
                x.V[s][idx] = v

        return put

    def mem(self, o):
        """address getter: (x, idx) -> uint64 addresses of the active lanes"""
        if o[0] != "m":
            raise ParseError(f"address operand {o}")
        base, off = o[1], o[2]
        if base[0] == "r":
            r = base[1]
            if r.size not in (4, 8):
                raise ParseError("address register size")
            s = self.vslot(r, UDT[r.size])
            if r.size == 8:
                c = u64(off & (2**64 - 1))
                if off == 0:
                    return lambda x, idx: x.V[s] if idx is None else x.V[s][idx]
                return lambda x, idx: (x.V[s] if idx is None else x.V[s][idx]) + c
            c = u32(off & 0xFFFFFFFF)
            return lambda x, idx: ((x.V[s] if idx is None else x.V[s][idx]) + c).astype(u64)
        g = self.src(base, "u64")
        c = u64(off & (2**64 - 1))
        return lambda x, idx: np.full(x.T if idx is None else len(idx), g(x) + c, u64)

    def mem_space(self, parts, o):
        sp = None
        for p in parts:
            q = p.split("::")[0]
            if q in ("global", "shared", "local", "param", "const"):
                sp = q
        if sp == "param" and o[1][0] == "var" and o[1][1].space == "local":
            sp = "local"
        return sp

    def fsrc(self, o, t):
        """float operand as compute array (f16/bf16 -> float32; x2 -> (T,2))"""
        b = X2.get(t)
        if b:
            g = self.src(o, "b32" if SIZE[t] == 4 else "b64")
            if b == "bf16":
                return lambda x: bf2f(np.atleast_1d(g(x)).view(u16).reshape(-1, 2))
            if b == "f16":
                return lambda x: np.atleast_1d(g(x)).view(f16).reshape(-1, 2).astype(f32)
            dt = npdt(b)
            return lambda x: np.atleast_1d(g(x)).view(dt).reshape(-1, 2)
        g = self.src(o, t)
        if t == "f16":
            return lambda x: g(x).astype(f32)
        if t == "bf16":
            return lambda x: bf2f(g(x))
        return g

    def fdst(self, o, t, mode="rn"):
        b = X2.get(t, t)
        if b == "bf16":
            fin = lambda v: f2bf(v, mode)
        elif b == "f16":
            fin = lambda v: narrow(v, f16, mode)
        elif b in ("f32", "f64"):
            dt = npdt(b)
            fin = lambda v: np.asarray(v).astype(dt, copy=False)
        else:
            dt = npdt(b)
            fin = lambda v: np.asarray(v).astype(dt)
        if t in X2:
            n = SIZE[t]
            put = self.dst(o, f"b{8 * n}")
            return lambda x, m, v: put(x, m, np.ascontiguousarray(fin(v)).view(UDT[n]).reshape(-1))
        put = self.dst(o, t)
        return lambda x, m, v: put(x, m, fin(v))

    # ---- compile
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

    # control flow
    def _target(self, ins, lab):
        t = ins.scope.label(lab)
        if t is None:
            raise ParseError(f"label {lab}")
        return t

    def c_bra(self, ins):
        ins.kind = K_BRA
        ins.target = self._target(ins, ins.ops[0][1])

    def c_brx(self, ins):
        ins.kind = K_BRX
        ins.aux = self.src(ins.ops[0], "u32")
        lst = self._target(ins, ins.ops[1][1])[1]
        ins.target = np.array([self._target(ins, l) for l in lst], dtype=np.int64)

    def c_ret(self, ins):
        ins.kind = K_EXIT

    c_exit = c_ret

    def c_trap(self, ins):
        def fn(x, m):
            raise Trap(f"trap executed by {x.who(x.first(m))} at {ins!r}")

        return fn

    def c_call_extern(self, ins):
        name, ret, args = ins.aux
        ins.aux = None
        if name == "vprintf":
            put = self.mem(("m", ret[0], 0)) if ret else None
            return lambda x, m: None

        def fn(x, m):
            raise Trap(f"call of extern function {name} by {x.who(x.first(m))} at {ins!r}")

        return fn

    def c_nop(self, ins):
        return lambda x, m: None

    c_membar = c_fence = c_prefetch = c_prefetchu = c_discard = c_applypriority = c_nanosleep = (
        c_griddepcontrol
    ) = c_nop
    c_pmevent = c_setmaxnreg = c_brkpt = c_nop

    def c_createpolicy(self, ins):
        put = self.dst(ins.ops[0], "b64")
        return lambda x, m: put(x, m, u64(0))

    # moves
    def c_mov(self, ins):
        t = ins.parts[-1]
        d, a = ins.ops
        if t == "pred":
            g, put = self.src(a, "pred"), self.dst(d, "pred")
            return lambda x, m: put(x, m, g(x))
        if d[0] == "v" and a[0] != "v":
            n = SIZE[t] // len(d[1])
            if SIZE[t] == 16:
                raise UnknownInstruction("mov.b128")
            puts = [self.dst(e, f"b{8 * n}") for e in d[1]]
            g = self.src(a, f"b{8 * SIZE[t]}")
            dt, ndt = UDT[SIZE[t]], UDT[n]

            def fn(x, m):
                v = g(x)
                vs = [(v >> dt(8 * n * k)).astype(ndt) for k in range(len(puts))]
                for p, e in zip(puts, vs):
                    p(x, m, e)

            return fn
        if a[0] == "v" and d[0] != "v":
            n = SIZE[t] // len(a[1])
            gs = [self.src(e, f"b{8 * n}") for e in a[1]]
            put = self.dst(d, f"b{8 * SIZE[t]}")
            dt = UDT[SIZE[t]]

            def fn(x, m):
                v = gs[0](x).astype(dt)
                for k in range(1, len(gs)):
                    v = v | (gs[k](x).astype(dt) << dt(8 * n * k))
                put(x, m, v)

            return fn
        if d[0] == "v":
            n = SIZE[t]
            gs = [self.src(e, t) for e in a[1]]
            ps = [self.dst(e, t) for e in d[1]]

            def fn(x, m):
                vs = [np.array(g(x)) for g in gs]
                for p, v in zip(ps, vs):
                    p(x, m, v)

            return fn
        tt = f"b{8 * SIZE[t]}" if a[0] != "i" or t not in ("f32", "f64") else t
        g, put = self.src(a, tt), self.dst(d, tt)
        return lambda x, m: put(x, m, g(x))

    def c_cvta(self, ins):
        t = ins.parts[-1]
        to = "to" in ins.parts
        sp = self.mem_space(ins.parts, ("m", ("i", 0), 0))
        g, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        w = WIN.get(sp, 0)
        dt = npdt(t)
        w = dt(w & ((1 << 8 * SIZE[t]) - 1))
        if to:
            return lambda x, m: put(x, m, g(x) - w)
        return lambda x, m: put(x, m, g(x) + w)

    def c_isspacep(self, ins):
        sp = self.mem_space(ins.parts, ("m", ("i", 0), 0))
        g, put = self.src(ins.ops[1], "u64"), self.dst(ins.ops[0], "pred")

        def fn(x, m):
            s = g(x) >> u64(SLOT)
            if sp == "global":
                put(x, m, s < u64(SH_SLOT))
            else:
                put(
                    x,
                    m,
                    s
                    == u64(
                        {"shared": SH_SLOT, "local": LO_SLOT, "param": PA_SLOT, "const": 0x3FF}[sp]
                    ),
                )

        return fn

    def c_mapa(self, ins):
        t = ins.parts[-1]
        g, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, g(x))

    # integer / float arithmetic dispatch
    def c_add(self, ins):
        return self._arith(ins, "add")

    def c_sub(self, ins):
        return self._arith(ins, "sub")

    def c_mul(self, ins):
        return self._arith(ins, "mul")

    def _arith(self, ins, op):
        P = ins.parts
        t = P[-1]
        d, a, b = ins.ops
        if t in FLOATS:
            return self._farith(ins, op, t)
        if t in ("u16x2", "s16x2"):
            ga, gb, put = self.fsrc(a, t), self.fsrc(b, t), self.fdst(d, t)
            f = {"add": np.add, "sub": np.subtract}[op]
            return lambda x, m: put(x, m, f(ga(x), gb(x)))
        ga, gb = self.src(a, t), self.src(b, t)
        n = SIZE[t]
        if op == "mul":
            if "wide" in P:
                w = t[0] + str(16 * n)
                wd = npdt(w)
                put = self.dst(d, w)
                return lambda x, m: put(x, m, ga(x).astype(wd) * gb(x).astype(wd))
            put = self.dst(d, t)
            if "hi" in P:
                return lambda x, m: put(x, m, mulhi(ga(x), gb(x), t))
            return lambda x, m: put(x, m, ga(x) * gb(x))
        put = self.dst(d, t)
        if "sat" in P:
            lo, hi = (-(2**31), 2**31 - 1)
            sg = 1 if op == "add" else -1
            return lambda x, m: put(
                x, m, np.clip(ga(x).astype(i64) + sg * gb(x).astype(i64), lo, hi).astype(i32)
            )
        if "cc" in P:
            return self._carry(ga, gb, put, op, n, False, True)
        if op == "add":
            return lambda x, m: put(x, m, ga(x) + gb(x))
        return lambda x, m: put(x, m, ga(x) - gb(x))

    def _carry(self, ga, gb, put, op, n, cin, cout):
        dt = UDT[n]

        def fn(x, m):
            a = np.atleast_1d(ga(x)).view(dt)
            b = np.atleast_1d(gb(x)).view(dt)
            c = x.cc.astype(dt) if cin else dt(0)
            if op == "add":
                r = a + b
                k = r < a
                r2 = r + c
                k = k | (r2 < r)
            else:
                r = a - b
                k = a < b
                r2 = r - c
                k = k | (r < c)
            if cout:
                if m is None:
                    x.cc[...] = k
                else:
                    np.copyto(x.cc, k, where=m)
            put(x, m, r2)

        return fn

    def c_addc(self, ins, op="add"):
        t = ins.parts[-1]
        d, a, b = ins.ops
        return self._carry(
            self.src(a, t),
            self.src(b, t),
            self.dst(d, f"u{8 * SIZE[t]}"),
            op,
            SIZE[t],
            True,
            "cc" in ins.parts,
        )

    def c_subc(self, ins):
        return self.c_addc(ins, "sub")

    def c_mad(self, ins):
        P = ins.parts
        t = P[-1]
        if t in FLOATS:
            return self.c_fma(ins)
        d, a, b, c = ins.ops
        ga, gb = self.src(a, t), self.src(b, t)
        n = SIZE[t]
        if "wide" in P:
            w = t[0] + str(16 * n)
            wd = npdt(w)
            gc, put = self.src(c, w), self.dst(d, w)
            return lambda x, m: put(x, m, ga(x).astype(wd) * gb(x).astype(wd) + gc(x))
        gc, put = self.src(c, t), self.dst(d, t)
        if "cc" in P:
            h = "hi" in P
            mul = (lambda x: mulhi(ga(x), gb(x), t)) if h else (lambda x: ga(x) * gb(x))
            return self._carry(mul, gc, self.dst(d, f"u{8 * n}"), "add", n, False, True)
        if "hi" in P:
            if "sat" in P:
                return lambda x, m: put(
                    x,
                    m,
                    np.clip(mulhi(ga(x), gb(x), t).astype(i64) + gc(x), -(2**31), 2**31 - 1).astype(
                        i32
                    ),
                )
            return lambda x, m: put(x, m, mulhi(ga(x), gb(x), t) + gc(x))
        return lambda x, m: put(x, m, ga(x) * gb(x) + gc(x))

    def c_madc(self, ins):
        P = ins.parts
        t = P[-1]
        d, a, b, c = ins.ops
        ga, gb, gc = (self.src(o, t) for o in (a, b, c))
        mul = (lambda x: mulhi(ga(x), gb(x), t)) if "hi" in P else (lambda x: ga(x) * gb(x))
        return self._carry(mul, gc, self.dst(d, f"u{8 * SIZE[t]}"), "add", SIZE[t], True, "cc" in P)

    def c_mul24(self, ins):
        t = ins.parts[-1]
        gs = [self.src(o, t) for o in ins.ops[1:]]
        put = self.dst(ins.ops[0], t)

        def ext(v):
            v = v.astype(i64)
            return ((v << 40) >> 40) if t == "s32" else v & 0xFFFFFF

        hi = "hi" in ins.parts
        dt = npdt(t)

        def fn(x, m):
            p = ext(gs[0](x)) * ext(gs[1](x))
            p = (p >> 16) if hi else p
            p = p.astype(dt)
            put(x, m, p if len(gs) == 2 else p + gs[2](x))

        return fn

    c_mad24 = c_mul24

    def c_sad(self, ins):
        t = ins.parts[-1]
        ga, gb, gc = (self.src(o, t) for o in ins.ops[1:])
        put = self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, gc(x) + np.where(ga(x) < gb(x), gb(x) - ga(x), ga(x) - gb(x)))

    def c_dp4a(self, ins):
        ta, tb = self._types(ins.parts)
        ga, gb = self.src(ins.ops[1], "b32"), self.src(ins.ops[2], "b32")
        gc, put = self.src(ins.ops[3], "s32"), self.dst(ins.ops[0], "s32")
        da, db = (i8 if ta[0] == "s" else u8), (i8 if tb[0] == "s" else u8)

        def fn(x, m):
            a = np.atleast_1d(ga(x)).view(da).reshape(-1, 4).astype(i32)
            b = np.atleast_1d(gb(x)).view(db).reshape(-1, 4).astype(i32)
            put(x, m, (a * b).sum(1).astype(i32) + gc(x))

        return fn

    def c_div(self, ins):
        P = ins.parts
        t = P[-1]
        if t in FLOATS:
            return self._fdiv(ins, t)
        d, a, b = ins.ops
        ga, gb, put = self.src(a, t), self.src(b, t), self.dst(d, t)
        return lambda x, m: put(x, m, idivrem(ga(x), gb(x), t)[0])

    def c_rem(self, ins):
        t = ins.parts[-1]
        d, a, b = ins.ops
        ga, gb, put = self.src(a, t), self.src(b, t), self.dst(d, t)
        return lambda x, m: put(x, m, idivrem(ga(x), gb(x), t)[1])

    def c_abs(self, ins):
        t = ins.parts[-1]
        d, a = ins.ops
        if t in FLOATS:
            return self._signop(ins, t, "abs")
        ga, put = self.src(a, t), self.dst(d, t)
        return lambda x, m: put(x, m, np.abs(ga(x)))

    def c_neg(self, ins):
        t = ins.parts[-1]
        d, a = ins.ops
        if t in FLOATS:
            return self._signop(ins, t, "neg")
        ga, put = self.src(a, t), self.dst(d, t)
        return lambda x, m: put(x, m, -ga(x))

    def _signop(self, ins, t, op):
        n = SIZE[t]
        b = f"b{8 * n}"
        ga, put = self.src(ins.ops[1], b), self.dst(ins.ops[0], b)
        k = {
            "f32": 0x80000000,
            "f64": 1 << 63,
            "f16": 0x8000,
            "bf16": 0x8000,
            "f16x2": 0x80008000,
            "bf16x2": 0x80008000,
            "f32x2": 0x8000000080000000,
        }[t]
        k = UDT[n](k)
        z = "ftz" in ins.parts and t == "f32"

        def fn(x, m):
            v = ga(x)
            if z:
                v = ftz(np.atleast_1d(v).view(f32)).view(u32)
            put(x, m, (v ^ k) if op == "neg" else (v & ~k))

        return fn

    def c_copysign(self, ins):
        t = ins.parts[-1]
        ga, gb, put = self.src(ins.ops[1], t), self.src(ins.ops[2], t), self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, np.copysign(gb(x), ga(x)))

    def c_testp(self, ins):
        k, t = ins.parts[1], ins.parts[-1]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "pred")
        f = {
            "finite": np.isfinite,
            "infinite": np.isinf,
            "number": lambda v: ~np.isnan(v),
            "notanumber": np.isnan,
            "normal": lambda v: np.isfinite(v) & (np.abs(v) >= TINY[t]),
            "subnormal": lambda v: (np.abs(v) < TINY[t]) & (v != 0),
        }[k]
        return lambda x, m: put(x, m, f(ga(x)))

    def c_min(self, ins, op="min"):
        P = ins.parts
        t = P[-1]
        if t in FLOATS:
            gs = [self.fsrc(o, t) for o in ins.ops[1:]]
            put = self.fdst(ins.ops[0], t)
            nan, z = "NaN" in P, "ftz" in P
            xs = "xorsign" in P
            bt = X2.get(t, t)

            def two(a, b):
                if z:
                    a, b = ftz(a, bt), ftz(b, bt)
                if xs:
                    sg = np.signbit(a) ^ np.signbit(b)
                    a, b = np.abs(a), np.abs(b)
                if nan:
                    r = np.minimum(a, b) if op == "min" else np.maximum(a, b)
                else:
                    r = np.fmin(a, b) if op == "min" else np.fmax(a, b)
                zz = (a == 0) & (b == 0)
                if np.any(zz):
                    sa, sb = np.signbit(a), np.signbit(b)
                    r = np.where(
                        zz,
                        np.where(
                            (sa | sb) if op == "min" else (sa & sb),
                            r.dtype.type(-0.0),
                            r.dtype.type(0),
                        ),
                        r,
                    )
                if xs:
                    r = np.where(sg, -r, r)
                return r

            def fn(x, m):
                r = two(gs[0](x), gs[1](x))
                for g in gs[2:]:
                    r = two(r, g(x))
                if "relu" in P:
                    r = np.where(r < 0, r.dtype.type(0), r)
                put(x, m, r)

            return fn
        if t in X2:
            gs = [self.fsrc(o, t) for o in ins.ops[1:]]
            put = self.fdst(ins.ops[0], t)
        else:
            gs = [self.src(o, t) for o in ins.ops[1:]]
            put = self.dst(ins.ops[0], t)
        f = np.minimum if op == "min" else np.maximum
        relu = "relu" in P

        def fn(x, m):
            r = f(gs[0](x), gs[1](x))
            for g in gs[2:]:
                r = f(r, g(x))
            put(x, m, np.maximum(r, 0) if relu else r)

        return fn

    def c_max(self, ins):
        return self.c_min(ins, "max")

    # float
    def _fpost(self, P, t):
        sat, relu, z = "sat" in P, "relu" in P, "ftz" in P
        bt = X2.get(t, t)
        if not (sat or relu or z):
            return None

        def post(r):
            if z:
                r = ftz(r, bt)
            if sat:
                r = np.where(np.isnan(r), r.dtype.type(0), np.clip(r, 0, 1))
            if relu:
                r = np.where(r < 0, r.dtype.type(0), r)
            return r

        return post

    def _farith(self, ins, op, t):
        P = ins.parts
        d, a, b = ins.ops
        ta = t
        if len(self._types(P)) == 2:  # add.f32.bf16 d, a, c: a is converted, c and d are f32
            t, ta = self._types(P)
            if t != "f32" or ta not in ("f16", "bf16") or op == "mul":
                raise UnknownInstruction(ins.op)
        ga, gb = self.fsrc(a, ta), self.fsrc(b, t)
        mode = self._mode(P) or "rn"
        bt = X2.get(t, t)
        put = self.fdst(d, t)
        z = "ftz" in P
        post = self._fpost(P, t)
        uf = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
        if mode == "rn":
            if not z and post is None:
                return lambda x, m: put(x, m, uf(ga(x), gb(x)))
            calc = uf
        elif bt == "f32":

            def calc(u, v):
                u, v = u.astype(f64), v.astype(f64)
                return narrow(
                    u * v if op == "mul" else add_odd(u, v if op == "add" else -v), f32, mode
                )
        elif bt == "f64":

            def calc(u, v):
                r, e = two_prod(u, v) if op == "mul" else two_sum(u, v if op == "add" else -v)
                return dir_adjust(r, e, mode)
        else:
            raise UnknownInstruction(ins.op)

        def fn(x, m):
            u, v = ga(x), gb(x)
            if z:
                u, v = ftz(u, bt), ftz(v, bt)
            r = calc(u, v)
            put(x, m, post(r) if post else r)

        return fn

    def c_fma(self, ins):
        P = ins.parts
        t = P[-1]
        d, a, b, c = ins.ops
        ta = t
        if len(self._types(P)) == 2:  # fma.rn.f32.bf16 d, a, b, c: a and b are converted
            t, ta = self._types(P)
            if t != "f32" or ta not in ("f16", "bf16"):
                raise UnknownInstruction(ins.op)
        ga, gb, gc = self.fsrc(a, ta), self.fsrc(b, ta), self.fsrc(c, t)
        mode = self._mode(P) or "rn"
        bt = X2.get(t, t)
        z = "ftz" in P
        post = self._fpost(P, t)
        put = self.fdst(d, t)
        if bt == "f64":

            def fn(x, m):
                u, v, w = ga(x), gb(x), gc(x)
                r = fma64(u, v, w)
                if mode != "rn":
                    p, e = two_prod(u, v)
                    s, e2 = two_sum(p, w)
                    r = dir_adjust(r, (s - r) + (e2 + e), mode)
                put(x, m, post(r) if post else r)

            return fn

        def fn(x, m):
            u, v, w = ga(x), gb(x), gc(x)
            if z:
                u, v, w = ftz(u, bt), ftz(v, bt), ftz(w, bt)
            r = add_odd(u.astype(f64) * v.astype(f64), w.astype(f64))
            if bt == "f32":
                r = narrow(r, f32, mode)
            put(x, m, post(r) if post else r)

        return fn

    def _fdiv(self, ins, t):
        P = ins.parts
        d, a, b = ins.ops
        ga, gb, put = self.fsrc(a, t), self.fsrc(b, t), self.fdst(d, t)
        mode = self._mode(P)
        z = "ftz" in P
        post = self._fpost(P, t)
        approx = "approx" in P
        full = "full" in P

        def fn(x, m):
            u, v = ga(x), gb(x)
            if z:
                u, v = ftz(u, t), ftz(v, t)
            if t == "f32" and mode not in (None, "rn"):
                r = narrow(u.astype(f64) / v.astype(f64), f32, mode)
            elif approx or full:
                r = x.ap(u.astype(f64) / v.astype(f64), 2.0)
                if approx:
                    r = np.where(
                        (np.abs(v) > f32(2.0**126)) & np.isfinite(v),
                        np.where(np.isinf(u), f32(np.nan), np.copysign(f32(0), u * np.sign(v))),
                        r,
                    )
            else:
                r = u / v
            put(x, m, post(r) if post else r)

        return fn

    def _unary(self, ins, f, ulp, floor=0.0):
        P = ins.parts
        t = P[-1]
        d, a = ins.ops
        ga = self.fsrc(a, t)
        mode = self._mode(P)
        bt = X2.get(t, t)
        z = "ftz" in P
        post = self._fpost(P, t)
        put = self.fdst(d, t)
        approx = "approx" in P

        def fn(x, m):
            u = ga(x)
            if z:
                u = ftz(u, bt)
            r = f(u.astype(f64))
            if bt == "f32":
                r = x.ap(r, ulp, floor) if approx else narrow(r, f32, mode or "rn")
            put(x, m, post(r) if post else r)

        return fn

    def c_rcp(self, ins):
        if (
            ins.parts[-1] == "f32"
            and (self._mode(ins.parts) in (None, "rn"))
            and "approx" not in ins.parts
        ):
            return self._exact(ins, lambda u: f32(1) / u)
        return self._unary(ins, lambda v: 1.0 / v, 1.0)

    def c_sqrt(self, ins):
        if (
            ins.parts[-1] == "f32"
            and (self._mode(ins.parts) in (None, "rn"))
            and "approx" not in ins.parts
        ):
            return self._exact(ins, np.sqrt)
        return self._unary(ins, np.sqrt, 1.0)

    def _exact(self, ins, f):
        ga, put = self.fsrc(ins.ops[1], "f32"), self.fdst(ins.ops[0], "f32")
        z = "ftz" in ins.parts

        def fn(x, m):
            u = ga(x)
            r = f(ftz(u) if z else u)
            put(x, m, ftz(r) if z else r)

        return fn

    def c_rsqrt(self, ins):
        return self._unary(ins, lambda v: 1.0 / np.sqrt(v), 2.0)

    def c_ex2(self, ins):
        return self._unary(ins, np.exp2, 2.0)

    def c_lg2(self, ins):
        return self._unary(ins, np.log2, 2.0, 1.0)

    def c_sin(self, ins):
        return self._unary(ins, np.sin, 6.0, 1.0)

    def c_cos(self, ins):
        return self._unary(ins, np.cos, 6.0, 1.0)

    def c_tanh(self, ins):
        return self._unary(ins, np.tanh, 4096.0)

    # comparison and selection
    def _cmp(self, op, t):
        isf = t in FLOATS
        base = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(op, op)
        F = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }
        if not isf:
            return F[base]
        if op == "num":
            return lambda a, b: ~(np.isnan(a) | np.isnan(b))
        if op == "nan":
            return lambda a, b: np.isnan(a) | np.isnan(b)
        if op.endswith("u"):
            f = F[op[:-1]]
            return lambda a, b: f(a, b) | np.isnan(a) | np.isnan(b)
        f = F[base]
        if op == "ne":
            return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
        return f

    def _cmp_setup(self, ins, t):
        P = ins.parts
        d, a, b = ins.ops[:3]
        cop = P[1]
        bop = P[2] if len(P) > 2 and P[2] in ("and", "or", "xor") else None
        if t in FLOATS:
            ga, gb = self.fsrc(a, t), self.fsrc(b, t)
        else:
            tt = t
            if cop in ("lo", "ls", "hi", "hs") and t[0] == "s":
                tt = "u" + t[1:]
            ga, gb = self.src(a, tt), self.src(b, tt)
        c = self._cmp(cop, t)
        z = "ftz" in P
        bt = X2.get(t, t)
        gc = self.src(ins.ops[3], "pred") if len(ins.ops) > 3 else None
        bf = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[bop]

        def val(x):
            u, v = ga(x), gb(x)
            if z:
                u, v = ftz(u, bt), ftz(v, bt)
            return c(u, v)

        return val, gc, bf

    def c_setp(self, ins):
        t = ins.parts[-1]
        val, gc, bf = self._cmp_setup(ins, t)
        d = ins.ops[0]
        if d[0] == "pair":
            p, q = self.dst(d[1], "pred"), self.dst(d[2], "pred")
        else:
            p, q = self.dst(d, "pred"), None
        if t in ("f16x2", "bf16x2"):

            def fn(x, m):
                r = val(x)
                c = gc(x) if gc else None
                a, b = r[:, 0], r[:, 1]
                if bf:
                    a, b = bf(a, c), bf(b, c)
                p(x, m, a)
                q(x, m, b)

            return fn
        if q is None and bf is None:
            return lambda x, m: p(x, m, val(x))

        def fn(x, m):
            r = val(x)
            if bf:
                c = np.array(gc(x))
                p(x, m, bf(r, c))
                if q:
                    q(x, m, bf(~r, c))
            else:
                p(x, m, r)
                q(x, m, ~r)

        return fn

    def c_set(self, ins):
        dt, t = self._types(ins.parts)[-2:]
        val, gc, bf = self._cmp_setup(ins, t)
        if t in X2:
            one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(dt, 0xFFFF)
            put = self.dst(ins.ops[0], "b32")

            def fn(x, m):
                r = val(x)
                if bf:
                    r = bf(r, np.atleast_1d(gc(x))[:, None])
                put(x, m, np.where(r, u16(one), u16(0)).view(u32).reshape(-1))

            return fn
        put = self.dst(ins.ops[0], dt)
        one = {
            "f32": f32(1),
            "f16": f16(1),
            "bf16": u16(0x3F80),
            "u32": u32(0xFFFFFFFF),
            "s32": i32(-1),
            "u16": u16(0xFFFF),
            "s16": i16(-1),
        }[dt]

        def fn(x, m):
            r = val(x)
            if bf:
                r = bf(r, gc(x))
            put(x, m, np.where(r, one, type(one)(0)))

        return fn

    def c_selp(self, ins):
        t = f"b{8 * SIZE[ins.parts[-1]]}"
        d, a, b, c = ins.ops
        if ins.parts[-1] in ("f32", "f64"):
            t = ins.parts[-1]
        ga, gb, gc, put = self.src(a, t), self.src(b, t), self.src(c, "pred"), self.dst(d, t)
        return lambda x, m: put(x, m, np.where(gc(x), ga(x), gb(x)))

    def c_slct(self, ins):
        dt, ct = self._types(ins.parts)[-2:]
        d, a, b, c = ins.ops
        ga, gb, gc, put = self.src(a, dt), self.src(b, dt), self.src(c, ct), self.dst(d, dt)
        return lambda x, m: put(x, m, np.where(gc(x) >= 0, ga(x), gb(x)))

    # logic
    def _logic(self, ins, f):
        t = ins.parts[-1]
        gs = [self.src(o, t) for o in ins.ops[1:]]
        put = self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, f(*[g(x) for g in gs]))

    def c_and(self, ins):
        return self._logic(ins, np.bitwise_and)

    def c_or(self, ins):
        return self._logic(ins, np.bitwise_or)

    def c_xor(self, ins):
        return self._logic(ins, np.bitwise_xor)

    def c_not(self, ins):
        return self._logic(ins, np.invert)

    def c_cnot(self, ins):
        return self._logic(ins, lambda a: (a == 0).astype(np.asarray(a).dtype))

    def c_lop3(self, ins):
        d = ins.ops[0]
        lut = ins.ops[4][1]
        ga, gb, gc = (self.src(o, "b32") for o in ins.ops[1:4])
        pput = None
        if d[0] == "pair":
            put, pput = self.dst(d[1], "b32"), self.dst(d[2], "pred")
            gq = self.src(ins.ops[5], "pred")
            isor = "or" in ins.parts
        else:
            put = self.dst(d, "b32")

        def fn(x, m):
            a, b, c = ga(x), gb(x), gc(x)
            r = u32(0)
            for k in range(8):
                if lut >> k & 1:
                    r = r | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
            put(x, m, r)
            if pput:
                pput(x, m, ((r != 0) | gq(x)) if isor else ((r != 0) & gq(x)))

        return fn

    def c_shl(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, gb, put = self.src(ins.ops[1], t), self.src(ins.ops[2], "u32"), self.dst(ins.ops[0], t)
        dt = npdt(t)
        if ins.ops[2][0] == "i":
            k = ins.ops[2][1]
            c = dt(k) if k < n else None
            return (
                (lambda x, m: put(x, m, ga(x) << c)) if k < n else (lambda x, m: put(x, m, dt(0)))
            )
        return lambda x, m: put(
            x, m, np.where(gb(x) >= n, dt(0), ga(x) << (gb(x) & u32(n - 1)).astype(dt))
        )

    def c_shr(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, gb, put = self.src(ins.ops[1], t), self.src(ins.ops[2], "u32"), self.dst(ins.ops[0], t)
        dt = npdt(t)
        if t[0] == "s":
            return lambda x, m: put(x, m, ga(x) >> np.minimum(gb(x), u32(n - 1)).astype(dt))
        return lambda x, m: put(
            x, m, np.where(gb(x) >= n, dt(0), ga(x) >> (gb(x) & u32(n - 1)).astype(dt))
        )

    def c_shf(self, ins):
        ga, gb, gc, put = (*[self.src(o, "b32") for o in ins.ops[1:]], self.dst(ins.ops[0], "b32"))
        left, wrap = "l" in ins.parts, "wrap" in ins.parts

        def fn(x, m):
            c = gc(x)
            n = ((c & u32(31)) if wrap else np.minimum(c, u32(32))).astype(u64)
            v = (gb(x).astype(u64) << u64(32)) | ga(x).astype(u64)
            put(x, m, (((v << n) >> u64(32)) if left else (v >> n)).astype(u32))

        return fn

    def c_prmt(self, ins):
        ga, gb, gc, put = (*[self.src(o, "b32") for o in ins.ops[1:]], self.dst(ins.ops[0], "b32"))
        mode = ins.parts[2] if len(ins.parts) > 2 else None

        def fn(x, m):
            v = (gb(x).astype(u64) << u64(32)) | ga(x).astype(u64)
            c = gc(x).astype(u64)
            r = u64(0)
            for k in range(4):
                if mode is None:
                    s = (c >> u64(4 * k)) & u64(15)
                else:
                    q = c & u64(3)
                    if mode == "f4e":
                        s = q + u64(k)
                    elif mode == "b4e":
                        s = (q - u64(k)) & u64(7)
                    elif mode == "rc8":
                        s = q
                    elif mode == "ecl":
                        s = np.maximum(q, u64(k))
                    elif mode == "ecr":
                        s = np.minimum(q, u64(k))
                    elif mode == "rc16":
                        s = (q & u64(1)) * u64(2) + u64(k & 1)
                    else:
                        raise UnknownInstruction(ins.op)
                b = (v >> ((s & u64(7)) * u64(8))) & u64(255)
                if mode is None:
                    b = np.where(s & u64(8), np.where(b & u64(128), u64(255), u64(0)), b)
                r = r | (b << u64(8 * k))
            put(x, m, r.astype(u32))

        return fn

    def c_bfe(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga = self.src(ins.ops[1], f"u{n}")
        gb, gc, put = (
            self.src(ins.ops[2], "u32"),
            self.src(ins.ops[3], "u32"),
            self.dst(ins.ops[0], f"u{n}"),
        )
        sg = t[0] == "s"

        def fn(x, m):
            a = ga(x).astype(u64)
            pos, ln = (gb(x) & u32(255)).astype(u64), (gc(x) & u32(255)).astype(u64)
            eff = np.where(pos >= n, u64(0), np.minimum(ln, u64(n) - np.minimum(pos, u64(n))))
            mask = lowmask(eff)
            d = shr64(a, pos) & mask
            if sg:
                sp = np.minimum(pos + ln - u64(1), u64(n - 1))
                sb = (shr64(a, sp) & u64(1)).astype(bool) & (ln != 0)
                d = np.where(sb, d | ~mask, d)
            put(x, m, d.astype(UDT[n // 8]))

        return fn

    def c_bfi(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, gb = self.src(ins.ops[1], t), self.src(ins.ops[2], t)
        gc, gd, put = (
            self.src(ins.ops[3], "u32"),
            self.src(ins.ops[4], "u32"),
            self.dst(ins.ops[0], t),
        )

        def fn(x, m):
            pos, ln = (gc(x) & u32(255)).astype(u64), (gd(x) & u32(255)).astype(u64)
            mask = shl64(lowmask(np.minimum(ln, u64(64))), pos)
            d = (gb(x).astype(u64) & ~mask) | (shl64(ga(x).astype(u64), pos) & mask)
            put(x, m, d.astype(UDT[n // 8]))

        return fn

    def c_bmsk(self, ins):
        ga, gb, put = (
            self.src(ins.ops[1], "u32"),
            self.src(ins.ops[2], "u32"),
            self.dst(ins.ops[0], "b32"),
        )
        wrap = "wrap" in ins.parts

        def fn(x, m):
            a, b = ga(x).astype(u64), gb(x).astype(u64)
            if wrap:
                a, b = a & u64(31), b & u64(31)
            put(x, m, shl64(lowmask(np.minimum(b, u64(32))), np.minimum(a, u64(32))).astype(u32))

        return fn

    def c_szext(self, ins):
        t = ins.parts[-1]
        ga, gb, put = (
            self.src(ins.ops[1], "u32"),
            self.src(ins.ops[2], "u32"),
            self.dst(ins.ops[0], "b32"),
        )
        wrap = "wrap" in ins.parts

        def fn(x, m):
            a, n = ga(x).astype(u64), gb(x).astype(u64)
            n = n & u64(31) if wrap else np.minimum(n, u64(32))
            mask = lowmask(n)
            r = a & mask
            if t == "s32":
                sb = (shr64(a, np.maximum(n, u64(1)) - u64(1)) & u64(1)).astype(bool) & (n > 0)
                r = np.where(sb, r | ~mask, r)
            put(x, m, r.astype(u32))

        return fn

    def c_popc(self, ins):
        t = ins.parts[-1]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "u32")
        return lambda x, m: put(x, m, popc(ga(x)))

    def c_clz(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "u32")
        return lambda x, m: put(x, m, u32(n) - bitlen(ga(x)))

    def c_bfind(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "u32")
        sh = "shiftamt" in ins.parts

        def fn(x, m):
            a = ga(x)
            if t[0] == "s":
                a = np.where(a < 0, ~a, a).astype(UDT[n // 8])
            l = bitlen(a)
            r = l - u32(1)
            if sh:
                r = np.where(l == 0, u32(0xFFFFFFFF), u32(n - 1) - r)
            put(x, m, r)

        return fn

    def c_brev(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        dt = npdt(t)

        def fn(x, m):
            a = ga(x)
            r = dt(0)
            for k in range(n):
                r = r | (((a >> dt(k)) & dt(1)) << dt(n - 1 - k))
            put(x, m, r)

        return fn

    # conversion
    def c_cvt(self, ins):
        P = ins.parts
        ty = [p for p in P[1:] if p in SIZE or p in ("e4m3", "e5m2")]
        dt, st = ty[0], ty[1]
        if len(ty) > 2 or "pack" in P or "rs" in P:
            raise UnknownInstruction(ins.op)
        mode = self._mode(P)
        imode = next((p for p in P if p in ("rni", "rzi", "rmi", "rpi")), None)
        z, sat, relu, satf = "ftz" in P, "sat" in P, "relu" in P, "satfinite" in P
        d = ins.ops[0]
        irnd = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, None: None}[imode]

        def clampf(v, t):
            if relu:
                v = np.where(v < 0, v.dtype.type(0), v)
            if satf:
                v = np.where(np.isnan(v), v, np.clip(v, -MAXF[t], MAXF[t]))
            if sat:
                v = np.where(np.isnan(v), v.dtype.type(0), np.clip(v, 0, 1))
            return v

        # packed destinations: cvt.rn.f16x2.f32 d, a, b : a -> high half, b -> low half
        if dt in ("f16x2", "bf16x2") and st == "f32":
            b = X2[dt]
            ga, gb, put = (
                self.fsrc(ins.ops[1], "f32"),
                self.fsrc(ins.ops[2], "f32"),
                self.fdst(d, dt, mode or "rn"),
            )

            def fn(x, m):
                v = np.stack(
                    np.broadcast_arrays(np.atleast_1d(gb(x)), np.atleast_1d(ga(x))), 1
                ).astype(f64)
                put(x, m, clampf(v, b))

            return fn
        if dt in ("e4m3x2", "e5m2x2"):
            kind = dt[:4]
            put = self.dst(d, "b16")
            if st == "f32":
                ga, gb = self.fsrc(ins.ops[1], "f32"), self.fsrc(ins.ops[2], "f32")

                def fn(x, m):
                    hi, lo = fp8_encode(clampr(ga(x)), kind), fp8_encode(clampr(gb(x)), kind)
                    put(x, m, (hi.astype(u16) << u16(8)) | lo)
            else:
                ga = self.fsrc(ins.ops[1], st)

                def fn(x, m):
                    v = fp8_encode(clampr(ga(x)), kind)
                    put(x, m, (v[:, 1].astype(u16) << u16(8)) | v[:, 0])

            def clampr(v):
                return np.where(v < 0, 0, v) if relu else v

            return fn
        if st in ("e4m3x2", "e5m2x2"):
            kind = st[:4]
            ga, put = self.src(ins.ops[1], "b16"), self.fdst(d, dt)

            def fn(x, m):
                a = np.atleast_1d(ga(x))
                put(x, m, fp8_decode(np.stack([a & u16(255), a >> u16(8)], 1), kind))

            return fn
        if dt == "tf32":
            ga, put = self.src(ins.ops[1], "b32"), self.dst(d, "b32")

            def fn(x, m):
                a = ga(x)
                v = np.atleast_1d(a).view(f32)
                r = (
                    (a + u32(0x1000)) & u32(0xFFFFE000)
                    if mode == "rna"
                    else (a + u32(0xFFF) + ((a >> u32(13)) & u32(1))) & u32(0xFFFFE000)
                    if mode == "rn"
                    else a & u32(0xFFFFE000)
                )
                r = np.where(np.isnan(v), u32(0x7FFFFFFF), np.where(np.isinf(v), a, r))
                put(x, m, np.where(v < 0, u32(0), r) if relu else r)

            return fn
        if dt in X2 or st in X2:
            raise UnknownInstruction(ins.op)
        df, sf = dt in FLOATS, st in FLOATS
        if not sf and not df:  # int -> int
            ga, put = self.src(ins.ops[1], st), self.dst(d, dt)
            if sat:
                info = np.iinfo(npdt(dt))
                src_info = np.iinfo(npdt(st))
                lo, hi = max(info.min, src_info.min), min(info.max, src_info.max)
                nd = npdt(dt)
                return lambda x, m: put(x, m, np.clip(ga(x), npdt(st)(lo), npdt(st)(hi)).astype(nd))
            nd = npdt(dt)
            return lambda x, m: put(x, m, ga(x).astype(nd))
        if not sf and df:  # int -> float
            ga = self.src(ins.ops[1], st)
            put = self.fdst(d, dt, mode or "rn")
            md = mode or "rn"

            def fn(x, m):
                a = ga(x)
                if dt == "f64":
                    v = a.astype(f64)
                    if md != "rn":
                        v = np.asarray(narrow_ld(a, f64, md))
                elif SIZE[st] == 8:
                    v = (
                        a.astype(f32)
                        if md == "rn" and dt == "f32"
                        else narrow_ld(a, f32 if dt == "f32" else f64, md)
                    )
                else:
                    v = a.astype(f64)
                    if dt == "f32":
                        v = narrow(v, f32, md)
                put(x, m, clampf(v, dt) if sat else v)

            return fn
        if sf and not df:  # float -> int (saturating, NaN -> 0)
            ga, put = self.fsrc(ins.ops[1], st), self.dst(d, dt)
            nd = npdt(dt)
            info = np.iinfo(nd)
            r_ = irnd or np.trunc

            def fn(x, m):
                v = ga(x)
                if z and st == "f32":
                    v = ftz(v)
                v = r_(v.astype(f64))
                big, small = (
                    v >= float(info.max) + (1.0 if info.max < 2**53 else 0),
                    v <= float(info.min),
                )
                ok = np.where(big | small | np.isnan(v), 0.0, v).astype(nd)
                put(x, m, np.where(big, nd(info.max), np.where(small, nd(info.min), ok)))

            return fn
        ga, put = self.fsrc(ins.ops[1], st), self.fdst(d, dt, mode or "rn")

        def fn(x, m):
            v = ga(x)
            if z and st == "f32":
                v = ftz(v)
            if irnd:
                v = irnd(v)
            if sat or relu or satf:
                v = clampf(v, dt)
            if dt == "f32" and st == "f64":
                v = narrow(v, f32, mode or "rn")
            elif dt in ("f16", "bf16"):
                v = v.astype(f64) if st == "f64" or mode not in (None, "rn") or dt == "f16" else v
            if z and dt == "f32":
                v = ftz(np.asarray(v, f32))
            put(x, m, v)

        return fn

    # memory
    def c_ld(self, ins):
        P = ins.parts
        t = self._types(P)[-1]
        d, a = ins.ops[0], ins.ops[1]
        if t == "b128":
            raise UnknownInstruction(ins.op)
        ds = d[1] if d[0] == "v" else [d]
        n = SIZE[t]
        sp = self.mem_space(P, a)
        puts = [self.dsti(e, t) for e in ds]
        nv = len(ds)
        if sp == "param" and a[1][0] == "var" and a[1][1].space == "param":
            off = a[1][1].addr + a[1][2] + a[2]
            if off + n * nv > self.param_size:
                raise ParseError("ld.param outside the parameters")
            ud = UDT[n]
            pf = [self.dst(e, t) for e in ds]
            dt = npdt(t)

            def fn(x, m):
                for k, p in enumerate(pf):
                    p(x, m, x.pbuf.arr[off + k * n : off + (k + 1) * n].view(dt)[0])

            return fn
        if sp in ("shared", None):
            self.min_sh = min(self.min_sh, n)
        if sp in ("global", None):
            self.min_gl = min(self.min_gl, n)
        g = self.mem(a)

        def fn(x, m):
            idx = None if m is None else np.flatnonzero(m)
            vs = x.load(sp, idx, g(x, idx), n, nv, ins)
            for p, v in zip(puts, vs):
                p(x, idx, v)

        return fn

    c_ldu = c_ld

    def c_st(self, ins):
        P = ins.parts
        if "async" in P or "bulk" in P:
            raise UnknownInstruction(ins.op)
        t = self._types(P)[-1]
        a, s = ins.ops[0], ins.ops[1]
        ss = s[1] if s[0] == "v" else [s]
        n = SIZE[t]
        ut = f"b{8 * n}"
        sp = self.mem_space(P, a)
        if sp == "param":
            sp = "local"
        if sp in ("shared", None):
            self.min_sh = min(self.min_sh, n)
        if sp in ("global", None):
            self.min_gl = min(self.min_gl, n)
        gs = [self.src(e, t if e[0] in "id" else ut) for e in ss]
        g = self.mem(a)
        ud = UDT[n]

        def fn(x, m):
            idx = None if m is None else np.flatnonzero(m)
            ad = g(x, idx)
            vals = []
            for q in gs:
                v = np.asarray(q(x))
                v = np.broadcast_to(v, x.T) if v.ndim == 0 else v
                v = v if idx is None else v[idx]
                vals.append(np.ascontiguousarray(v).view(ud))
            x.store(sp, idx, ad, n, vals, ins)

        return fn

    def c_cp(self, ins):
        P = ins.parts
        if P[1] != "async" or "bulk" in P or "mbarrier" in P:
            raise UnknownInstruction(ins.op)
        if P[2] == "commit_group":
            return lambda x, m: x.cp_commit(m)
        if P[2] in ("wait_group", "wait_all"):
            keep = ins.ops[0][1] if P[2] == "wait_group" else -1
            return lambda x, m: x.cp_wait(m, keep)
        gd, gs = self.mem(ins.ops[0]), self.mem(ins.ops[1])
        n = ins.ops[2][1]
        hint = "L2::cache_hint" in ins.op
        rest = ins.ops[3:]
        if hint:
            rest = rest[:-1]
        gz = None
        if rest:
            if rest[0][0] == "r" and rest[0][1].type == "pred" or rest[0][0] == "n":
                gp = self.src(rest[0], "pred")
                gz = lambda x: np.where(gp(x), u32(0), u32(n))
            else:
                gz = self.src(rest[0], "u32")
        e = 8 if n >= 8 else 4
        k = n // e
        self.min_gl = min(self.min_gl, 1 if gz else e)
        self.min_sh = min(self.min_sh, e)

        def fn(x, m):
            idx = np.arange(x.T) if m is None else np.flatnonzero(m)
            da, sa = gd(x, idx), gs(x, idx)
            if gz is None:
                vals = x.load("global", idx, sa, e, k, ins)
            else:
                z = np.broadcast_to(np.asarray(gz(x)), x.T)[idx]
                out = np.zeros((len(idx), n), u8)
                for size in np.unique(z):
                    if size:
                        w = np.flatnonzero(z == size)
                        b = x.load("global", idx[w], sa[w], 1, int(size), ins)
                        for j in range(int(size)):
                            out[w, j] = b[j]
                vals = [
                    np.ascontiguousarray(out[:, j * e : (j + 1) * e]).view(UDT[e]).reshape(-1)
                    for j in range(k)
                ]
            x.cp_issue(idx, da, e, vals, ins)

        return fn

    def c_atom(self, ins, red=False):
        P = ins.parts
        t = self._types(P)[-1]
        if t == "b128":
            raise UnknownInstruction(ins.op)
        op = next(
            p
            for p in P[1:]
            if p in ("add", "min", "max", "and", "or", "xor", "cas", "exch", "inc", "dec")
        )
        if red:
            d, rest = None, ins.ops
        else:
            d, rest = ins.ops[0], ins.ops[1:]
        a, b = rest[0], rest[1]
        vb = b[1] if b[0] == "v" else [b]
        vd = None if d is None else (d[1] if d[0] == "v" else [d])
        n = SIZE[t]
        sp = self.mem_space(P, a)
        if sp in ("shared", None):
            self.min_sh = min(self.min_sh, n)
        if sp in ("global", None):
            self.min_gl = min(self.min_gl, n)
        ut = f"b{8 * n}"
        gb = [self.src(e, t if e[0] in "id" and t not in X2 else ut) for e in vb]
        gc = self.src(rest[2], ut) if op == "cas" else None
        g = self.mem(a)
        puts = None if vd is None else [self.dsti(e, ut) for e in vd]
        ud = UDT[n]
        comb = atomic_fn(op, t)

        def fn(x, m):
            idx = np.arange(x.T) if m is None else np.flatnonzero(m)
            ad = g(x, idx)

            def get(q):
                v = np.asarray(q(x))
                v = np.broadcast_to(v, x.T) if v.ndim == 0 else v
                return np.ascontiguousarray(v[idx]).view(ud)

            c = get(gc) if gc else None
            for k, q in enumerate(gb):
                old = x.atomic(sp, idx, ad + u64(k * n) if k else ad, n, get(q), c, comb, ins)
                if puts:
                    puts[k](x, idx, old)

        return fn

    def c_red(self, ins):
        if "async" in ins.parts:
            raise UnknownInstruction(ins.op)
        return self.c_atom(ins, True)

    # barriers
    def c_bar(self, ins):
        P = ins.parts
        if "warp" in P:
            ins.kind = K_WARP
            ins.aux = self.src(ins.ops[0], "b32")

            def fn(x, m):
                x.warp_sync(m)

            return fn
        kind = next((p for p in P[1:] if p in ("sync", "arrive", "red")), None)
        if kind is None or "cluster" in P:
            raise UnknownInstruction(ins.op)
        ins.kind = K_BAR
        ops = ins.ops
        if kind == "red":
            rop = next(p for p in P if p in ("popc", "and", "or"))
            dst = self.dst(ops[0], "u32" if rop == "popc" else "pred")
            pr = self.src(ops[-1], "pred")
            bid = self.src(ops[1], "u32")
            cnt = self.src(ops[2], "u32") if len(ops) == 4 else None
            ins.aux = ("red", bid, cnt, rop, dst, pr)
        else:
            bid = self.src(ops[0], "u32") if ops else (lambda x: u32(0))
            cnt = self.src(ops[1], "u32") if len(ops) > 1 else None
            ins.aux = (kind, bid, cnt)

    c_barrier = c_bar

    # warp-level
    def c_shfl(self, ins):
        P = ins.parts
        sync = "sync" in P
        mode = P[2] if sync else P[1]
        d, a, b, c = ins.ops[:4]
        pput = None
        if d[0] == "pair":
            put, pput = self.dst(d[1], "b32"), self.dst(d[2], "pred")
        else:
            put = self.dst(d, "b32")
        ga, gb, gc = self.src(a, "b32"), self.src(b, "u32"), self.src(c, "u32")
        if sync:
            ins.kind = K_WARP
            ins.aux = self.src(ins.ops[4], "b32")

        def fn(x, m):
            lane = x.lane
            bv, cv = (gb(x).astype(i64) & 31), gc(x).astype(i64)
            seg, cl = (cv >> 8) & 31, cv & 31
            mn = lane & seg
            mx = mn | (cl & ~seg)
            if mode == "up":
                j = lane - bv
                p = j >= mx
            elif mode == "down":
                j = lane + bv
                p = j <= mx
            elif mode == "bfly":
                j = lane ^ bv
                p = j <= mx
            elif mode == "idx":
                j = mn | (bv & ~seg)
                p = j <= mx
            else:
                raise UnknownInstruction(ins.op)
            j = np.where(p, j, lane) + x.wbase
            a = np.asarray(ga(x))
            a = np.broadcast_to(a, x.T) if a.ndim == 0 else a
            r = a[j]
            if m is not None:
                bad = ~m[j] & m
                nb = np.count_nonzero(bad)
                if nb:
                    x.warn(f"shfl reads an inactive or exited lane: {ins!r}", nb)
                    r = np.where(m[j], r, u32(0x7FFFDEAD))
            if sync:
                mm = np.asarray(ins.aux(x))
                if mm.ndim or int(mm) != 0xFFFFFFFF:
                    out = ((mm >> (j & 31).astype(u32)) & u32(1)) == 0
                    out = out if m is None else out & m
                    if out.any():
                        x.warn(
                            f"shfl reads a lane outside its membermask: {ins!r}",
                            np.count_nonzero(out),
                        )
                        r = np.where(out, u32(0x7FFFDEAD), r)
            put(x, m, r)
            if pput:
                pput(x, m, p)

        return fn

    def c_vote(self, ins):
        P = ins.parts
        sync = "sync" in P
        mode = next(p for p in P if p in ("all", "any", "uni", "ballot"))
        d, a = ins.ops[:2]
        ga = self.src(a, "pred")
        put = self.dst(d, "b32" if mode == "ballot" else "pred")
        if sync:
            ins.kind = K_WARP
            ins.aux = self.src(ins.ops[2], "b32")

        def fn(x, m):
            act, spread, rows = x.group(m, ins)
            p = rows(ga(x))
            if mode == "ballot":
                r = bits32(p & act)
            elif mode == "any":
                r = (p & act).any(1)
            elif mode == "all":
                r = (p | ~act).all(1)
            else:
                r = (p | ~act).all(1) | (~p | ~act).all(1)
            put(x, m, spread(r))

        return fn

    def c_activemask(self, ins):
        put = self.dst(ins.ops[0], "b32")

        def fn(x, m):
            act = (np.ones(x.T, bool) if m is None else m).reshape(-1, 32)
            put(x, m, np.repeat(bits32(act), 32))

        return fn

    def c_elect(self, ins):
        d = ins.ops[0]
        pd, pp = (d[1], d[2]) if d[0] == "pair" else (("_",), d)
        put, pput = self.dst(pd, "b32"), self.dst(pp, "pred")
        ins.kind = K_WARP
        ins.aux = self.src(ins.ops[1], "b32")

        def fn(x, m):
            act, spread, rows = x.group(m, ins)
            first = spread(act.argmax(1))
            put(x, m, first.astype(u32))
            pput(x, m, x.lane == first)

        return fn

    def c_match(self, ins):
        P = ins.parts
        t = P[-1]
        d = ins.ops[0]
        if d[0] == "pair":
            put, pput = self.dst(d[1], "b32"), self.dst(d[2], "pred")
        else:
            put, pput = self.dst(d, "b32"), None
        ga = self.src(ins.ops[1], t)
        ins.kind = K_WARP
        ins.aux = self.src(ins.ops[2], "b32")
        allm = "all" in P

        def fn(x, m):
            act, spread, rows = x.group(m, ins)
            own = np.broadcast_to(np.asarray(ga(x)), x.T)
            act = spread(act)  # one row a lane
            eq = (np.repeat(own.reshape(-1, 32), 32, axis=0) == own[:, None]) & act
            if allm:
                ok = (eq | ~act).all(1)
                put(x, m, np.where(ok, bits32(act), u32(0)))
                if pput:
                    pput(x, m, ok)
            else:
                put(x, m, bits32(eq))

        return fn

    def c_redux(self, ins):
        P = ins.parts
        t = P[-1]
        op = next(p for p in P if p in ("add", "min", "max", "and", "or", "xor"))
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        ins.kind = K_WARP
        ins.aux = self.src(ins.ops[2], "b32")
        ab, nan = "abs" in P, "NaN" in P

        def fn(x, m):
            act, spread, rows = x.group(m, ins)
            a = rows(ga(x))
            a = np.abs(a) if ab else a
            if t == "f32":
                f = {"min": np.minimum if nan else np.fmin, "max": np.maximum if nan else np.fmax}[
                    op
                ]
                idn = f32(np.inf if op == "min" else -np.inf)
            else:
                f = {
                    "add": np.add,
                    "min": np.minimum,
                    "max": np.maximum,
                    "and": np.bitwise_and,
                    "or": np.bitwise_or,
                    "xor": np.bitwise_xor,
                }[op]
                inf = np.iinfo(a.dtype)
                idn = a.dtype.type(
                    {"min": inf.max, "max": inf.min, "and": -1 if inf.min < 0 else inf.max}.get(
                        op, 0
                    )
                )
            v = np.where(act, a, idn)
            r = f.reduce(v, axis=1, dtype=v.dtype)
            put(x, m, spread(r))

        return fn

    # tensor-core mma and ldmatrix (fragments of the PTX ISA, f16/bf16/tf32 inputs)
    def c_ldmatrix(self, ins):
        P = ins.parts
        num = {"x1": 1, "x2": 2, "x4": 4}[next(p for p in P if p in ("x1", "x2", "x4"))]
        if "m8n8" not in P or P[-1] != "b16":
            raise UnknownInstruction(ins.op)
        tr = "trans" in P
        ds = ins.ops[0][1] if ins.ops[0][0] == "v" else [ins.ops[0]]
        puts = [self.dst(o, "b32") for o in ds]
        g = self.mem(ins.ops[1])
        self.min_sh = min(self.min_sh, 2)
        ins.kind = K_WARP
        full = u32(0xFFFFFFFF)
        ins.aux = lambda x: full

        def fn(x, m):
            ad = g(x, None).reshape(-1, 32)
            w = np.arange(x.T // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
            for k in range(num):
                rows = ad[w, 8 * k : 8 * k + 8]  # row addresses
                idx = (w[:, None] * 32 + 8 * k + np.arange(8)).reshape(-1)
                v = np.stack(x.load("shared", idx, rows.reshape(-1), 2, 8, ins), 1).reshape(
                    len(w), 8, 8
                )
                if tr:
                    v = v.transpose(0, 2, 1)
                out = np.zeros((x.T // 32, 32), u32)
                l = np.arange(32)
                lo, hi = v[:, l // 4, 2 * (l % 4)], v[:, l // 4, 2 * (l % 4) + 1]
                out[w] = lo.astype(u32) | (hi.astype(u32) << u32(16))
                puts[k](x, m, out.reshape(-1))

        return fn

    def c_stmatrix(self, ins):
        P = ins.parts
        num = {"x1": 1, "x2": 2, "x4": 4}[next(p for p in P if p in ("x1", "x2", "x4"))]
        if "m8n8" not in P or P[-1] != "b16":
            raise UnknownInstruction(ins.op)
        tr = "trans" in P
        ss = ins.ops[1][1] if ins.ops[1][0] == "v" else [ins.ops[1]]
        gs = [self.src(o, "b32") for o in ss]
        g = self.mem(ins.ops[0])
        self.min_sh = min(self.min_sh, 2)
        ins.kind = K_WARP
        full = u32(0xFFFFFFFF)
        ins.aux = lambda x: full
        l = np.arange(32)

        def fn(x, m):
            ad = g(x, None).reshape(-1, 32)
            w = np.arange(x.T // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
            for k in range(num):
                r = np.broadcast_to(np.asarray(gs[k](x)), x.T).reshape(-1, 32)[w]
                v = np.zeros((len(w), 8, 8), u16)
                v[:, l // 4, 2 * (l % 4)] = (r & u32(0xFFFF)).astype(u16)
                v[:, l // 4, 2 * (l % 4) + 1] = (r >> u32(16)).astype(u16)
                if tr:
                    v = v.transpose(0, 2, 1)
                idx = (w[:, None] * 32 + 8 * k + np.arange(8)).reshape(-1)
                flat = np.ascontiguousarray(v).reshape(-1, 8)
                x.store(
                    "shared",
                    idx,
                    ad[w, 8 * k : 8 * k + 8].reshape(-1),
                    2,
                    [np.ascontiguousarray(flat[:, j]) for j in range(8)],
                    ins,
                )

        return fn

    def c_mma(self, ins):
        P = ins.parts
        shp = next((p for p in P if re.match(r"^m\d+n\d+k\d+$", p)), None)
        dt, at, bt, ct = [p for p in P[1:] if p in SIZE][-4:]
        if (
            shp not in ("m16n8k16", "m16n8k8")
            or at != bt
            or at not in ("f16", "bf16", "tf32")
            or any(p.startswith(("sp", "kind")) for p in P)
            or "row" not in P
        ):
            raise UnknownInstruction(ins.op)
        if at != "tf32" and shp == "m16n8k8" or at == "tf32" and shp != "m16n8k8":
            if at == "tf32":
                raise UnknownInstruction(ins.op)
        Kd = int(shp.split("k")[1])
        D, A, B, C = (o[1] for o in ins.ops)
        l = np.arange(32)
        gid, tig = l // 4, l % 4
        ga = [self.src(o, "b32") for o in A]
        gb = [self.src(o, "b32") for o in B]

        def half(v):
            v = np.ascontiguousarray(np.broadcast_to(np.asarray(v), (v.size,)))
            return (v.view(f16).astype(f32) if at == "f16" else bf2f(v.view(u16))).reshape(
                -1, 32, 2
            )

        if ct == "f32":
            gc = [self.src(o, "f32") for o in C]
        else:
            gc = [self.src(o, "b32") for o in C]
        pd = [self.dst(o, "f32" if dt == "f32" else "b32") for o in D]
        ins.kind = K_WARP
        full = u32(0xFFFFFFFF)
        ins.aux = lambda x: full

        def bc(x, g):
            return np.broadcast_to(np.asarray(g(x)), x.T)

        def fn(x, m):
            W = x.T // 32
            Am, Bm, Cm = (
                np.zeros((W, 16, Kd), f64),
                np.zeros((W, Kd, 8), f64),
                np.zeros((W, 16, 8), f64),
            )
            if at == "tf32":
                for i, g in enumerate(ga):
                    v = np.ascontiguousarray(bc(x, g) & u32(0xFFFFE000)).view(f32).reshape(W, 32)
                    Am[:, gid + 8 * (i & 1), tig + 4 * (i >> 1)] = v
                for i, g in enumerate(gb):
                    Bm[:, tig + 4 * i, gid] = (
                        np.ascontiguousarray(bc(x, g) & u32(0xFFFFE000)).view(f32).reshape(W, 32)
                    )
            else:
                for i, g in enumerate(ga):
                    v = half(bc(x, g))
                    for e in range(2):
                        Am[:, gid + 8 * (i & 1), 2 * tig + e + 8 * (i >> 1)] = v[:, :, e]
                for i, g in enumerate(gb):
                    v = half(bc(x, g))
                    for e in range(2):
                        Bm[:, 2 * tig + e + 8 * i, gid] = v[:, :, e]
            if ct == "f32":
                for i, g in enumerate(gc):
                    Cm[:, gid + 8 * (i >> 1), 2 * tig + (i & 1)] = bc(x, g).reshape(W, 32)
            else:
                for i, g in enumerate(gc):
                    v = np.ascontiguousarray(bc(x, g)).view(f16).reshape(W, 32, 2)
                    for e in range(2):
                        Cm[:, gid + 8 * i, 2 * tig + e] = v[:, :, e]
            R = Am @ Bm + Cm
            if dt == "f32":
                for i, p in enumerate(pd):
                    p(x, m, R[:, gid + 8 * (i >> 1), 2 * tig + (i & 1)].astype(f32).reshape(-1))
            else:
                for i, p in enumerate(pd):
                    v = np.stack(
                        [R[:, gid + 8 * i, 2 * tig], R[:, gid + 8 * i, 2 * tig + 1]], 2
                    ).astype(f16)
                    p(x, m, np.ascontiguousarray(v).view(u32).reshape(-1))

        return fn


# ---------------------------------------------------------------- integer helpers
def mulhi(a, b, t):
    n = SIZE[t]
    if n <= 4:
        wd = SDT[2 * n] if t[0] == "s" else UDT[2 * n]
        return ((a.astype(wd) * b.astype(wd)) >> wd(8 * n)).astype(npdt(t))
    ua, ub = np.atleast_1d(a).view(u64), np.atleast_1d(b).view(u64)
    M = u64(0xFFFFFFFF)
    S = u64(32)
    al, ah, bl, bh = ua & M, ua >> S, ub & M, ub >> S
    ll, lh, hl, hh = al * bl, al * bh, ah * bl, ah * bh
    mid = (ll >> S) + (lh & M) + (hl & M)
    r = hh + (lh >> S) + (hl >> S) + (mid >> S)
    if t[0] == "s":
        r = (
            r
            - np.where(np.atleast_1d(a) < 0, ub, u64(0))
            - np.where(np.atleast_1d(b) < 0, ua, u64(0))
        )
    return r.view(npdt(t))


def idivrem(a, b, t):
    dt = npdt(t)
    if t[0] != "s":
        z = b == 0
        bb = np.where(z, dt(1), b)
        q = a // bb
        return np.where(z, ~dt(0), q), np.where(z, a, a - q * bb)
    ud = UDT[SIZE[t]]
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    ua = np.where(a < 0, ud(0) - a.view(ud), a.view(ud))
    ub = np.where(b < 0, ud(0) - b.view(ud), b.view(ud))
    z = ub == 0
    ub1 = np.where(z, ud(1), ub)
    q = ua // ub1
    r = ua - q * ub1
    q = np.where((a < 0) ^ (b < 0), ud(0) - q, q)
    r = np.where(a < 0, ud(0) - r, r)
    return np.where(z, dt(-1), q.view(dt)), np.where(z, a, r.view(dt))


def shl64(a, n):
    return np.where(n >= u64(64), u64(0), a << (n & u64(63)))


def shr64(a, n):
    return np.where(n >= u64(64), u64(0), a >> (n & u64(63)))


def lowmask(n):
    return np.where(n >= u64(64), ~u64(0), (u64(1) << (n & u64(63))) - u64(1))


def popc(a):
    a = np.atleast_1d(a)
    b = np.ascontiguousarray(a).view(u8).reshape(a.size, -1)
    return POP8[b].sum(1).astype(u32)


POP8 = np.array([bin(i).count("1") for i in range(256)], u32)


def bitlen(a):
    a = np.atleast_1d(a)
    v = a.view(UDT[a.itemsize]).astype(u64)
    r = np.zeros(a.shape, u32)
    for s in (32, 16, 8, 4, 2, 1):
        h = v >> u64(s)
        k = h != 0
        r = r + np.where(k, u32(s), u32(0))
        v = np.where(k, h, v)
    return r + (v != 0).astype(u32)


B32 = u64(1) << np.arange(32, dtype=u64)


def bits32(b):
    """(W,32) bool -> (W,) uint32"""
    return (b * B32).sum(1, dtype=u64).astype(u32)


def dir_adjust(r, e, mode):
    if mode == "rz":
        k = (e != 0) & ((e > 0) != (r > 0))
        return np.where(k, np.nextafter(r, 0.0), r)
    if mode == "rm":
        return np.where(e < 0, np.nextafter(r, -np.inf), r)
    if mode == "rp":
        return np.where(e > 0, np.nextafter(r, np.inf), r)
    return r


def narrow_ld(a, dt, mode):
    v = np.asarray(a).astype(np.longdouble)
    r = v.astype(dt)
    if mode == "rn":
        return r
    r2 = r.astype(np.longdouble)
    if mode == "rz":
        return np.where(np.abs(r2) > np.abs(v), np.nextafter(r, dt(0)), r)
    if mode == "rm":
        return np.where(r2 > v, np.nextafter(r, dt(-np.inf)), r)
    return np.where(r2 < v, np.nextafter(r, dt(np.inf)), r)


def atomic_fn(op, t):
    """comb(old_raw, b_raw, c_raw) -> new_raw, all unsigned raw arrays"""
    n = SIZE[t]
    ud = UDT[n]
    if op == "exch":
        return lambda o, b, c: b
    if op == "cas":
        return lambda o, b, c: np.where(o == b, c, o)
    if op in ("and", "or", "xor"):
        f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
        return lambda o, b, c: f(o, b)
    if op == "inc":
        return lambda o, b, c: np.where(o >= b, ud(0), o + ud(1))
    if op == "dec":
        return lambda o, b, c: np.where((o == 0) | (o > b), b, o - ud(1))
    bt = X2.get(t, t)
    if bt in ("f16", "bf16"):
        dec = (lambda v: v.view(f16).astype(f32)) if bt == "f16" else (lambda v: bf2f(v.view(u16)))
        enc = (lambda v: v.astype(f16)) if bt == "f16" else f2bf
        f = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]
        return lambda o, b, c: np.ascontiguousarray(enc(f(dec(o), dec(b)))).view(ud)
    dt = npdt(bt)
    if op == "add":
        return lambda o, b, c: (o.view(dt) + b.view(dt)).view(ud)
    f = (
        np.fmin
        if op == "min" and bt[0] == "f"
        else np.fmax
        if bt[0] == "f"
        else np.minimum
        if op == "min"
        else np.maximum
    )
    return lambda o, b, c: f(o.view(dt), b.view(dt)).view(ud)


# ---------------------------------------------------------------- statistics
class Stats(dict):
    """dict with attribute access; str() gives a summary"""

    def __getattr__(self, k):
        try:
            return self[k]
        except KeyError:
            raise AttributeError(k)

    def __str__(self):
        g, s = self["global"], self["shared"]
        o = [
            f"{self['kernel']} grid={self['grid']} block={self['block']} time={self['seconds']:.2f}s",
            f"  thread instructions {self['thread_instructions']:,}  warp instructions {self['warp_instructions']:,}",
            "  by class (warp): " + ", ".join(f"{k} {v:,}" for k, v in self["by_class"].items()),
            f"  global: read {g['bytes_read']:,} B (unique {g['unique_read']:,}), written {g['bytes_written']:,} B (unique {g['unique_written']:,}), "
            f"sectors r/w {g['sectors_read']:,}/{g['sectors_written']:,}, atomics {g['atomics']:,}",
            f"  shared: {s['size']} B/block, loads {s['loads']:,} stores {s['stores']:,} (thread), bytes {s['bytes_read']:,}/{s['bytes_written']:,}, "
            f"uninitialised reads {s['uninit_reads']:,}; barriers {self['barriers']:,} (block-level)",
        ]
        for p in self["params"]:
            o.append(
                f"    arg {p['arg']}: {p['nbytes']:,} B, unique read {p['unique_read']:,}, unique written {p['unique_written']:,}"
            )
        for k, v in self["warnings"].items():
            o.append(f"  WARNING x{v}: {k}")
        for r in self["races"][:5]:
            o.append(f"  RACE: {r}")
        for r in self["global_races"][:5]:
            o.append(f"  GLOBAL RACE?: {r}")
        return "\n".join(o)


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


# ---------------------------------------------------------------- launch
RUN, BARW, WARPW, DONE = 0, 1, 2, 3
STRONG = {
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "mmio",
}  # accesses meant for inter-thread communication


def _as_bytes(a):
    """numpy array or torch CPU tensor -> flat uint8 view sharing memory"""
    if not isinstance(a, np.ndarray):
        import torch

        t = a.detach()
        if t.device.type != "cpu":
            raise PTXError("tensor arguments must be on the CPU")
        if not t.is_contiguous():
            raise PTXError("tensor argument is not contiguous")
        if t.numel() == 0:
            return np.zeros(0, u8)
        return t.reshape(-1).view(torch.uint8).numpy()
    if not a.flags.c_contiguous:
        raise PTXError("array argument is not C-contiguous")
    return a.reshape(-1).view(u8)


def _is_array(a):
    return (isinstance(a, np.ndarray) and a.ndim > 0) or (
        hasattr(a, "data_ptr") and hasattr(a, "is_contiguous")
    )


class Launch:
    def __init__(
        self,
        mod,
        prog,
        grid,
        block,
        args,
        shared_bytes,
        race="raise",
        race_mode="value",
        strict_barrier=True,
        approx_ulp=0.0,
        seed=0,
        max_lanes=8192,
        max_steps=20_000_000,
        schedule="lockstep",
        atom_order="lane",
        shared_limit=232448,
        bank=False,
        poison=0xFF,
        trace=None,
        cp_async="deferred",
        race_global="record",
    ):
        """race: 'raise' | 'record' | None; race_mode: 'value' (only when the values differ) | 'strict'
        approx_ulp: 0 = approximate functions are exact-rounded, k = random relative error of k times the documented ulps
        schedule: 'lockstep' (all warps together, lowest pc first) | 'warp' (one random warp at a time, to expose races)
        atom_order: 'lane' | 'random';  bank: count shared-memory wavefronts;  trace: file-like, prints each executed instruction"""
        tup = lambda v: (
            tuple(int(k) for k in (v if hasattr(v, "__len__") else (v,)))
            + (1,) * (3 - (len(v) if hasattr(v, "__len__") else 1))
        )
        self.mod, self.prog, self.grid, self.block = mod, prog, tup(grid), tup(block)
        self.race, self.race_mode, self.strict = race, race_mode, strict_barrier
        self.approx_ulp, self.rng = approx_ulp, np.random.default_rng(seed)
        self.max_steps, self.schedule, self.atom_order, self.bank, self.poison, self.trace = (
            max_steps,
            schedule,
            atom_order,
            bank,
            poison,
            trace,
        )
        bx, by, bz = self.block
        self.tpb = bx * by * bz
        if not 1 <= self.tpb <= 1024:
            raise PTXError(f"block of {self.tpb} threads")
        if prog.reqntid:
            r = tuple(prog.reqntid) + (1,) * (3 - len(prog.reqntid))
            if r != self.block:
                raise PTXError(f"kernel requires block {r} (.reqntid), got {self.block}")
        if prog.maxntid and self.tpb > np.prod(prog.maxntid):
            raise PTXError(f"block of {self.tpb} threads exceeds .maxntid {prog.maxntid}")
        self.lpb = -(-self.tpb // 32) * 32
        self.dyn = int(shared_bytes)
        self.smem_size = (
            prog.dyn_base + self.dyn
            if (self.dyn or any(v.extern or v.size == 0 for v in prog.shared_vars))
            else prog.static_shared
        )
        if self.smem_size > shared_limit:
            raise PTXError(f"shared memory {self.smem_size} B exceeds the limit {shared_limit}")
        self.cp_sync = cp_async == "sync"
        self.race_global = race_global
        self.max_lanes = max_lanes
        self.bufs = dict(mod.mbufs)
        for b in self.bufs.values():
            b.rd = b.wr = None
        self.arg_bufs = []
        self._bind(args)
        self.cnt_t = np.zeros(len(prog.code), np.int64)
        self.cnt_w = np.zeros(len(prog.code), np.int64)
        self.warnings, self.races, self.graces = {}, [], []
        self.steps = 0
        self.g = dict(
            bytes_read=0,
            bytes_written=0,
            loads=0,
            stores=0,
            sectors_read=0,
            sectors_written=0,
            atomics=0,
        )
        self.s = dict(
            size=self.smem_size,
            loads=0,
            stores=0,
            bytes_read=0,
            bytes_written=0,
            uninit_reads=0,
            atomics=0,
            wavefronts=0,
        )
        self.local_bytes = 0
        self.barriers = 0

    # ---- arguments
    def _bind(self, args):
        prog = self.prog
        args = list(args)
        if len(args) > len(prog.params):
            raise PTXError(f"{prog.name} takes {len(prog.params)} parameters, got {len(args)}")
        pb = np.zeros(-(-prog.param_size // 16) * 16, u8)
        arrays = []
        for k, a in enumerate(args):
            p = prog.params[k]
            arr = a.arr if isinstance(a, Ptr) else a
            if _is_array(arr) and not (
                isinstance(arr, np.ndarray) and p.type == "b8" and p.size == arr.nbytes
            ):
                b = _as_bytes(arr)
                arrays.append((b.size, b.__array_interface__["data"][0], b, k))
        slot = max([0] + list(self.bufs)) + 1
        where = {}
        placed = []
        for n, ptr, b, k in sorted(arrays, key=lambda e: -e[0]):
            hit = None
            for q0, q1, buf in placed:
                if n and q0 <= ptr and ptr + n <= q1:
                    hit = (buf, ptr - q0)
                    break
                if n and not (ptr + n <= q0 or ptr >= q1):
                    raise PTXError("array arguments overlap partially in memory")
            if hit is None:
                buf = Buffer(b, slot_base(slot), f"arg{k}")
                self.bufs[slot] = buf
                slot += 1
                placed.append((ptr, ptr + n, buf))
                hit = (buf, 0)
            where[k] = hit
        for k, p in enumerate(prog.params):
            n = p.size
            if k >= len(args) or args[k] is None:
                if p.size != 8 and k >= len(args):
                    raise PTXError(f"argument {k} ({p.name}, .{p.type}) missing")
                continue  # null pointer: e.g. the scratch pointers that Triton appends
            a = args[k]
            if k in where:
                buf, off = where[k]
                if n != 8:
                    raise PTXError(f"argument {k} ({p.name}) is .{p.type}, got an array")
                o = off + (a.offset if isinstance(a, Ptr) else 0)
                raw = (buf.base + o).to_bytes(8, "little")
                self.arg_bufs.append((k, buf, where[k][0].n if off == 0 else None))
            elif isinstance(a, (bytes, bytearray)):
                raw = bytes(a)
            elif isinstance(a, np.ndarray) and a.ndim > 0:
                raw = a.tobytes()
            elif isinstance(a, np.generic) and not isinstance(a, np.bool_) and p.type[0] == "b":
                raw = a.tobytes()
            elif p.type in ("f16", "f32", "f64"):
                raw = npdt(p.type)(a).tobytes()
            elif isinstance(a, (float, np.floating)):
                raw = (
                    f32(a).tobytes() if n == 4 else f64(a).tobytes() if n == 8 else f16(a).tobytes()
                )
            elif isinstance(a, (int, np.integer, bool, np.bool_)):
                raw = (int(a) & ((1 << 8 * n) - 1)).to_bytes(n, "little")
            elif hasattr(a, "item"):
                a = a.item()
                raw = (
                    (f32(a).tobytes() if n == 4 else f64(a).tobytes())
                    if isinstance(a, float)
                    else (int(a) & ((1 << 8 * n) - 1)).to_bytes(n, "little")
                )
            else:
                raise PTXError(
                    f"argument {k} ({p.name}, .{p.type}): {type(a).__name__} not understood"
                )
            if len(raw) != n:
                raise PTXError(f"argument {k} ({p.name}) has {n} bytes, got {len(raw)}")
            pb[p.addr : p.addr + n] = np.frombuffer(raw, u8)
        self.pbuf = Buffer(pb, 0, "param")

    # ---- running
    def go(self):
        import time

        t0 = time.time()
        nb = int(np.prod(self.grid))
        if nb < 1:
            raise PTXError("empty grid")
        regbytes = sum(max(r.size, 1) for r in self.prog.regs) or 1
        lanes = min(self.max_lanes, max(self.lpb, int(1e9) // regbytes))
        per = max(1, lanes // self.lpb)
        if self.schedule == "warp":
            per = 1
        with np.errstate(all="ignore"):
            for b0 in range(0, nb, per):
                self._batch(b0, min(per, nb - b0))
        return self._stats(time.time() - t0)

    def _batch(self, b0, nb):
        p = self.prog
        T = self.T = nb * self.lpb
        self.nb, self.b0 = nb, b0
        self.R = []
        for r in p.regs:
            if r.type == "pred":
                self.R.append(np.zeros(T, bool))
            else:
                self.R.append(np.full(T, (1 << 8 * r.size) - 1, UDT[r.size]))  # poison: NaN / -1
        self.V = [self.R[i] if dt == np.bool_ else self.R[i].view(dt) for i, dt in p.slots]
        l = np.arange(T)
        self.tid = l % self.lpb
        self.blk = l // self.lpb
        self.lane = (self.tid % 32).astype(i64)
        self.wbase = (l - l % 32).astype(i64)
        self.warp = l // 32
        self.sr = {}
        self.cc = np.zeros(T, bool)
        S = self.S = max(16, -(-self.smem_size // 16) * 16)
        self.smem = Buffer(np.full(nb * S, self.poison, u8), 0, "shared")
        L = self.L = p.local_size
        self.lmem = Buffer(np.full(T * L, self.poison, u8), 0, "local") if L else None
        self.sh_init = np.zeros(nb * S, bool)
        self.epoch = np.zeros(nb, i32)  # block barrier interval
        self.wep = np.zeros(T // 32, i32)  # warp sync interval
        if self.race:
            g = self.gr = p.min_sh
            n = nb * S // g
            self.w_t = np.full(n, -1, i32)
            self.w_e = np.full(n, -1, i32)
            self.w_we = np.zeros(n, i32)
            self.w_chg = np.zeros(n, bool)
            self.w_at = np.zeros(n, bool)
            self.r_t = np.full(n, -1, i32)
            self.r_e = np.full(n, -1, i32)
            self.r_we = np.zeros(n, i32)
            self.r_mt = np.zeros(n, bool)
            self.r_mw = np.zeros(n, bool)
            self.pend = np.zeros(n, i32)
        self.cpq, self.cpg = [], np.zeros(T, i32)
        self.pc = np.zeros(T, i32)
        self.state = np.where(self.tid < self.tpb, RUN, DONE).astype(i8)
        self.real = self.tid < self.tpb
        self.barid = np.full(T, -1, i32)
        self.arrived = {}
        self._run()

    def _run(self):
        code, V, T = self.prog.code, self.V, self.T
        pc, state = self.pc, self.state
        nsched = 0
        curwarp = None
        while True:
            runnable = state == RUN
            if not runnable.any():
                if (state == DONE).all():
                    return
                self._blocked()
                continue
            nsched += 1
            if self.schedule == "warp":
                ws = np.flatnonzero(runnable.reshape(-1, 32).any(1))
                if curwarp not in ws:
                    curwarp = self.rng.choice(ws)
                sel = np.zeros(T, bool)
                sel[curwarp * 32 : curwarp * 32 + 32] = True
                runnable = runnable & sel
            eff = np.where(runnable, pc, BIG)
            cur = int(eff.min())
            if nsched > 20000 and nsched % 16 == 0:  # fairness, for spin loops
                cur = int(self.rng.choice(np.unique(eff[runnable])))
            m = eff == cur
            nact = int(np.count_nonzero(m))
            if nact == T:
                m, nxt, nwarp = None, BIG, T // 32
            else:
                rest = eff[~m & (eff > cur)]
                nxt = int(rest.min()) if rest.size else BIG
                low = eff[eff < cur]
                if low.size:
                    nxt = min(nxt, cur + 200)
                nwarp = int(np.count_nonzero(m.reshape(-1, 32).any(1)))
            start = cur
            back = 0
            while True:
                if cur >= nxt:
                    self._count(start, cur, nact, nwarp)
                    if m is None:
                        pc[:] = cur
                    else:
                        pc[m] = cur
                    break
                ins = code[cur]
                k = ins.kind
                if self.trace:
                    print(f"{cur} [{nact}] {ins.text}", file=self.trace)
                if ins.pslot is None:
                    pm, np_ = m, nact
                else:
                    pm = V[ins.pslot]
                    pm = ~pm if ins.neg else pm.copy()
                    if m is not None:
                        pm &= m
                    np_ = int(np.count_nonzero(pm))
                    if np_ == T:
                        pm = None
                if k == K_RUN:
                    if np_:
                        ins.fn(self, pm)
                    cur += 1
                    continue
                self._count(start, cur + 1, nact, nwarp)
                if k == K_BRA:
                    if np_ == nact:
                        if ins.target <= cur:
                            back += 1
                            if (
                                back > 5000 and nact < T
                            ):  # maybe spinning on what other threads must do
                                nsched = max(nsched, 20000)
                                pc[m] = ins.target
                                break
                        cur = start = ins.target
                        continue
                    if np_ == 0:
                        cur += 1
                        start = cur
                        continue
                    if m is None:
                        pc[:] = cur + 1
                    else:
                        pc[m] = cur + 1
                    pc[pm] = ins.target
                    break
                if np_ == 0:
                    cur += 1
                    start = cur
                    continue
                if k == K_EXIT:
                    if m is None:
                        pc[:] = cur + 1
                    else:
                        pc[m] = cur + 1
                    if pm is None:
                        state[:] = DONE
                    else:
                        state[pm] = DONE
                    break
                if k == K_WARP:
                    if self._warp_ready(ins, pm, cur):
                        ins.fn(self, pm)
                        cur += 1
                        start = cur
                        continue
                    # some lanes of some warps have not arrived
                    if m is None:
                        pc[:] = cur + 1
                    else:
                        pc[m] = cur + 1
                    self._warp_split(ins, pm, cur)
                    break
                if k == K_BAR:
                    live = int(np.count_nonzero(state != DONE))
                    if np_ == live and np_ == nact and ins.aux[0] == "sync" and ins.aux[2] is None:
                        b = np.asarray(ins.aux[1](self))
                        if b.ndim == 0:
                            self._release(
                                np.arange(self.nb)
                                if live == T
                                else np.unique(self.blk[state != DONE]),
                                ins,
                            )
                            cur += 1
                            start = cur
                            continue
                    if m is None:
                        pc[:] = cur + 1
                    else:
                        pc[m] = cur + 1
                    self._barrier(ins, pm, cur)
                    break
                if k == K_BRX:
                    i = np.broadcast_to(np.asarray(ins.aux(self)), T).astype(np.int64)
                    i = np.clip(i, 0, len(ins.target) - 1)
                    if m is None:
                        pc[:] = cur + 1
                    else:
                        pc[m] = cur + 1
                    tgt = ins.target[i]
                    if pm is None:
                        pc[:] = tgt
                    else:
                        pc[pm] = tgt[pm]
                    break

    def _count(self, a, b, nact, nwarp):
        if b > a:
            self.cnt_t[a:b] += nact
            self.cnt_w[a:b] += nwarp
            self.steps += b - a
            if self.steps > self.max_steps:
                raise StepLimit(
                    f"{self.steps} group steps executed (max_steps); endless loop near {self.prog.code[b - 1]!r}?"
                )

    # ---- blocks / warps
    def who(self, lane):
        b = self.b0 + int(self.blk[lane])
        t = int(self.tid[lane])
        bx, by, _ = self.block
        gx, gy, _ = self.grid
        return f"block ({b % gx},{b // gx % gy},{b // gx // gy}) thread ({t % bx},{t // bx % by},{t // bx // by})"

    def first(self, m):
        return 0 if m is None else int(np.flatnonzero(m)[0])

    def warn(self, msg, n=1):
        self.warnings[msg] = self.warnings.get(msg, 0) + int(n)

    def group(self, m, ins):
        """participating lanes of a warp-level instruction: (rows,32) bool, spread(result), rows(values).
        One row a warp where the membermask is uniform in the warp, else one row a lane."""
        act = (np.ones(self.T, bool) if m is None else m).reshape(-1, 32)
        rep = lambda r: np.repeat(r, 32, axis=0)
        one = lambda v: np.broadcast_to(np.asarray(v), self.T).reshape(-1, 32)
        if ins.kind != K_WARP or ins.aux is None:
            return act, rep, one
        mm = np.asarray(ins.aux(self))
        if mm.ndim == 0:
            return act & ((int(mm) >> np.arange(32)) & 1).astype(bool), rep, one
        a = np.where(act, mm.reshape(-1, 32), u32(0))
        top = a.max(1)
        if ((a == top[:, None]) | ~act).all():
            return (
                act & ((top[:, None] >> np.arange(32, dtype=u32)) & u32(1)).astype(bool),
                rep,
                one,
            )
        G = act[:, None, :] & ((a[:, :, None] >> np.arange(32, dtype=u32)) & u32(1)).astype(bool)
        return G.reshape(-1, 32), (lambda r: r), (lambda v: np.repeat(one(v), 32, axis=0))

    def _warp_ready(self, ins, pm, cur):
        if pm is None:
            return True
        act = pm.reshape(-1, 32)
        live = (self.state != DONE).reshape(-1, 32)
        mm = np.asarray(ins.aux(self))
        if mm.ndim == 0:
            need = ((int(mm) >> np.arange(32)) & 1).astype(bool)[None, :] & act.any(1)[:, None]
            if (act & ~((int(mm) >> np.arange(32)) & 1).astype(bool)[None, :]).any():
                raise BarrierError(
                    f"a lane executes {ins!r} but is not in its membermask: {self.who(self.first(pm))}"
                )
        else:
            q = np.where(act, mm.reshape(-1, 32), u32(0))
            own = (q >> np.arange(32, dtype=u32)[None, :]) & u32(1)
            if (act & (own == 0)).any():
                raise BarrierError(
                    f"a lane executes {ins!r} but is not in its membermask: {self.who(int(np.flatnonzero((act & (own == 0)).reshape(-1))[0]))}"
                )
            orm = np.bitwise_or.reduce(q, axis=1)
            need = ((orm[:, None] >> np.arange(32, dtype=u32)[None, :]) & u32(1)).astype(bool)
        return not (need & live & ~act).any()

    def _warp_split(self, ins, pm, cur):
        """the lanes pm stand at the warp-synchronous instruction cur; execute the warps that are complete, others wait"""
        T = self.T
        pmf = np.ones(T, bool) if pm is None else pm
        cand = pmf | ((self.state == WARPW) & (self.pc == cur))
        act = cand.reshape(-1, 32)
        live = (self.state != DONE).reshape(-1, 32)
        mm = np.broadcast_to(np.asarray(ins.aux(self)), T).reshape(-1, 32)
        q = np.where(act, mm, u32(0))
        orm = np.bitwise_or.reduce(q, axis=1)
        need = ((orm[:, None] >> np.arange(32, dtype=u32)[None, :]) & u32(1)).astype(bool)
        # a lane may go when all live lanes named by its own mask are candidates
        missing = live & ~act
        miss = bits32(missing)
        ok = act & ((q & miss[:, None]) == 0)
        ok = ok.reshape(-1)
        wait = cand & ~ok
        self.state[wait] = WARPW
        self.pc[wait] = cur
        if ok.any():
            self.state[ok] = RUN
            ins.fn(self, ok)
            self.pc[ok] = cur + 1

    def warp_sync(self, m):
        w = np.arange(self.T // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
        self.wep[w] += 1

    def _release(self, blocks, ins):
        self.epoch[blocks] += 1
        self.barriers += len(blocks)
        if (self.state == DONE)[self.real].any():
            dead = ((self.state == DONE) & self.real).reshape(self.nb, -1)[blocks].any(1)
            if dead.any():
                if self.strict:
                    raise BarrierError(
                        f"barrier divergence: threads had exited before the barrier {ins!r} (strict_barrier=False to allow)"
                    )
                self.warn(f"threads had exited before the barrier {ins!r}", int(dead.sum()))

    def _barrier(self, ins, pm, cur):
        T = self.T
        pmf = np.ones(T, bool) if pm is None else pm
        kind = ins.aux[0]
        bid = np.broadcast_to(np.asarray(ins.aux[1](self)), T).astype(i32)
        cnt = (
            None
            if ins.aux[2] is None
            else np.broadcast_to(np.asarray(ins.aux[2](self)), T).astype(np.int64)
        )
        if kind == "arrive":
            for l in np.flatnonzero(pmf):
                k = (int(self.blk[l]), int(bid[l]))
                self.arrived[k] = self.arrived.get(k, 0) + 1
        else:
            self.state[pmf] = BARW
            self.pc[pmf] = cur
            self.barid[pmf] = bid[pmf]
        live = self.state != DONE
        for b in np.unique(self.blk[pmf]):
            sl = slice(b * self.lpb, (b + 1) * self.lpb)
            wt, lv = self.state[sl] == BARW, live[sl]
            if cnt is not None:
                for i in np.unique(bid[sl][pmf[sl]]):
                    w = wt & (self.barid[sl] == i)
                    need = int(cnt[sl][pmf[sl] & (bid[sl] == i)][0])
                    have = int(w.sum()) + self.arrived.get((int(b), int(i)), 0)
                    if have >= need:
                        self.arrived.pop((int(b), int(i)), None)
                        self._free(b, sl, w)
                continue
            if (wt == lv).all():
                self._free(b, sl, wt)

    def _free(self, b, sl, w):
        pcs = np.unique(self.pc[sl][w])
        ids = np.unique(self.barid[sl][w])
        if len(ids) > 1:
            raise BarrierError(
                f"barrier divergence in block {self.b0 + b}: threads wait at different barriers: "
                + "; ".join(
                    f"{int((self.pc[sl][w] == q).sum())} threads at {self.prog.code[q]!r}"
                    for q in pcs
                )
            )
        if len(pcs) > 1 and self.strict:
            raise BarrierError(
                f"barrier divergence in block {self.b0 + b}: "
                + "; ".join(
                    f"{int((self.pc[sl][w] == q).sum())} threads at {self.prog.code[q]!r}"
                    for q in pcs
                )
            )
        for q in pcs:
            ins = self.prog.code[q]
            if ins.aux[0] == "red":
                _, _, _, rop, dst, pr = ins.aux
                full = np.zeros(self.T, bool)
                full[sl] = w
                p = np.broadcast_to(np.asarray(pr(self)), self.T)[full]
                v = (
                    u32(p.sum())
                    if rop == "popc"
                    else np.bool_(p.all() if rop == "and" else p.any())
                )
                dst(self, full, v)
        self.pc[sl][w] += 1
        self.state[sl][w] = RUN
        self._release(np.array([b]), self.prog.code[pcs[0]])

    def _blocked(self):
        """nothing can run: an exit may have completed a barrier or a warp-level instruction; otherwise deadlock"""
        done = False
        for q in np.unique(self.pc[self.state == WARPW]):
            before = self.state.copy()
            w = (self.state == WARPW) & (self.pc == q)
            self._warp_split(self.prog.code[q], w, int(q))
            done |= bool((before != self.state).any())
        for b in range(self.nb):
            sl = slice(b * self.lpb, (b + 1) * self.lpb)
            st = self.state[sl]
            wt = st == BARW
            if (
                wt.any()
                and (wt == (st != DONE)).all()
                and all(self.prog.code[q].aux[2] is None for q in np.unique(self.pc[sl][wt]))
            ):
                self._free(b, sl, wt)
                done = True
        if not done:
            w = np.flatnonzero(self.state != DONE)
            pcs = np.unique(self.pc[w])
            raise BarrierError(
                "deadlock: no thread can run: "
                + "; ".join(
                    f"{int((self.pc[w] == q).sum())} threads (first {self.who(int(w[self.pc[w] == q][0]))}) wait at {self.prog.code[q]!r}"
                    for q in pcs
                )
            )

    # ---- special registers
    def sreg(self, name):
        v = self.sr.get(name)
        if v is not None:
            return v
        parts = name.split(".")
        base, ax = parts[0], {"x": 0, "y": 1, "z": 2}.get(parts[1] if len(parts) > 1 else "x", 3)
        bx, by, bz = self.block
        gx, gy, gz = self.grid
        b = self.b0 + self.blk
        if base == "%tid":
            v = [self.tid % bx, self.tid // bx % by, self.tid // (bx * by), self.tid * 0][ax]
        elif base in ("%ctaid", "%clusterid"):
            v = [b % gx, b // gx % gy, b // (gx * gy), b * 0][ax]
        elif base == "%ntid":
            v = np.asarray((bx, by, bz, 1)[ax])
        elif base in ("%nctaid", "%nclusterid"):
            v = np.asarray((gx, gy, gz, 1)[ax])
        elif base == "%laneid":
            v = self.lane
        elif base == "%warpid":
            v = self.tid // 32
        elif base == "%nwarpid":
            v = np.asarray(self.lpb // 32)
        elif base == "WARP_SZ":
            v = np.asarray(32)
        elif base.startswith("%lanemask_"):
            one = np.left_shift(1, self.lane)
            k = base[10:]
            v = {
                "eq": one,
                "lt": one - 1,
                "le": 2 * one - 1,
                "ge": 0xFFFFFFFF & ~(one - 1),
                "gt": 0xFFFFFFFF & ~(2 * one - 1),
            }[k]
        elif base.startswith("%clock") or base.startswith("%globaltimer"):
            return np.asarray(self.steps)
        elif base == "%dynamic_smem_size":
            v = np.asarray(self.dyn)
        elif base in ("%total_smem_size", "%aggr_smem_size"):
            v = np.asarray(self.smem_size)
        elif base in ("%cluster_nctarank", "%cluster_nctaid", "%nsmid"):
            v = np.asarray(1)
        elif base in (
            "%smid",
            "%gridid",
            "%cluster_ctarank",
            "%cluster_ctaid",
            "%is_explicit_cluster",
            "%current_graph_exec",
        ) or re.match(r"%(envreg|pm)", base):
            v = np.asarray(0)
        else:
            raise UnknownInstruction("special register " + name)
        self.sr[name] = v = np.asarray(v)
        return v

    def ap(self, v, ulps, floor=0.0):
        """result of an approximate instruction: exactly rounded, or with a random error of the documented size
        (ulps * 2**-23 relative; the error is absolute below |v| = floor)"""
        r = v.astype(f32)
        if self.approx_ulp:
            n = self.rng.uniform(-1, 1, np.shape(v)) * (ulps * self.approx_ulp * 2.0**-23)
            r = np.where(
                np.isfinite(r) & (r != 0), (v + n * np.maximum(np.abs(v), floor)).astype(f32), r
            )
        return r

    # ---- memory
    def _oob(self, kind, lanes, addr, k, size, ins, what):
        a = int(addr[k])
        lane = int(lanes[k])
        raise OutOfBounds(
            f"{what}: {size}-byte {kind} at address {a:#x} by {self.who(lane)} at {ins!r}"
        )

    def _lanes(self, idx):
        return np.arange(self.T) if idx is None else idx

    def _place(self, sp, idx, addr, size, ins, kind):
        """-> list of (selection or None, Buffer, byte offsets in it, space)"""
        if sp in (None, "global", "const"):
            sl = addr >> u64(SLOT)
            s0 = sl[0]
            if (sl == s0).all():
                return [self._place1(sp, int(s0), None, idx, addr, size, ins, kind)]
            out = []
            for s in np.unique(sl):
                w = np.flatnonzero(sl == s)
                out.append(self._place1(sp, int(s), w, idx, addr, size, ins, kind))
            return out
        return [self._window(sp, None, idx, addr, size, ins, kind)]

    def _place1(self, sp, s, w, idx, addr, size, ins, kind):
        a = addr if w is None else addr[w]
        if sp is None and s in (SH_SLOT, LO_SLOT, PA_SLOT):
            name = {SH_SLOT: "shared", LO_SLOT: "local", PA_SLOT: "param"}[s]
            return self._window(name, w, idx, a - u64(WIN[name]), size, ins, kind)
        buf = self.bufs.get(s)
        lanes = self._lanes(idx)
        lanes = lanes if w is None else lanes[w]
        if buf is None:
            self._oob(kind, lanes, a, 0, size, ins, "access to no buffer (null or wild pointer)")
        off = a - u64(buf.base)
        bad = off > u64(buf.n - size) if buf.n >= size else np.ones(off.shape, bool)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            self._oob(
                kind,
                lanes,
                a,
                k,
                size,
                ins,
                f"out of bounds of {buf.name} ({buf.n} bytes) at byte offset {int(off[k].view(i64))} ({int(bad.sum())} threads)",
            )
        if size > 1 and (a & u64(size - 1)).any():
            k = int(np.flatnonzero(a & u64(size - 1))[0])
            raise Misaligned(
                f"misaligned {size}-byte {kind} at offset {int(off[k])} of {buf.name} by {self.who(int(lanes[k]))} at {ins!r}"
            )
        return (w, buf, off, "global")

    def _window(self, name, w, idx, a, size, ins, kind):
        lanes = self._lanes(idx)
        lanes = lanes if w is None else lanes[w]
        n = {"shared": self.smem_size, "local": self.L, "param": self.prog.param_size}[name]
        bad = a > u64(n - size) if n >= size else np.ones(a.shape, bool)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            self._oob(
                kind,
                lanes,
                a,
                k,
                size,
                ins,
                f"out of bounds of {name} memory ({n} bytes, {int(bad.sum())} threads)",
            )
        if size > 1 and (a & u64(size - 1)).any():
            k = int(np.flatnonzero(a & u64(size - 1))[0])
            raise Misaligned(
                f"misaligned {size}-byte {kind} at {name} address {int(a[k]):#x} by {self.who(int(lanes[k]))} at {ins!r}"
            )
        if name == "shared":
            return (w, self.smem, a + (self.blk[lanes] * self.S).astype(u64), "shared")
        if name == "local":
            return (w, self.lmem, a + (lanes * self.L).astype(u64), "local")
        return (w, self.pbuf, a, "param")

    def _sectors(self, lanes, addr):
        key = (addr >> u64(5)) + ((lanes >> 5).astype(u64) << u64(44))
        d = key[1:] != key[:-1]
        if key.size > 1 and (key[1:] < key[:-1]).any():
            return len(np.unique(key))
        return 1 + int(np.count_nonzero(d))

    def _wavefronts(self, lanes, off, size):
        ph = max(1, size // 4)
        grp = (lanes >> 5) * ph + (lanes & 31) // (32 // ph)
        words = off >> u64(2)
        tot = 0
        reps = max(1, size // 4)
        key = np.unique(
            np.concatenate([(grp.astype(u64) << u64(32)) + words + u64(k) for k in range(reps)])
        )
        gb = ((key >> u64(32)) << u64(5)) | (key & u64(31))
        g, c = np.unique(gb, return_counts=True)
        gg = g >> u64(5)
        mx = np.zeros(int(gg.max()) + 1, np.int64)
        np.maximum.at(mx, gg.astype(np.int64), c)
        return int(mx.sum())

    def load(self, sp, idx, addr, n, nv, ins):
        size = n * nv
        pl = self._place(sp, idx, addr, size, ins, "load")
        cnt = addr.size
        outs = None if len(pl) == 1 else [np.empty(cnt, UDT[n]) for _ in range(nv)]
        for w, buf, off, space in pl:
            e = off // u64(n)
            vs = [buf.v[n][e + u64(k) if k else e] for k in range(nv)]
            lanes = self._lanes(idx)
            lanes = lanes if w is None else lanes[w]
            if space == "global":
                self.g["bytes_read"] += size * off.size
                self.g["loads"] += off.size
                self.g["sectors_read"] += self._sectors(lanes, off + u64(buf.base))
                if self.race_global and not STRONG.intersection(ins.parts):
                    self._g_read(buf, lanes, off, size, ins)
                if size in (1, 2, 4, 8, 16, 32):
                    buf.mark("rd", off, size)
                else:
                    for k in range(nv):
                        buf.mark("rd", off + u64(k * n), n)
            elif space == "shared":
                self.s["loads"] += off.size
                self.s["bytes_read"] += size * off.size
                if self.bank:
                    self.s["wavefronts"] += self._wavefronts(lanes, off, size)
                self._sh_read(lanes, off, size, ins)
            elif space == "local":
                self.local_bytes += size * off.size
            if outs is None:
                return vs
            for o, v in zip(outs, vs):
                o[w] = v
        return outs

    def store(self, sp, idx, addr, n, vals, ins):
        nv = len(vals)
        size = n * nv
        for w, buf, off, space in self._place(sp, idx, addr, size, ins, "store"):
            lanes = self._lanes(idx)
            lanes = lanes if w is None else lanes[w]
            vv = vals if w is None else [v[w] for v in vals]
            e = off // u64(n)
            if space == "global":
                if sp == "const" or buf.arr.flags.writeable is False:
                    raise OutOfBounds(f"store to read-only {buf.name} at {ins!r}")
                self.g["bytes_written"] += size * off.size
                self.g["stores"] += off.size
                self.g["sectors_written"] += self._sectors(lanes, off + u64(buf.base))
                if self.race_global and not STRONG.intersection(ins.parts):
                    self._g_write(buf, lanes, off, n, vv, ins)
                if size in (1, 2, 4, 8, 16, 32):
                    buf.mark("wr", off, size)
                else:
                    for k in range(nv):
                        buf.mark("wr", off + u64(k * n), n)
            elif space == "shared":
                self.s["stores"] += off.size
                self.s["bytes_written"] += size * off.size
                if self.bank:
                    self.s["wavefronts"] += self._wavefronts(lanes, off, size)
                self._sh_write(lanes, off, n, vv, ins)
            elif space == "local":
                self.local_bytes += size * off.size
            elif space == "param":
                raise OutOfBounds(f"store to parameter space at {ins!r}")
            for k in range(nv):
                buf.v[n][e + u64(k) if k else e] = vv[k]

    # cp.async: the data arrive at the wait (cp_async='sync' makes the copy at once)
    def cp_issue(self, idx, da, e, vals, ins):
        if self.cp_sync:
            return self.store("shared", idx, da, e, vals, ins)
        ((_, _, off, _),) = self._place("shared", idx, da, e * len(vals), ins, "cp.async")
        if self.race:
            cell, k = self._gran(off, e * len(vals))
            t = np.repeat(idx, k).astype(i32)
            rd = (self.r_e[cell] == self.epoch[self.blk[t]]) & (
                (self.r_t[cell] != t) | self.r_mw[cell] | self.r_mt[cell]
            )
            if rd.any():
                j = np.flatnonzero(rd)
                self._report(
                    "cp.async over data read in this barrier interval",
                    cell[j],
                    self.r_t[cell[j]],
                    t[j],
                    ins,
                )
            self.pend[cell] += 1
        self.cpq.append([idx, self.cpg[idx].copy(), da, e, vals, ins])

    def cp_commit(self, m):
        self.cpg[slice(None) if m is None else m] += 1

    def cp_wait(self, m, keep):
        q = []
        for ent in self.cpq:
            idx, gid, da, e, vals, ins = ent
            sel = np.ones(idx.size, bool) if keep < 0 else gid < self.cpg[idx] - keep
            if m is not None:
                sel = sel & m[idx]
            if not sel.any():
                q.append(ent)
                continue
            rest = ~sel
            w = np.flatnonzero(sel)
            if self.race:
                ((_, _, off, _),) = self._place(
                    "shared", idx[w], da[w], e * len(vals), ins, "cp.async"
                )
                np.subtract.at(self.pend, self._gran(off, e * len(vals))[0], 1)
            self.store("shared", idx[w], da[w], e, [v[w] for v in vals], ins)
            if rest.any():
                w = np.flatnonzero(rest)
                q.append([idx[w], gid[w], da[w], e, [v[w] for v in vals], ins])
        self.cpq = q

    def atomic(self, sp, idx, addr, n, b, c, comb, ins):
        out = np.empty(addr.size, UDT[n])
        for w, buf, off, space in self._place(sp, idx, addr, n, ins, "atomic"):
            lanes = idx if w is None else idx[w]
            bb = b if w is None else b[w]
            cc = None if c is None else (c if w is None else c[w])
            view = buf.v[n]
            e = (off // u64(n)).astype(np.int64)
            if space == "global":
                self.g["atomics"] += off.size
                if self.race_global:
                    self._g_shadow(buf)[0][self._g_cells(lanes, off, n)[0]] = -2
                buf.mark("rd", off, n)
                buf.mark("wr", off, n)
            elif space == "shared":
                self.s["atomics"] += off.size
                self._sh_atomic(lanes, off, n, ins)
            order = np.arange(e.size) if self.atom_order == "lane" else self.rng.permutation(e.size)
            o = order[np.argsort(e[order], kind="stable")]
            es = e[o]
            new = np.r_[True, es[1:] != es[:-1]]
            st = np.flatnonzero(new)
            rank = np.arange(es.size) - np.repeat(st, np.diff(np.r_[st, es.size]))
            old = np.empty(e.size, UDT[n])
            mr = int(rank.max())
            if mr == 0:
                v = view[e]
                view[e] = comb(v, bb, cc)
                old[:] = v
            else:
                for r in range(mr + 1):
                    k = o[rank == r] if mr < 64 else o[st[np.diff(np.r_[st, es.size]) > r] + r]
                    v = view[e[k]]
                    view[e[k]] = comb(v, bb[k], None if cc is None else cc[k])
                    old[k] = v
            if w is None:
                return old
            out[w] = old
        return out

    # ---- shared-memory race detection (granules of the smallest shared access of the kernel)
    def _gran(self, off, size):
        g = self.gr
        k = size // g
        if k <= 1:
            return (off // u64(g)).astype(np.int64), 1
        return ((off // u64(g)).astype(np.int64)[:, None] + np.arange(k)).reshape(-1), k

    def _report(self, kind, cells, a, b, ins):
        S = self.S
        for c, t1, t2 in list(zip(cells, a, b))[:4]:
            byte = int(c) * self.gr
            msg = (
                f"{kind} in shared memory at byte {byte % S}: "
                + (self.who(int(t1)) if t1 >= 0 else "another thread")
                + f" and {self.who(int(t2))}, no barrier between, at {ins!r}"
            )
            if self.race == "raise":
                raise RaceError(msg)
            if len(self.races) < 100:
                self.races.append(msg)

    def _sh_read(self, lanes, off, size, ins):
        if not self.race:
            return
        cell, k = self._gran(off, size)
        t = np.repeat(lanes, k).astype(i32)
        un = ~self.sh_init[cell * self.gr]
        if un.any():
            self.s["uninit_reads"] += int(np.count_nonzero(un))
        if self.cpq and self.pend[cell].any():
            j = np.flatnonzero(self.pend[cell])
            self._report(
                "read of a cp.async destination before its wait",
                cell[j],
                np.full(j.size, -1),
                t[j],
                ins,
            )
        ep, we, wp = self.epoch[self.blk[t]], self.wep[t >> 5], t >> 5
        # read after another thread's write
        wt = self.w_t[cell]
        cand = (self.w_e[cell] == ep) & ((wt != t) | self.w_at[cell])
        if cand.any():
            same = (wt >> 5) == wp
            cand &= ~same | (self.w_we[cell] == we)
            if self.race_mode == "value":
                cand &= self.w_chg[cell]
            if cand.any():
                j = np.flatnonzero(cand)
                self._report("read-after-write race", cell[j], wt[j], t[j], ins)
        self._note_read(cell, t, ep, we, wp)

    def _note_read(self, cell, t, ep, we, wp):
        rt = self.r_t[cell]
        cur = self.r_e[cell] == ep
        diff_w = cur & ((rt >> 5) != wp)
        diff_t = cur & (rt != t) & ((rt >> 5) == wp) & (self.r_we[cell] == we)
        stale = ~cur
        self.r_mw[cell[stale]] = False
        self.r_mt[cell[stale | (self.r_we[cell] != we)]] = False
        self.r_mw[cell[diff_w]] = True
        self.r_mt[cell[diff_t]] = True
        self.r_t[cell] = t
        self.r_e[cell] = ep
        self.r_we[cell] = we
        # several readers within this very instruction: compare with what was finally noted
        last = self.r_t[cell]
        d = last != t
        if d.any():
            self.r_mt[cell[d & ((last >> 5) == wp)]] = True
            self.r_mw[cell[d & ((last >> 5) != wp)]] = True

    def _sh_write(self, lanes, off, n, vals, ins):
        nv = len(vals)
        size = n * nv
        for k in range(nv):
            o = off + u64(k * n)
            self.sh_init.view(UDT[n])[(o // u64(n)).astype(np.int64)] = {
                1: 1,
                2: 0x0101,
                4: 0x01010101,
                8: 0x0101010101010101,
            }[n]
        if not self.race:
            return
        g = self.gr
        raw = np.stack(vals, 1)  # (N, nv)
        raw = np.ascontiguousarray(raw).view(UDT[g]).reshape(-1)  # one value per granule
        cell, k = self._gran(off, size)
        t = np.repeat(lanes, k).astype(i32)
        old = self.smem.v[g][cell]
        diff = raw != old
        flag = diff if self.race_mode == "value" else np.ones(diff.shape, bool)
        ep, we, wp = self.epoch[self.blk[t]], self.wep[t >> 5], t >> 5
        wt = self.w_t[cell]
        cand = (self.w_e[cell] == ep) & ((wt != t) | self.w_at[cell]) & flag
        if cand.any():
            cand &= ((wt >> 5) != wp) | (self.w_we[cell] == we)
            if cand.any():
                j = np.flatnonzero(cand)
                self._report("write-after-write race", cell[j], wt[j], t[j], ins)
        rt = self.r_t[cell]
        cur = (self.r_e[cell] == ep) & flag
        if cur.any():
            same = (rt >> 5) == wp
            cand = cur & (
                self.r_mw[cell]
                | ~same
                | (same & (self.r_we[cell] == we) & ((rt != t) | self.r_mt[cell]))
            )
            if cand.any():
                j = np.flatnonzero(cand)
                self._report(
                    "write-after-read race", cell[j], np.where(rt[j] != t[j], rt[j], -1), t[j], ins
                )
        # two lanes of this instruction writing one cell
        self.w_t[cell] = t
        last = self.w_t[cell] != t
        if last.any():
            probe = np.empty(self.w_t.size, UDT[g]) if False else None
            o = np.argsort(cell, kind="stable")
            cs, rs = cell[o], raw[o]
            dup = (cs[1:] == cs[:-1]) & ((rs[1:] != rs[:-1]) if self.race_mode == "value" else True)
            if dup.any():
                j = np.flatnonzero(dup)
                self._report("write-write race (one instruction)", cs[j], t[o][j], t[o][j + 1], ins)
        keep = self.w_e[cell] == ep
        self.w_chg[cell] = diff | (keep & self.w_chg[cell])
        self.w_e[cell] = ep
        self.w_we[cell] = we
        self.w_at[cell] = False

    def _sh_atomic(self, lanes, off, n, ins):
        un = ~self.sh_init[off.astype(np.int64)]
        if un.any():
            self.s["uninit_reads"] += int(np.count_nonzero(un))
        self.sh_init.view(UDT[n])[(off // u64(n)).astype(np.int64)] = {
            1: 1,
            2: 0x0101,
            4: 0x01010101,
            8: 0x0101010101010101,
        }[n]
        if not self.race:
            return
        cell, k = self._gran(off, n)
        t = np.repeat(lanes, k).astype(i32)
        ep, we, wp = self.epoch[self.blk[t]], self.wep[t >> 5], t >> 5
        wt = self.w_t[cell]
        cand = (self.w_e[cell] == ep) & (wt != t) & ~self.w_at[cell]
        cand &= ((wt >> 5) != wp) | (self.w_we[cell] == we)
        if cand.any():
            j = np.flatnonzero(cand)
            self._report("atomic after plain write", cell[j], wt[j], t[j], ins)
        rt = self.r_t[cell]
        same = (rt >> 5) == wp
        cand = (self.r_e[cell] == ep) & (
            self.r_mw[cell]
            | ~same
            | (same & (self.r_we[cell] == we) & ((rt != t) | self.r_mt[cell]))
        )
        if cand.any():
            j = np.flatnonzero(cand)
            self._report(
                "atomic after plain read", cell[j], np.where(rt[j] != t[j], rt[j], -1), t[j], ins
            )
        self.w_t[cell] = t
        self.w_e[cell] = ep
        self.w_we[cell] = we
        self.w_chg[cell] = True
        self.w_at[cell] = True

    # ---- unordered accesses to global memory (recorded, not raised: fences and flags are not understood)
    def _g_shadow(self, buf):
        sh = getattr(buf, "sh", None)
        if sh is None or sh[6] is not self:
            n = buf.n // self.prog.min_gl + 1
            sh = buf.sh = (
                np.full(n, -1, i64),
                np.zeros(n, i32),
                np.zeros(n, i32),
                np.full(n, -1, i64),
                np.zeros(n, i32),
                np.zeros(n, i32),
                self,
            )
        return sh

    def _g_cells(self, lanes, off, size):
        g = self.prog.min_gl
        k = max(1, size // g)
        c = (off // u64(g)).astype(np.int64)
        if k > 1:
            c = (c[:, None] + np.arange(k)).reshape(-1)
            lanes = np.repeat(lanes, k)
        return c, lanes, lanes + self.b0 * self.lpb

    def _g_unordered(self, ot, oe, owe, t, lanes):
        """was the access of thread ot (barrier interval oe, warp interval owe) unordered with thread t now?"""
        diff = (ot >= 0) & (ot != t)
        if not diff.any():
            return diff
        blk = ot // self.lpb != t // self.lpb
        same_e = oe == self.epoch[self.blk[lanes]]
        same_w = (ot >> 5 == t >> 5) & (owe != self.wep[lanes >> 5])
        return diff & (blk | (same_e & ~same_w))

    def _g_report(self, kind, buf, c, t1, lane, ins):
        msg = f"{kind} at byte {int(c) * self.prog.min_gl} of {buf.name}: block {int(t1) // self.lpb} thread {int(t1) % self.lpb} and {self.who(int(lane))} at {ins!r}"
        if self.race_global == "raise":
            raise RaceError("global memory, " + msg)
        if len(self.graces) < 100:
            self.graces.append(msg)

    def _g_read(self, buf, lanes, off, size, ins):
        wt, we, ww, rt, re_, rw, _ = self._g_shadow(buf)
        c, lanes, t = self._g_cells(lanes, off, size)
        bad = self._g_unordered(wt[c], we[c], ww[c], t, lanes)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self._g_report(
                "read of another thread's unordered write", buf, c[j], wt[c[j]], lanes[j], ins
            )
        rt[c] = t
        re_[c] = self.epoch[self.blk[lanes]]
        rw[c] = self.wep[lanes >> 5]

    def _g_write(self, buf, lanes, off, n, vals, ins):
        wt, we, ww, rt, re_, rw, _ = self._g_shadow(buf)
        g = self.prog.min_gl
        c, lanes, t = self._g_cells(lanes, off, n * len(vals))
        raw = np.ascontiguousarray(np.stack(vals, 1)).view(UDT[g]).reshape(-1)
        chg = raw != buf.v[g][c]
        bad = chg & self._g_unordered(wt[c], we[c], ww[c], t, lanes)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self._g_report(
                "two unordered writes of different values", buf, c[j], wt[c[j]], lanes[j], ins
            )
        bad = chg & self._g_unordered(rt[c], re_[c], rw[c], t, lanes)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self._g_report(
                "write of what another thread read, unordered", buf, c[j], rt[c[j]], lanes[j], ins
            )
        wt[c] = t
        we[c] = self.epoch[self.blk[lanes]]
        ww[c] = self.wep[lanes >> 5]
        if (wt[c] != t).any():
            o = np.argsort(c, kind="stable")
            d = (c[o][1:] == c[o][:-1]) & (raw[o][1:] != raw[o][:-1])
            if d.any():
                j = int(np.flatnonzero(d)[0])
                self._g_report(
                    "one instruction writes different values",
                    buf,
                    c[o][j],
                    t[o][j],
                    lanes[o][j + 1],
                    ins,
                )

    # ---- results
    def _stats(self, sec):
        it, iw, cl = {}, {}, {}
        for k, ins in enumerate(self.prog.code):
            c = int(self.cnt_t[k])
            if c:
                it[ins.op] = it.get(ins.op, 0) + c
                iw[ins.op] = iw.get(ins.op, 0) + int(self.cnt_w[k])
                q = op_class(ins.op)
                cl[q] = cl.get(q, 0) + int(self.cnt_w[k])
        g = dict(self.g)
        g["unique_read"] = sum(b.unique("rd") for b in self.bufs.values())
        g["unique_written"] = sum(b.unique("wr") for b in self.bufs.values())
        pr = [
            dict(
                arg=k,
                name=self.prog.params[k].name,
                nbytes=b.n,
                unique_read=b.unique("rd"),
                unique_written=b.unique("wr"),
            )
            for k, b, _ in self.arg_bufs
        ]
        return Stats(
            kernel=self.prog.name,
            grid=self.grid,
            block=self.block,
            seconds=sec,
            inst_thread=it,
            inst_warp=iw,
            by_class=dict(sorted(cl.items(), key=lambda e: -e[1])),
            thread_instructions=int(self.cnt_t.sum()),
            warp_instructions=int(self.cnt_w.sum()),
            **{"global": g},
            shared=dict(self.s),
            local_bytes=self.local_bytes,
            barriers=self.barriers,
            params=pr,
            warnings=dict(self.warnings),
            races=list(self.races),
            global_races=list(self.graces),
            group_steps=self.steps,
        )
