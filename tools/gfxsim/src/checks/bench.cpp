#include "bench.h"

#include <cstdio>
#include <set>

#include "opcode_table.h"

namespace gfxsim {

Bench::Bench(const std::string& target, std::uint64_t seed) : random_(seed + 1), buffer_(kBufferBytes) {
  program_.target = &find_target(target);
  options_.checks = kCheckUndefined | kCheckRaces | kCheckBarriers;
  for (std::uint8_t& byte : buffer_) byte = std::uint8_t(word());
  const auto begin = buffer_address();
  memory_.add({begin, begin + buffer_.size(), true, "buffer"});
  group_ = std::make_unique<Workgroup>(program_, memory_, options_, kernel_);
  group_->waves.push_back(std::make_unique<Wave>());
  group_->lds.reset(kLdsBytes, 1);
  for (std::uint32_t i = 0; i < kLdsBytes; ++i) *group_->lds.data(i) = std::uint8_t(word());
  for (std::uint32_t i = 0; i < kLdsBytes / 4; ++i) group_->lds.set_defined(i, 3, 3);
  Wave& w = wave();
  w.group = group_.get();
  w.target = program_.target;
  w.lanes = program_.target->generation == 9 ? 64 : 32;
  w.launched = w.all_lanes();
  std::fill_n(w.v_ticket, std::size_t(kVectorCount), 0);
  std::fill_n(w.s_ticket, std::size_t(kScalarCount), 0);
  group_->scratch_bytes = 64;
  group_->scratch.assign(std::size_t(64 * w.lanes), 0);
  group_->scratch_defined.assign(std::size_t(64 * w.lanes), 1);
  w.scratch = group_->scratch.data();
  w.scratch_defined = group_->scratch_defined.data();
  randomise_registers();
}

void Bench::randomise_registers() {
  Wave& w = wave();
  for (int reg = 0; reg < kVectorCount; ++reg) {
    w.v_defined[reg] = {~std::uint64_t(0), ~std::uint64_t(0)};
    if (reg >= 48 && reg < kAgpr0) continue;  // no check uses these
    if (reg >= kAgpr0 + 48) continue;
    for (std::uint32_t& lane : w.v[reg]) lane = word();
  }
  randomise_scalars();
}

void Bench::randomise_scalars() {
  Wave& w = wave();
  for (int reg = 0; reg < kScalarCount; ++reg) {
    w.s[reg] = word();
    w.s_defined[reg] = ~0u;
  }
  w.s[kNull] = 0;
  w.scc = word() & 1;
  w.scc_defined = true;
  choose_exec(0);
}

void Bench::choose_exec(int round) {
  Wave& w = wave();
  const std::uint64_t exec = round % 3 == 2 ? random_() : ~std::uint64_t(0);
  set_scalar64(kExec, exec & w.all_lanes());
}

std::string Bench::execute(const std::string& instruction) {
  if (op_.text != instruction) op_ = parse_instruction(target(), instruction, 0x1000, 4);
  if (!op_.run) return "cannot be decoded: " + op_.unsupported;
  op_.run(wave(), op_);
  if (group_->reports.empty()) return "";
  const std::string out = "reported " + group_->reports[0].to_string();
  group_->reports.clear();
  return out;
}

void add_check(Checks& checks, const std::string& instruction, const std::string& target,
               const std::function<std::string(Bench&, const std::string&)>& run) {
  const std::string name = canonical_name(instruction.substr(0, instruction.find(' ')));
  const Opcode* opcode = opcode_table().find(name);
  std::vector<std::string> targets = {"gfx942", "gfx1201"};
  if (!target.empty()) targets = {target};
  for (const std::string& on : targets) {
    checks.push_back({opcode ? opcode->name : name, on, instruction, [=](std::uint64_t seed) {
                        Bench bench(on, seed);
                        return run(bench, instruction);
                      }});
  }
}

const std::vector<OpcodeCheck>& opcode_checks() {
  static const Checks checks = [] {
    Checks out;
    for (auto* add : {add_float_checks, add_integer_checks, add_packed_checks, add_half_register_checks,
                      add_compare_checks, add_scalar_checks, add_cross_lane_checks, add_lds_checks, add_memory_checks,
                      add_matrix_checks, add_control_checks})
      add(out);
    return out;
  }();
  return checks;
}

bool is_unit_checked(std::string_view name) {
  static const std::set<std::string, std::less<>> checked = [] {
    std::set<std::string, std::less<>> out;
    for (const OpcodeCheck& check : opcode_checks()) out.insert(check.opcode);
    return out;
  }();
  const Opcode* opcode = opcode_table().find(name);
  return checked.count(opcode ? std::string_view(opcode->name) : name) != 0;
}

std::string hexadecimal(std::uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace gfxsim
