"""A wheel's machine code: a mover of any public model begins without a compiler, and its own kernels follow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from test_programs import FLAGSHIPS, GPU, RULES, Shape, copies, known_of, memories_of, no_gpu, ring

from kvmover.kernels import ahead_of_time, code_store, convert, digest, launch, rows
from kvmover.kernels.ahead_of_time import CompileError, Worker
from kvmover.kernels.code_store import Code
from kvmover.kernels.general import general
from kvmover.kernels.launch import Program
from kvmover.layout import Codec, CodecPart, Component, Fleet
from kvmover.plan.model_config import cache_of
from kvmover.plan.public_models import PUBLIC
from kvmover.transfer.memory import shipped
from kvmover.transfer.memory.programs import Compiler, Way, kept_programs
from kvmover.transfer.memory.work import Programs, launches
from perf import machine_code
from tests.counting_driver import CountingDriver
from tests.proofs import family

__all__ = ["no_gpu", "ring"]

#: DeepSeek-V4 has a row every 128 tokens, and no smaller pages.
PAGES = {"deepseek-v4": 128}


@dataclass(frozen=True)
class Model(Shape):
    """A public model between fleets. `narrow`: whether each end keeps its attention in fp8."""

    narrow: tuple[bool, bool] = (False, False)

    def kept(self, side: int) -> tuple[Component, ...]:
        return tuple(in_fp8(each) if self.narrow[side] else each for each in self.components)


def in_fp8(component: Component) -> Component:
    if component.name not in shipped.CONVERTED or component.dtype != "bfloat16":
        return component
    return component.kept_as(Codec.fp8_ds_mla() if component.name == "mla" else Codec.fp8("bfloat16", component.dim))


def pairs(name: str, tps: Sequence[int], pages: Sequence[int]) -> Iterator[Model]:
    components = cache_of(PUBLIC[name]).components
    for (tp_src, tp_dst), (page_src, page_dst) in product(product(tps, repeat=2), product(pages, repeat=2)):
        ends = (tp_src, page_src), (tp_dst, page_dst)
        src, dst = (Fleet(tp=tp, page_tokens=max(page, PAGES.get(name, 1))) for tp, page in ends)
        orders = ("NHD", "HND") if page_src == page_dst else ("HND", "NHD")
        for narrow in product((False, True), repeat=2):
            yield Model(components, src, dst, orders, narrow=narrow)


@dataclass
class Wheel:
    """Programs whose code a wheel has, and the compiles that a worker was asked for, each with what was ready then."""

    programs: set[Program]
    compiler: Compiler = field(default_factory=lambda: Compiler(GPU))
    asked: list[tuple[Program, bool]] = field(default_factory=list[tuple[Program, bool]])
    gate: threading.Event = field(default_factory=threading.Event)

    def compile(self, worker: Worker, program: Program, architecture: int) -> Code:
        self.asked.append((program, self.compiler.is_ready("decode-0", *Way)))
        assert self.gate.wait(20)
        return Code(b"kernel", "kernel", 128, 0)


@pytest.fixture
def wheel(no_gpu: CountingDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheel]:
    found = Wheel(shipped.programs(90))
    names = {program.shipped_name(90) for program in found.programs}
    monkeypatch.setattr(launch, "find", lambda name: Code(b"kernel", "kernel", 128, 0) if name in names else None)
    monkeypatch.setattr(Worker, "compile", lambda *given: found.compile(*given))
    monkeypatch.setattr(convert, "casts", lambda device: 1)
    yield found
    found.gate.set()
    found.compiler.close()


def until_ready(compiler: Compiler) -> None:
    deadline = time.monotonic() + 20
    while not compiler.is_ready("decode-0", *Way):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("name", PUBLIC)
def test_a_mover_of_a_public_model_begins_with_no_compile(name: str, digests: bool, wheel: Wheel) -> None:
    """The worker is asked once all is ready, and copies have their own kernels after it. Digests of pages that are
    mapped from a peer wait: their rows join the heads of a rank.
    """
    shape = next(pairs(name, (2,), (16,)))
    for side in range(2):
        (own, theirs), memory = shape.ends()[:: 1 - 2 * side], memories_of(shape)[side]
        memory = replace(memory, mapped=()) if digests else memory
        wheel.compiler.seated("decode-0", own, theirs, memory, replace(RULES, digests=digests))
        until_ready(wheel.compiler)
        begun = [wheel.compiler.programs("decode-0", way) for way in Way]
        assert any(begun)
        before = {program for program, _ in wheel.asked}
        assert {program for each in begun if each for program in each.all()} <= wheel.programs | before
        wheel.gate.set()
        for future in list(wheel.compiler._begun.values()):
            future.result(20)
        own_programs = [wheel.compiler.programs("decode-0", way) for way in Way]
        assert [each is None for each in own_programs] == [each is None for each in begun]
        compiled = {program for program, _ in wheel.asked}
        needed = {program for each in own_programs if each for program in each.all()}
        assert needed <= compiled | wheel.programs
        wheel.gate.clear()
        wheel.compiler.parted("decode-0")
    assert all(ready for _, ready in wheel.asked)


#: Sizes of tensor parallelism, and of pages.
FEW, MOST, ALL = ((1, 8), (1, 64)), ((1, 2, 8), (1, 16, 64)), ((1, 2, 4, 8), (1, 16, 32, 64, 128))


@pytest.mark.parametrize(
    ("name", "tps", "pages"),
    family(
        [(name, *sizes) for name in PUBLIC for sizes in (FEW, MOST, ALL)],
        few=[(name, *FEW) for name in PUBLIC],
        proved=[(name, *MOST) for name in PUBLIC],
    ),
    ids=str,
)
def test_all_that_a_public_model_needs_is_in_the_wheel(
    name: str, tps: Sequence[int], pages: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "casts", lambda device: 1)
    there = shipped.programs(90)
    for shape in pairs(name, tps, pages):
        for way, found in known_of(shape).items():
            alone = Programs(found.move, convert=found.convert) if way in (Way.WRITE, Way.READ) else found
            missing = [program for program in alone.all() if not {program, general(program)} & there]
            assert not missing, (shape, way)


@pytest.mark.parametrize("name", ["Llama TP2 to TP8", "Llama TP4 to TP2", "MLA 64 to 64", "MLA 16 to 64"])
def test_a_flagship_needs_no_compile_at_all(name: str) -> None:
    there = shipped.programs(90)
    found = known_of(FLAGSHIPS[name])
    assert {program for way in (Way.GATHER, Way.SCATTER) for program in found[way].all()} <= there


def generals(programs: Programs) -> Programs:
    found = {each.name: getattr(programs, each.name) for each in fields(Programs)}
    return Programs(**{name: program and (general(program) or program) for name, program in found.items()})


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_general_kernels_serve_every_request(name: str) -> None:
    shape = FLAGSHIPS[name]
    known = {way: generals(programs) for way, programs in known_of(shape).items()}
    there = {program for programs in known.values() for program in programs.all()}
    for copy in copies(shape, 10, 4):
        total = None if copy.work.logicals is None else torch.zeros(1, dtype=torch.int64)
        for ready in launches(copy.work.using(known[copy.way]), RULES.sms, total):
            assert ready.program in there


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")  # Triton's own
@pytest.mark.parametrize("architecture", [80, 100])
def test_general_kernels_access_16_bytes_and_spill_a_register_at_most(architecture: int) -> None:
    """Where rows allow it: those of 8 to 1 bytes have code of their own beside."""
    for program in (rows.general_program(), digest.general_program(), digest.general_program("src")):
        found = machine_code.of_program(program, architecture)
        assert found.spills <= 2, "stored, and loaded once"
        assert found.registers * 32 * program.config.warps <= 1 << 16
        assert 128 in found.widths()["LDG"]


def test_heads_of_another_size_have_no_general_digest_and_wait_for_the_compiler(wheel: Wheel) -> None:
    """Copies without digests do not."""
    component = Component.attention(2, 8, 96, "bfloat16")
    shape = Shape((component,), Fleet(page_tokens=16), Fleet(page_tokens=16))
    found = known_of(shape)[Way.GATHER]
    assert found.digest is not None
    assert found.move is not None
    assert general(found.digest) is None
    assert general(found.move) == rows.general_program()
    assert kept_programs(found, GPU) is None
    plain = kept_programs(Programs(move=found.move), GPU)
    assert plain == Programs(move=rows.general_program())


def test_a_conversion_of_no_public_model_waits_for_the_compiler(wheel: Wheel) -> None:
    half = Codec("bfloat16", (CodecPart(96, "float8_e4m3fn"),))
    component = Component.attention(2, 8, 96, "bfloat16")
    shape = Shape((component,), Fleet(page_tokens=16), Fleet(page_tokens=16), codecs=(None, half))
    found = known_of(shape)[Way.GATHER]
    assert found.convert is not None
    assert kept_programs(Programs(convert=found.convert), GPU) is None


def test_general_kernels_stay_where_the_compiler_fails(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(worker: Worker, program: Program, architecture: int) -> Code:
        raise CompileError("ptxas is not there")

    monkeypatch.setattr(Worker, "compile", failed)
    shape = FLAGSHIPS["MLA 16 to 64"]
    src, dst = Shape(shape.components, Fleet(tp=2, page_tokens=8), Fleet(page_tokens=8)).ends()
    wheel.compiler.seated("decode-0", src, dst, memories_of(shape)[0], RULES)
    for future in list(wheel.compiler._begun.values()):
        future.result(20)
    found = wheel.compiler.programs("decode-0", Way.GATHER)
    assert found is not None
    assert found.move == rows.general_program()
    assert "general kernels stay in use: ptxas is not there" in caplog.text


def test_what_is_compiled_for_a_wheel_is_found_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two processes, with code for whichever of them came first."""
    program, other = (
        rows.general_program(),
        digest.program(digest.general_program().shapes[-1:], launch.RowConfig(), None),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    monkeypatch.setattr(code_store, "SHIPPED", tmp_path / "shipped")
    shipped.compile_all([(program, 90), (program, 80), (other, 120)], code_store.SHIPPED)
    for each, architecture in ((program, 90), (program, 80), (other, 120)):
        found = code_store.find(each.shipped_name(architecture))
        assert found is not None
        assert found.cubin.startswith(b"\x7fELF")
        assert found.name == each.kernel.__name__
        assert found.compiler.startswith("Triton 3.")
    assert len(list(code_store.SHIPPED.iterdir())) == 3
    assert code_store.find(program.shipped_name(100)) is None


def test_each_architecture_has_as_many_kernels_and_only_conversions_differ() -> None:
    of = {each: shipped.programs(each) for each in shipped.ARCHITECTURES}
    assert len({len(programs) for programs in of.values()}) == 1
    assert of[90] == of[100] == of[120]
    differ = {program.kernel for program in of[80] ^ of[90]}
    assert differ == {convert.convert_kernel, convert.convert_and_digest_kernel}
    names = {program.shipped_name(each) for each, programs in of.items() for program in programs}
    assert len(names) == 4 * len(of[90])
    assert all(
        ahead_of_time.program_of(json.loads(json.dumps(ahead_of_time.written(each, 90)))) == each for each in of[90]
    )
