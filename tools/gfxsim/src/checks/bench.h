// Where unit checks execute single instructions: one wave with everything defined, LDS, and a buffer of device memory.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "parse.h"
#include "program.h"
#include "workgroup.h"

namespace gfxsim {

class Bench {
 public:
  static constexpr std::uint32_t kLdsBytes = 4096, kBufferBytes = 8192;

  Bench(const std::string& target, std::uint64_t seed);

  // Decodes and executes; returns why it could not, or what was reported, or "".
  std::string execute(const std::string& instruction);
  // The decoded form of the last instruction.
  const Op& op() const { return op_; }

  std::uint32_t word() { return std::uint32_t(random_()); }
  void randomise_registers();
  void randomise_scalars();
  // Full EXEC in most rounds, a random one in the others.
  void choose_exec(int round);

  Wave& wave() { return *group_->waves[0]; }
  Workgroup& group() { return *group_; }
  int lanes() const { return group_->waves[0]->lanes; }
  std::uint8_t* buffer() { return buffer_.data(); }
  std::uint64_t buffer_address() const { return reinterpret_cast<std::uint64_t>(buffer_.data()); }
  const Target& target() const { return *program_.target; }
  void set_scalar(int reg, std::uint32_t value) { wave().s[reg] = value; }
  void set_scalar64(int reg, std::uint64_t value) {
    wave().s[reg] = std::uint32_t(value);
    wave().s[reg + 1] = std::uint32_t(value >> 32);
  }

 private:
  std::mt19937_64 random_;
  Program program_;
  Memory memory_;
  LaunchOptions options_;
  std::string kernel_ = "unit check";
  std::vector<std::uint8_t> buffer_;
  std::unique_ptr<Workgroup> group_;
  Op op_;
};

using Checks = std::vector<OpcodeCheck>;

// Adds `run` as the check of the opcode of `instruction`, on `target` or (empty) on one target of each wave size.
void add_check(Checks& checks, const std::string& instruction, const std::string& target,
               const std::function<std::string(Bench&, const std::string&)>& run);

void add_float_checks(Checks& checks);
void add_integer_checks(Checks& checks);
void add_packed_checks(Checks& checks);
void add_half_register_checks(Checks& checks);
void add_compare_checks(Checks& checks);
void add_scalar_checks(Checks& checks);
void add_cross_lane_checks(Checks& checks);
void add_lds_checks(Checks& checks);
void add_memory_checks(Checks& checks);
void add_matrix_checks(Checks& checks);
void add_control_checks(Checks& checks);

std::string hexadecimal(std::uint64_t value);

}  // namespace gfxsim
