"""The machine code of the kernels for seven architectures: which memory it addresses and how, and
where it computes in fp64. No GPU runs it here."""

from __future__ import annotations

import re

import pytest
from compiled_resources import DOCUMENT, benchmark, kernels_for, section
from sass import code_of, moved, sass

from fastaug.kernels.cuda import OBJECTIVE
from fastaug.toolchain import nvrtc
from fastaug.views.cuda import VIEWS

pytest.importorskip("cuda.bindings")

ARCHITECTURES = benchmark.ARCHITECTURES
FP64 = 330
"""Instructions of a view kernel: filters, matrices and limits, not the loops over pixels."""
FP64_LOOPS = 7
"""Two filters in two passes, the table of auto_contrast, and moves that fp64 decides in words and
in bytes."""
GLOBAL_ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loss_kernel(architecture: str) -> None:
    for name in kernels_for(OBJECTIVE, architecture):
        code = code_of(name, architecture)
        assert code.count("LDL", "STL") == 0, name
        assert code.count("LD", "ST", "ATOMS", *GLOBAL_ATOMICS) == 0, name
        assert code.fp64 == 0, name
        assert code.count("LDS") > 100, name
        # Of rows that begin at a multiple of 16 bytes.
        assert code.count("LDG", bits=128) >= 1, name
        assert code.count("STG", bits=128) >= 1, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_view_kernel_addresses_each_memory_by_its_kind(architecture: str) -> None:
    for name in kernels_for(VIEWS, architecture):
        code, shared = code_of(name, architecture), name.rpartition("_")[2]
        assert code.count("LDL", "STL") == 0, name
        assert code.count("ATOM", "ATOMG") == 0, name
        if shared == "none":  # everything is in global memory, and known to be
            assert code.count("LD", "ST", "LDS", "STS", "ATOMS") == 0, name
            continue
        # Tables: the histograms of three channels, and of gray values, of 16 pixels and of one.
        assert code.count("ATOMS") >= 48 + 16 + 3 + 1, name
        assert code.count(*GLOBAL_ATOMICS) == 0, name
        assert code.count("LDS") >= 80, name
        assert code.count("STS") >= 40, name
        # Images, plans and the finished view are always in global memory.
        assert code.count("LDG") >= 40, name
        assert code.count("STG") >= 3, name
        if shared == "all":
            assert code.count("LD", "ST") == 0, name
        else:  # buffers may be in either memory; nothing else is
            assert 0 < code.count("LD") < 150, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_views_are_loaded_and_stored_128_bits_at_a_time(architecture: str) -> None:
    for name in kernels_for(VIEWS, architecture):
        code, shared = code_of(name, architecture), name.rpartition("_")[2]
        kind = {"all": "S", "tables": "", "none": "G"}[shared]
        load, store = f"LD{kind}", f"ST{kind}"
        # Value by value: four operations. By pixels: range, two histograms, colors, a table.
        assert code.count(load, bits=128) >= 4 + 5 * 3, name
        assert code.count(store, bits=128) >= 4 + 2 * 3, name
        # The finished view, and a strip of rows.
        assert code.count("STG", bits=128) >= 1, name
        assert code.count("STG" if shared == "none" else "STS", bits=128) >= 1, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_loop_over_pixels_computes_in_fp64(architecture: str) -> None:
    for name in kernels_for(VIEWS, architecture):
        code = code_of(name, architecture)
        assert 0 < code.fp64 <= FP64, name
        loops = code.inner_loops()
        assert len(loops) > 40, name
        slow = [loop for loop in loops if any(one.is_fp64 for one in loop)]
        assert len(slow) <= FP64_LOOPS, name
        # A move has two loops that load and store the same: in integers, and in fp64 for the
        # positions that integers cannot decide.
        moves = [moved(loop) for loop in slow if {kind for kind, _ in moved(loop)} == {"LD", "ST"}]
        fast = [moved(loop) for loop in loops if loop not in slow]
        in_words = [move for move in moves if move[("ST", 32)] == 3]
        assert len(in_words) == 1, name
        assert in_words[0] in fast, name


def test_the_document_states_the_instructions() -> None:
    if f"NVRTC {nvrtc.nvrtc_version()}." not in DOCUMENT.read_text():
        pytest.skip("the document is of another NVRTC")
    rows = dict(re.findall(r"\n\| (\w+) \| (.+) \|", section("Instructions")))
    assert set(rows) == {"kernel", *OBJECTIVE.kernels, *VIEWS.kernels}
    for program in (OBJECTIVE, VIEWS):
        for name in kernels_for(program, benchmark.COUNTED):
            cells = benchmark.instruction_row(code_of(name, benchmark.COUNTED))
            assert rows[name] == " | ".join(cells), name


TEXT = """
.text.kernel:
        /*0000*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
.L_x_1:
        /*0010*/                   LDS.U.U8 R5, [R3] ;
.L_x_0:
        /*0020*/              @!P0 DADD R8, R8, R4 ;
        /*0030*/                   ST.E.64 [R2], R8 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   I2F.F64 R4, R4 ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0080*/                   EXIT ;
"""


def test_what_the_parser_reads() -> None:
    code = sass.parse(TEXT)
    assert [one.operation for one in code.instructions[:4]] == ["LDG", "LDS", "DADD", "ST"]
    assert [one.bits for one in code.instructions[:4]] == [128, 8, 32, 64]
    assert code.fp64 == 2
    assert code.widths("LDG", "LDS") == {128: 1, 8: 1}
    (loop,) = code.inner_loops()
    assert [one.operation for one in loop] == ["DADD", "ST", "BRA"]
