"""The ring's two warps in every order of their steps, which are read from bulk.cu; and the same file with errors."""

from __future__ import annotations

import re

import pytest
from cuda_text import UnknownText, loaded
from ring_model import LAUNCHES, RingBlock, RingFault, RingLaunch

from kvmover.kernels.experimental import RING, SOURCE, Ring
from tests.proofs import family

TEXT = SOURCE.read_text()


FEW = [launch for launch in LAUNCHES if launch.ring.stages < 4]
PROVED = [each for each in LAUNCHES if (each.ring.stages, each.ring.lag) == (4, 2)]
PROVED.append(RingLaunch(Ring(RING.stages, 256, RING.lag), 2 * RING.stages + 1, odd=True))


@pytest.mark.parametrize("launch", family(LAUNCHES, few=FEW, proved=[*FEW, *PROVED]), ids=str)
def test_no_order_of_steps_loses_or_mixes_a_byte(launch: RingLaunch) -> None:
    """No stage is loaded over before it is read, none is stored before it is full, nothing waits for ever, and nothing
    is under way at the end.
    """
    assert RingBlock(TEXT, launch).explore() > 3


#: A launch in which each of the errors below shows.
SHORT = RingLaunch(Ring(3, 256, 1), 4, boxes=3)

ERRORS = {
    "the last wait is for reading alone": ("wait_group 0;", "wait_group.read 0;", "before its bytes are written"),
    "no map is acquired": ("    acquire_maps(table, items);\n", "", "another tensor map"),
    "the producer waits for the other parity": ("turn.parity ^ 1);", "turn.parity);", "nothing goes on"),
    "the consumer waits for the other parity": ("turn.parity);\n", "turn.parity ^ 1);\n", "does not hold the bytes"),
    "a stage is given back too early": ("if (stored++ >= LAG) {", "if (stored++ >= 0) {", "being read"),
    "a lane loads before the barrier expects it": (
        "        __syncwarp();  // no byte may arrive before the barrier expects it\n",
        "",
        "does not expect yet",
    ),
    "a barrier awaits both lanes": ("[%0], 1;", "[%0], 2;", "nothing goes on"),
    "a barrier expects one lane's bytes": ("barrier_expect(barrier, bytes)", "barrier_expect(barrier, 128)", "expect"),
    "the next stage is given back": ("empty + 8 * done.stage", "empty + 8 * turn.stage", "nothing goes on"),
    "the ring is one stage longer": ("if (++stage == STAGES)", "if (++stage > STAGES)", "outside of the ring"),
    "nobody waits for the block": ("    __syncthreads();\n", "", "the block does not meet"),
    "lanes meet in a branch": ("if (lane == 0) barrier_expect", "if (lane == 0) __syncwarp(), barrier_expect", "lanes"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_the_protocol_is_found(error: str) -> None:
    right, wrong, words = ERRORS[error]
    assert right in TEXT
    with pytest.raises(RingFault, match=words):
        RingBlock(TEXT.replace(right, wrong), SHORT).explore()


STATEMENT = re.compile(r"(?:barrier_\w+|load\w*|store\w*|__sync\w+|acquire_maps|done\.next|asm volatile)\([^;{}]*?\);")
#: The file with no semicolon or brace inside of a string, each character where it was.
MASKED = re.sub(r'"[^"\n]*"', lambda found: re.sub(r"[;{}]", "_", found[0]), TEXT)
STATEMENTS = [each.span() for each in STATEMENT.finditer(MASKED, TEXT.index("void load_all"))]


def without(statements: list[tuple[int, int]]) -> str:
    """Returns the file without the statements at these places."""
    text = TEXT
    for begin, end in reversed(statements):
        text = f"{text[:begin]};{text[end:]}"
    return text


def is_found(text: str) -> bool:
    try:
        RingBlock(text, SHORT).explore()
    except RingFault:
        return True
    return False


def test_no_statement_of_the_ring_can_be_left_out() -> None:
    """But for one of two fences: either shows copies that the barriers are initialised."""
    assert len(STATEMENTS) > 15
    spared = [each for each in STATEMENTS if not is_found(without([each]))]
    assert [TEXT[begin:end].split('"')[1] for begin, end in spared] == [
        "fence.mbarrier_init.release.cluster;",
        "fence.proxy.async.shared::cta;",
    ]
    assert is_found(without(spared))


def test_text_that_the_model_does_not_know_is_refused() -> None:
    for wrong in ('asm volatile("cp.async.wait_all;" ::: "memory");', "__nanosleep(20);", "goto end;"):
        text = TEXT.replace("    // The ring must outlive", f"    {wrong}\n    //")
        assert text != TEXT
        with pytest.raises(UnknownText):
            RingBlock(text, SHORT).explore()


def test_a_text_runs_as_it_is_written() -> None:
    """Precedence, increments, casts, structs and loops, by a function whose results are known."""
    text = """
    struct Pair { u32 one = 1, two = 0; __device__ void turn() { if (++one == 3) { one = 0; two ^= 1; } } };
    __device__ u32 f(u32 n) { return n ? n * 2 : 7; }
    __device__ u32 g(const i64* __restrict__ table, u32 n)
    {
        Pair pair;
        u32 sum = 0, seen = 0;
        for (u32 i = 0; i < n; ++i, pair.turn()) sum += (u32)(table[i] >> 4 & 3);
        do { seen += 1; } while (seen < 3 && !(seen == 2));
        if (n++ > 100) sum = 0; else if (n == 5) sum += 1000;
        return sum * 100 + 10 * pair.two + pair.one + f(0) + f(~0u & 1) + (seen << 1 | 1) * 100000;
    }
    """
    running = loaded(text, {})["g"](None, [16, 32, 1 << 40, 55], 4)
    with pytest.raises(StopIteration) as ended:
        next(running)
    assert ended.value.value == (1 + 2 + 0 + 3 + 1000) * 100 + 10 * 1 + 2 + 7 + 2 + 5 * 100000
