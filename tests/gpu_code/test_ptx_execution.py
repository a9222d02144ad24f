"""How the PTX emulator runs threads: branches, warps, memory, atomics, and what it refuses.

The kernels are written by hand; the expected values are computed by loops over the threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emulator import emulator
from ptx_kernels import launch

LANES = range(32)
RANDOM = np.random.default_rng(1)
OWN = "mad.wide.u32 %l9, %i, 4, %p1; "
"""%l9: the address of this thread's 32-bit result, the second argument."""


def words(count: int = 32, high: int = 1000) -> np.ndarray:
    return RANDOM.integers(0, high, count).astype(np.uint32)


def run(
    body: str, values: np.ndarray, block: int = 32, grid: int = 1, **options: object
) -> np.ndarray:
    """%r0 is this thread's word of the values, %r1 the word that it returns."""
    out = np.zeros(block * grid, np.uint32)
    load = "mad.wide.u32 %l8, %i, 4, %p0; ld.global.u32 %r0, [%l8];"
    text = f"{load} {body} {OWN} st.global.u32 [%l9], %r1;"
    launch(text, [values, out], block, grid, **options)
    return out


# --- control flow


@pytest.mark.parametrize("schedule", ["lockstep", "warp"])
def test_each_thread_loops_as_often_as_it_must(schedule: str) -> None:
    """Steps of the Collatz sequence: every thread leaves the loop at another time."""
    body = """
      mov.u32 %r1, 0;
    LOOP:
      setp.eq.u32 %q0, %r0, 1;
      @%q0 bra DONE;
      and.b32 %r2, %r0, 1;
      setp.ne.u32 %q1, %r2, 0;
      @%q1 mad.lo.u32 %r0, %r0, 3, 1;
      @!%q1 shr.u32 %r0, %r0, 1;
      add.u32 %r1, %r1, 1;
      bra LOOP;
    DONE:"""

    def steps(value: int) -> int:
        count = 0
        while value != 1:
            value, count = (3 * value + 1 if value % 2 else value // 2), count + 1
        return count

    values = words(128) + 1
    assert run(body, values, 64, 2, schedule=schedule).tolist() == [steps(int(v)) for v in values]


def test_predicates_combine_and_select() -> None:
    body = """
      setp.lt.u32 %q0, %r0, 600;
      setp.gt.and.u32 %q1, %r0, 200, %q0;
      setp.eq.or.u32 %q2, %r0, 7, %q1;
      selp.u32 %r1, 5, 9, %q2;
      @!%q0 add.u32 %r1, %r1, 100;"""
    values = words()
    values[0] = 7
    expected = [(5 if 200 < v < 600 or v == 7 else 9) + (0 if v < 600 else 100) for v in values]
    assert run(body, values).tolist() == expected


def test_an_endless_loop_is_ended() -> None:
    with pytest.raises(emulator().StepLimit):
        run("LOOP: bra LOOP;", words(), max_steps=1000)


# --- warps

SOURCES: dict[str, Callable[[int], int]] = {
    "up": lambda lane: lane - 3 if lane >= 3 else lane,
    "down": lambda lane: lane + 3 if lane + 3 <= 31 else lane,
    "bfly": lambda lane: lane ^ 3,
    "idx": lambda lane: 3,
}


@pytest.mark.parametrize("name", SOURCES)
def test_lanes_exchange_values(name: str) -> None:
    clamp = 0 if name == "up" else 31
    body = f"shfl.sync.{name}.b32 %r1|%q0, %r0, 3, {clamp}, -1; @!%q0 add.u32 %r1, %r1, 5000;"
    values = words()
    outside = {"up": (0, 1, 2), "down": (29, 30, 31)}.get(name, ())
    expected = [
        int(values[SOURCES[name](lane)]) + (5000 if lane in outside else 0) for lane in LANES
    ]
    assert run(body, values).tolist() == expected


def test_votes_count_the_lanes_that_take_part() -> None:
    values = words()
    body = """
      setp.lt.u32 %q0, %r0, 500;
      vote.sync.ballot.b32 %r1, %q0, -1;
      vote.sync.any.pred %q1, %q0, -1;
      vote.sync.all.pred %q2, %q0, -1;
      @%q1 add.u32 %r1, %r1, 1;
      @%q2 add.u32 %r1, %r1, 2;"""
    ballot = sum(1 << lane for lane in LANES if values[lane] < 500)
    assert run(body, values).tolist() == [(ballot + 1) & 0xFFFFFFFF] * 32
    body = "setp.lt.u32 %q0, %t, 7; @%q0 activemask.b32 %r1; @!%q0 mov.u32 %r1, 0;"
    assert run(body, values).tolist() == [127] * 7 + [0] * 25


def test_lanes_match_and_reduce() -> None:
    values = words(32, 4)
    expected = [sum(1 << other for other in LANES if values[other] == own) for own in values]
    assert run("match.any.sync.b32 %r1, %r0, -1;", values).tolist() == expected
    assert run("redux.sync.add.u32 %r1, %r0, -1;", values).tolist() == [values.sum()] * 32
    assert run("redux.sync.max.u32 %r1, %r0, -1;", values).tolist() == [values.max()] * 32


def test_a_lane_outside_of_its_mask_is_refused() -> None:
    with pytest.raises(emulator().BarrierError):
        run("shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xFF;", words())


# --- shared memory

SHARED = ".shared .align 16 .b8 tile[512]; mov.u32 %s0, tile; mad.lo.u32 %s1, %t, 4, %s0; "
REVERSE = """
  st.shared.u32 [%s1], %r0;
  {barrier}
  sub.u32 %s2, 127, %t;
  mad.lo.u32 %s2, %s2, 4, %s0;
  ld.shared.u32 %r1, [%s2];"""


@pytest.mark.parametrize("schedule", ["lockstep", "warp"])
def test_a_block_reverses_its_values(schedule: str) -> None:
    values = words(256)
    body = SHARED + REVERSE.format(barrier="bar.sync 0;")
    found = run(body, values, 128, 2, schedule=schedule)
    np.testing.assert_array_equal(found, values.reshape(2, 128)[:, ::-1].reshape(-1))


def test_a_missing_barrier_is_a_race() -> None:
    with pytest.raises(emulator().RaceError):
        run(SHARED + REVERSE.format(barrier=""), words(128), 128)
    with pytest.raises(emulator().RaceError):
        run(SHARED + "st.shared.u32 [%s0], %t; mov.u32 %r1, 0;", words(128), 128)


def test_a_barrier_that_some_threads_do_not_reach_is_refused() -> None:
    body = SHARED + "mov.u32 %r1, 0; setp.lt.u32 %q0, %t, 64; @%q0 bra SKIP; bar.sync 0; SKIP:"
    with pytest.raises(emulator().BarrierError):
        run(body, words(128), 128)
    run(body.replace("@%q0 bra SKIP;", ""), words(128), 128)


def test_memory_that_no_thread_has_written_is_noticed() -> None:
    read = SHARED + "ld.shared.u32 %r1, [%s1];"
    assert (run(read, words(128), 128) == 0xFFFFFFFF).all()
    with pytest.raises(emulator().UninitializedRead):
        run(read, words(128), 128, uninitialized="raise")
    write = SHARED + "st.shared.u32 [%s1], %r0; ld.shared.u32 %r1, [%s1];"
    run(write, words(128), 128, uninitialized="raise")


# --- atomics


@pytest.mark.parametrize("space", ["global", "shared"])
def test_a_histogram_counts_each_value(space: str) -> None:
    values, counts = words(256, 16), np.zeros(16, np.uint32)
    load = "mad.wide.u32 %l8, %i, 4, %p0; ld.global.u32 %r0, [%l8];"
    if space == "global":
        body = load + "mad.wide.u32 %l9, %r0, 4, %p1; atom.global.add.u32 %r1, [%l9], 1;"
    else:
        body = f"""{load} {SHARED}
          setp.lt.u32 %q0, %t, 16;
          @%q0 st.shared.u32 [%s1], 0;
          bar.sync 0;
          mad.lo.u32 %s2, %r0, 4, %s0;
          red.shared.add.u32 [%s2], 1;
          bar.sync 0;
          @!%q0 bra END;
          ld.shared.u32 %r1, [%s1];
          mad.wide.u32 %l9, %t, 4, %p1;
          red.global.add.u32 [%l9], %r1;
        END:"""
    launch(body, [values, counts], 128, 2, atom_order="random")
    np.testing.assert_array_equal(counts, np.bincount(values, minlength=16))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("min.u32", lambda v: min(v.min(), 500)),
        ("max.u32", lambda v: max(v.max(), 500)),
        ("and.b32", lambda v: np.bitwise_and.reduce(v) & 500),
        ("or.b32", lambda v: np.bitwise_or.reduce(v) | 500),
        ("xor.b32", lambda v: np.bitwise_xor.reduce(v) ^ 500),
        ("add.f32", lambda v: np.float32(v.sum() + np.array([500], "u4").view("f4")[0]).view("u4")),
    ],
)
def test_atomics_combine_all_threads(name: str, expected: Callable) -> None:
    values, target = words(64), np.array([500], np.uint32)
    convert = "cvt.rn.f32.u32 %f0, %r0; mov.b32 %r0, %f0;" if name == "add.f32" else ""
    body = f"mad.wide.u32 %l8, %i, 4, %p0; ld.global.u32 %r0, [%l8]; {convert}"
    launch(f"{body} red.global.{name} [%p1], %r0;", [values, target], 64)
    assert target[0] == expected(values)


def test_compare_and_swap_takes_each_ticket_once() -> None:
    """A lock-free counter: every thread repeats until its own swap succeeds."""
    body = (
        """
      ld.global.u32 %r2, [%p0];
    AGAIN:
      add.u32 %r3, %r2, 1;
      atom.global.cas.b32 %r4, [%p0], %r2, %r3;
      setp.eq.u32 %q0, %r4, %r2;
      mov.u32 %r2, %r4;
      @!%q0 bra AGAIN;"""
        + OWN
        + "st.global.u32 [%l9], %r2;"
    )
    counter, tickets = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    launch(body, [counter, tickets], 64)
    assert counter[0] == 64
    assert sorted(tickets.tolist()) == list(range(64))


# --- global memory


@pytest.mark.parametrize(
    ("kind", "registers", "size"),
    [("v2.u32", "%r0, %r1", 8), ("v4.u32", "%r0, %r1, %r2, %r3", 16), ("v2.u64", "%l1, %l2", 16)],
)
def test_vectors_are_loaded_and_stored(kind: str, registers: str, size: int) -> None:
    values, out = words(128 * size // 4), np.zeros(128 * size // 4, np.uint32)
    swapped = ", ".join(reversed(registers.split(", ")))
    body = f"""
      mad.wide.u32 %l8, %i, {size}, %p0;
      mad.wide.u32 %l9, %i, {size}, %p1;
      ld.global.{kind} {{{registers}}}, [%l8];
      st.global.{kind} [%l9], {{{swapped}}};"""
    statistics = launch(body, [values, out], 64, 2)
    parts = values.reshape(128, len(registers.split(",")), -1)
    np.testing.assert_array_equal(out, parts[:, ::-1].reshape(-1))
    assert statistics["global"]["bytes_read"] == values.nbytes
    assert statistics["global"]["sectors_read"] == values.nbytes // 32


def test_bytes_and_pointers_inside_of_an_array() -> None:
    values, out = np.arange(40, dtype=np.uint8), np.zeros(32, np.uint32)
    body = f"cvt.u64.u32 %l1, %i; add.u64 %l1, %l1, %p0; ld.global.u8 %r1, [%l1+2]; {OWN}"
    launch(f"{body} st.global.u32 [%l9], %r1;", [emulator().Ptr(values, 5), out])
    np.testing.assert_array_equal(out, np.arange(7, 39))


@pytest.mark.parametrize("offset", [-4, 128])
def test_an_access_beyond_an_array_names_the_thread(offset: int) -> None:
    body = f"mad.wide.u32 %l8, %i, 4, %p0; ld.global.u32 %r1, [%l8+{offset}]; {OWN}"
    with pytest.raises(emulator().OutOfBounds, match=r"thread \(\d+,0,0\)"):
        launch(f"{body} st.global.u32 [%l9], %r1;", [words(), np.zeros(32, np.uint32)])


def test_an_access_beyond_shared_memory_is_refused() -> None:
    with pytest.raises(emulator().OutOfBounds):
        run(SHARED + "st.shared.u32 [%s1+4], %r0; mov.u32 %r1, 0;", words(128), 128)


@pytest.mark.parametrize(("kind", "offset"), [("u32", 2), ("v4.u32", 4), ("u64", 4)])
def test_a_misaligned_access_is_refused(kind: str, offset: int) -> None:
    registers = {"u32": "%r0", "v4.u32": "{%r0, %r1, %r2, %r3}", "u64": "%l1"}[kind]
    values = words()
    launch(f"ld.global.{kind} {registers}, [%p0];", [values])
    with pytest.raises(emulator().Misaligned):
        launch(f"ld.global.{kind} {registers}, [%p0+{offset}];", [values])


def test_a_null_pointer_and_a_trap_are_refused() -> None:
    with pytest.raises(emulator().OutOfBounds):
        launch("ld.global.u32 %r0, [%p0];", [None])
    with pytest.raises(emulator().Trap):
        launch("trap;", [words()])


def test_an_unknown_instruction_is_an_error_when_it_is_executed() -> None:
    launch("bra END; wgmma.fence.sync.aligned; END:", [words()])
    with pytest.raises(emulator().UnknownInstruction):
        launch("wgmma.fence.sync.aligned;", [words()])


def test_unordered_accesses_of_blocks_to_global_memory_are_recorded() -> None:
    ordered, unordered = (
        launch(f"{OWN} st.global.u32 [{place}], %i;", [words(), np.zeros(64, np.uint32)], 32, 2)
        for place in ("%l9", "%p1")
    )
    assert not ordered["global_races"]
    assert unordered["global_races"]


# --- matrices


def test_a_warp_multiplies_matrices() -> None:
    """mma.m16n8k8 with tf32 inputs: the fragments as the PTX manual lays them out."""
    a, b = (RANDOM.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    c, out = RANDOM.integers(-8, 8, (16, 8)).astype(np.float32), np.zeros((16, 8), np.float32)
    body = """
      shr.u32 %s0, %t, 2; and.b32 %s1, %t, 3;
      mad.lo.u32 %r8, %s0, 8, %s1; mad.wide.u32 %l0, %r8, 4, %p0;
      ld.global.u32 %r0, [%l0]; ld.global.u32 %r1, [%l0+256];
      ld.global.u32 %r2, [%l0+16]; ld.global.u32 %r3, [%l0+272];
      mad.lo.u32 %r8, %s1, 8, %s0; mad.wide.u32 %l1, %r8, 4, %p1;
      ld.global.u32 %r4, [%l1]; ld.global.u32 %r5, [%l1+128];
      shl.b32 %s2, %s1, 1; mad.lo.u32 %r8, %s0, 8, %s2;
      mad.wide.u32 %l2, %r8, 4, %p2; mad.wide.u32 %l3, %r8, 4, %p3;
      ld.global.f32 %f0, [%l2]; ld.global.f32 %f1, [%l2+4];
      ld.global.f32 %f2, [%l2+256]; ld.global.f32 %f3, [%l2+260];
      mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {%f4, %f5, %f6, %f7}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3};
      st.global.f32 [%l3], %f4; st.global.f32 [%l3+4], %f5;
      st.global.f32 [%l3+256], %f6; st.global.f32 [%l3+260], %f7;"""
    launch(body, [a, b, c, out])
    np.testing.assert_array_equal(out, a @ b + c)
