"""tools/cpu_loops.py: which loops it finds in a listing, and that a want of registers is noticed."""

from __future__ import annotations

import cpu_loops
import pytest

PRODUCT = "vdpbf16ps %zmm28,%zmm27,%zmm{}"


def listing(name, *instructions):
    """As objdump prints a function; `jump N` is a jump back to instruction N."""
    lines = [f"0000000000001000 <{name}>:"]
    for i, text in enumerate(instructions):
        if text.startswith("jump "):
            text = f"jne    {0x1000 + 4 * int(text.split()[1]):x} <{name}+0x0>"
        lines.append(f"    {0x1000 + 4 * i:x}:\t{text}")
    return "\n".join(lines) + "\n"


def strip(*beside):
    """A loop of 8 products around which another one goes."""
    products = [PRODUCT.format(n) for n in range(8)]
    inner = ["vpbroadcastd (%rax),%zmm27", "vmovdqu64 (%rdx),%zmm28", *products, *beside]
    return listing(
        "void flash_attn::cpu::multiply<4>(long, float*)", "xor %eax,%eax", *inner, "jump 1", "inc %rcx", "jump 0"
    )


def test_an_innermost_loop_is_described():
    (loop,) = cpu_loops.product_loops(strip())
    assert loop == {
        "function": "multiply<4>",
        "address": "1004",
        "multiply_adds": 8,
        "instructions": 11,
        "vectors_on_stack": 0,
        "others_on_stack": 0,
        "moved_addresses": 0,
    }


@pytest.mark.parametrize(
    "beside, vectors, others, moved, bad",
    [
        (["vmovaps %zmm8,0x8(%rsp)"], 1, 0, 0, False),
        (["vmovaps %zmm8,0x8(%rsp)", "vaddps 0x8(%rsp),%zmm9,%zmm8"], 2, 0, 0, True),
        (
            ["vmovups 0x40(%rdx),%zmm1", "vmovaps 0x10(%rip),%zmm2", "mov %rsp,%rax", "vmovq %xmm1,(%rax)"],
            0,
            0,
            0,
            False,
        ),
        (["vmovaps -0x50(%rbp),%ymm1", "mov %rax,(%rsp,%rax,8)"], 1, 1, 0, True),
        (["vmovq %xmm21,%rax", "vmovd %eax,%xmm3"], 0, 0, 2, True),
    ],
)
def test_what_is_for_want_of_registers_is_counted(beside, vectors, others, moved, bad):
    (loop,) = cpu_loops.product_loops(strip(*beside))
    counted = loop["vectors_on_stack"], loop["others_on_stack"], loop["moved_addresses"]
    assert counted == (vectors, others, moved)
    assert cpu_loops.too_many(loop) == bad


def test_in_memorys_time_addresses_may_be_on_the_stack():
    of_memory = {"multiply<4>": True, "accumulate_columns<4>": False}
    for function, bad in of_memory.items():
        code = strip("mov 0x8(%rsp),%rax", "mov %rax,0x8(%rsp)").replace("multiply<4>", function)
        (loop,) = cpu_loops.product_loops(code)
        assert cpu_loops.too_many(loop) == bad
        code = strip("vmovaps %zmm8,0x8(%rsp)", "vmovaps 0x8(%rsp),%zmm8").replace("multiply<4>", function)
        (loop,) = cpu_loops.product_loops(code)
        assert cpu_loops.too_many(loop)


@pytest.mark.parametrize(
    "instructions",
    [
        ["vpbroadcastd (%rax),%zmm27", *[PRODUCT.format(n) for n in range(7)], "jump 0"],  # too few
        [*[PRODUCT.format(n) for n in range(8)], "jump 0"],  # a polynomial: nothing is broadcast
        ["vpbroadcastd (%rax),%zmm27", *[PRODUCT.format(n) for n in range(8)], *["nop"] * 40, "jump 0"],  # mostly else
        ["vpbroadcastd (%rax),%zmm27", *[PRODUCT.format(n) for n in range(8)], "jump 40"],  # no loop
        ["vbroadcastss 0x10(%rip),%zmm27", *[PRODUCT.format(n) for n in range(8)], "jump 0"],  # a constant
    ],
)
def test_other_code_is_not_listed(instructions):
    assert not list(cpu_loops.product_loops(listing("f", *instructions)))


@pytest.mark.parametrize(
    "beside, vectors, others, bad",
    [
        ([], 0, 0, False),
        (["ldp q2, q0, [x1, #32]", "mov x3, sp", "ldr s6, [x0, x5]"], 0, 0, False),
        (["str q4, [sp, #16]", "ldr q4, [sp, #16]"], 2, 0, True),
        (["ldr q4, [sp]", "ldr x4, [sp, #160]"], 1, 1, True),
    ],
)
@pytest.mark.parametrize("product", ["fmla v{}.4s, v4.4s, v6.s[0]", "bfdot v{}.4s, v4.8h, v1.2h[0]"])
def test_loops_of_aarch64(product, beside, vectors, others, bad):
    products = [product.format(16 + n) for n in range(8)]
    code = listing("f", "ldr s6, [x0]", *products, *beside, "jump 0").replace("jne ", "b.ne ")
    (loop,) = cpu_loops.product_loops(code)
    assert (loop["multiply_adds"], loop["vectors_on_stack"], loop["others_on_stack"]) == (8, vectors, others)
    assert cpu_loops.too_many(loop) == bad


def test_check_names_what_is_wrong(monkeypatch, tmp_path, capsys):
    path, empty = tmp_path / "isa_avx512.cpp.o", tmp_path / "empty"
    path.write_bytes(b"")
    empty.mkdir()
    code = strip("vmovaps %zmm8,0x8(%rsp)", "vmovaps 0x8(%rsp),%zmm8")
    monkeypatch.setattr(cpu_loops, "disassemble", lambda _: code)
    cpu_loops.main([str(path)])
    assert "TOO MANY" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1 of 1 loops of products are short of registers"):
        cpu_loops.main(["--check", str(path)])
    code = strip()
    cpu_loops.main(["--check", str(path)])
    assert "1 loops of products, none" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no compiled isa_"):
        cpu_loops.main(["--check", str(empty)])
    code = listing("f", "ret")
    with pytest.raises(SystemExit, match="no loop of products"):
        cpu_loops.main(["--check", str(path)])
