"""tools/kernel_report.py and kernel_model.py: what they read, and that each thing they guard against is noticed."""

from __future__ import annotations

import copy
import json

import kernel_model
import kernel_report
import pytest

NAME = "gfx942 fa_forward_bf16_d128_plain"
LOOP = {"matrix": 96, "accumulator_moves": 0, "vector": 150}
KERNEL = {
    "vgpr": 250, "agpr": 0, "sgpr": 60, "vgpr_spills": 0, "sgpr_spills": 0, "scratch": 0, "lds": 16384, "threads": 256,
    "wave": 64, "occupancy": 2, "bytes": 15000, "loop": LOOP,
}  # fmt: skip
MANIFEST = "// comment\nFA_ROW(forward, matrix, bf16, 128, 128, plain,   Mfma, 16, 3, 4, 32, 2)\n"
TARGETS = """
#define FA_ROWS_cdna(...) FA_ROW_OF(cdna, __VA_ARGS__)
#define FA_ROWS_rdna4(...) FA_ROW_OF(rdna4, __VA_ARGS__)
#define FA_ROWS_matrix(...) FA_ROWS_cdna(__VA_ARGS__) FA_ROWS_rdna4(__VA_ARGS__)
"""

NOTES = """
amdhsa.kernels:
  - .agpr_count:     12
    .group_segment_fixed_size: 16384
    .max_flat_workgroup_size: 256
    .name:           fa_forward_bf16_d128_plain
    .private_segment_fixed_size: 20
    .sgpr_count:     60
    .sgpr_spill_count: 3
    .vgpr_count:     300
    .vgpr_spill_count: 5
    .wavefront_size: 64
"""
# A loop with a rare branch: 1 matrix instruction, 2 vector, 1 copy and 1 exp2 a round, and 3 more vector ones beside.
CODE = """
0000000000001000 <fa_forward_bf16_d128_plain>:
    s_mov_b32 s0, 0                                            // 000000001000:
    v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]    // 000000001008:
    v_accvgpr_read_b32 v1, a0                                  // 000000001010:
    v_exp_f32_e32 v1, v1                                       // 000000001018:
    v_mul_f32_e32 v1, v1, v1                                   // 000000001020:
    s_cbranch_vccz 5                                           // 000000001028: <fa_forward_bf16_d128_plain+0x48>
    v_add_f32_e32 v1, v1, v1                                   // 000000001030:
    v_add_f32_e32 v1, v1, v1                                   // 000000001038:
    v_add_f32_e32 v1, v1, v1                                   // 000000001040:
    v_mul_f32_e32 v1, v1, v1                                   // 000000001048:
    s_cbranch_scc1 65528                                       // 000000001050: <fa_forward_bf16_d128_plain+0x8>
    s_endpgm                                                   // 000000001058:
"""


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A folder with one code object, whose notes and disassembly are NOTES and CODE."""
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "forward.co").write_bytes(b"")
    monkeypatch.setattr(kernel_report, "tool", lambda name: name)
    monkeypatch.setattr(kernel_report, "run", lambda tool, *_: NOTES if tool == "readelf" else CODE)
    return tmp_path


def found(kernel, committed=KERNEL, manifest=MANIFEST):
    floors = kernel_report.occupancy_floors(manifest, TARGETS)
    return kernel_report.problems({NAME: kernel}, {NAME: committed} if committed else {}, floors)


def changed(**fields):
    kernel = copy.deepcopy(KERNEL)
    for field, value in fields.items():
        (kernel["loop"] if field in LOOP else kernel)[field] = value
    return kernel


def test_reads_metadata_and_the_cheap_path_of_the_main_loop(compiled):
    kernel = kernel_report.report(compiled)[NAME]
    assert (kernel["vgpr"], kernel["agpr"], kernel["vgpr_spills"], kernel["scratch"]) == (300, 12, 5, 20)
    assert kernel["occupancy"] == 1  # 512 registers, 300 to a wave
    assert kernel["bytes"] == 0x58
    loop = kernel["loop"]
    assert (loop["matrix"], loop["vector"], loop["accumulator_moves"], loop["transcendental"]) == (1, 2, 1, 1)


@pytest.mark.parametrize(
    "vgpr, lds, threads, waves",
    [
        (128, 0, 256, 4),
        (129, 0, 256, 3),
        (64, 0, 256, 8),
        (64, 65536, 256, 1),
        (64, 65536, 64, 1),
        (64, 32768, 512, 4),
        (512, 0, 256, 1),
    ],
)
def test_occupancy_of_cdna(vgpr, lds, threads, waves):
    assert kernel_report.occupancy(changed(vgpr=vgpr, lds=lds, threads=threads), "cdna") == waves


def test_every_kind_of_amd_target_has_a_machine():
    assert set(kernel_report.kinds_of_targets(kernel_report.TARGETS.read_text()).values()) == set(
        kernel_report.MACHINES
    )


def test_a_kernel_as_committed_passes():
    assert found(KERNEL) == []
    assert found(changed(bytes=16000, vgpr=256)) == []  # within 10 %


@pytest.mark.parametrize(
    "planted, reported",
    [
        ({"vgpr_spills": 3}, "3 spilled registers"),
        ({"scratch": 16}, "16 bytes of scratch"),
        ({"occupancy": 1}, "1 waves per SIMD, the manifest asks for 2"),
        ({"bytes": 17000}, "bytes grew from 15000 to 17000"),
        ({"vgpr": 290}, "vgpr grew from 250 to 290"),
        ({"lds": 32768}, "lds grew from 16384 to 32768"),
        ({"accumulator_moves": 40}, "accumulator_moves grew from 0 to 40"),
    ],
)
def test_reports_what_is_planted(planted, reported):
    (problem,) = found(changed(**planted))
    assert problem.startswith(NAME) and reported in problem


def test_reports_kernels_that_are_new_gone_or_not_in_the_manifest():
    assert "not in manifest_report.json" in found(KERNEL, committed=None)[0]
    assert "not in manifest.def" in found(KERNEL, manifest="")[0]
    floors = kernel_report.occupancy_floors(MANIFEST, TARGETS)
    other = NAME.replace("d128", "d64")
    assert f"{other}: gone" in kernel_report.problems({NAME: KERNEL}, {NAME: KERNEL, other: KERNEL}, floors)[0]
    not_compiled = NAME.replace("gfx942", "gfx1201")
    assert kernel_report.problems({NAME: KERNEL}, {NAME: KERNEL, not_compiled: KERNEL}, floors) == []


def test_every_row_of_the_manifest_has_a_floor():
    manifest, targets = kernel_report.MANIFEST.read_text(), kernel_report.TARGETS.read_text()
    floors = kernel_report.occupancy_floors(manifest, targets)
    assert {kind for kind, _ in floors} == {*kernel_report.kinds_of_targets(targets).values(), "cuda"}
    assert len(floors) > manifest.count("\nFA_ROW(") > 100
    committed = json.loads(kernel_report.COMMITTED.read_text())
    assert kernel_report.problems(committed, committed, floors) == []


def test_check_fails_on_the_command_line(compiled, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kernel_report.py", "--check", str(compiled)])
    monkeypatch.setattr(kernel_report, "COMMITTED", compiled / "committed.json")
    assert kernel_report.main() == 1
    assert "5 spilled registers" in capsys.readouterr().err


def test_update_commits_what_was_compiled(compiled, monkeypatch):
    monkeypatch.setattr("sys.argv", ["kernel_report.py", "--update", str(compiled)])
    monkeypatch.setattr(kernel_report, "COMMITTED", compiled / "committed.json")
    assert kernel_report.main() == 0
    assert json.loads(kernel_report.COMMITTED.read_text()) == kernel_report.report(compiled)


def answer(busy):
    mix = {"matrix": 96, "valu": 240, "trans": 24, "lds": 20}
    stalls = {"dep": 100.0, "lgkm": 600.0, "barrier": 10.0}
    fast = {"mix": mix, "stalls": stalls, "clocks_per_iteration": 4000.0, "matrix_busy": busy}
    return {"paths": {"fast": {**fast, "vector_busy": 0.6, "lds_busy": 0.5}}}


def test_model_reports_an_idle_matrix_unit():
    answers = {name: answer(floor) for name, floor in kernel_model.FLOORS.items()}
    assert kernel_model.below_floors(answers) == []
    answers["fa_forward_bf16_d128_plain"] = answer(0.59)
    (problem,) = kernel_model.below_floors(answers)
    assert "59%" in problem and "60%" in problem
    assert len(kernel_model.below_floors({})) == len(kernel_model.FLOORS)


def test_table_of_the_model():
    line = kernel_model.line("fa_forward_bf16_d128_plain", KERNEL, answer(0.71))
    assert line.split(" | ")[:5] == ["| `forward_bf16_d128_plain`", "250 (0)", "16384", "2", "96"]
    assert "**71 %**" in line and "lgkm 15 %, dep 2 %" in line
