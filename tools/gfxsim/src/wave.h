// The state of one wave: registers, what is defined in them, and memory operations on their way.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "op.h"
#include "target.h"

namespace gfxsim {

struct Workgroup;

constexpr int kMaxLanes = 64;

// Memory operations of one stream complete in the order of issue (scalar loads: only all together). Flat accesses are
// operations of two streams.
enum Stream : std::uint8_t { kLoads, kStores, kLds, kScalarLoads, kStreams };

// Which lanes of a vector register hold a defined value, for the low and the high 16 bits.
struct Halves {
  std::uint64_t lo = 0, hi = 0;
  std::uint64_t both() const { return lo & hi; }
};

enum class WaveState : std::uint8_t { running, at_barrier, ended };

struct Wave {
  alignas(64) std::uint32_t v[kVectorCount][kMaxLanes];
  Halves v_defined[kVectorCount];
  std::uint32_t s[kScalarCount];
  std::uint32_t s_defined[kScalarCount];  // bit by bit
  bool scc = false, scc_defined = false;

  // Issued and completed operations of each stream; a register is pending while its ticket's number exceeds `done`.
  std::uint32_t issued[kStreams] = {}, done[kStreams] = {};
  std::uint32_t last_load = 0;             // the youngest operation of kLoads that is no store
  std::uint32_t last_flat[kStreams] = {};  // the youngest flat access of each stream, but to private memory
  std::uint32_t v_ticket[kVectorCount], s_ticket[kScalarCount];
  std::uint32_t v_flat[kVectorCount] = {};  // of a register that a flat load writes: its number in kLds as well
  // Barriers this wave has signalled and passed, and how many of its LDS operations ([0]) and loads ([1], DMA to LDS)
  // were complete when it signalled. A wave may be ahead of another by up to two signals, hence the ring.
  std::uint32_t signals = 0, passed = 0;
  std::uint32_t complete_at[4][2] = {};

  bool ieee = true;  // signalling NaN in minima and maxima
  int lanes = 64;
  int id = 0;
  std::uint64_t launched = 0;  // lanes that hold a work-item
  WaveState state = WaveState::running;
  std::uint32_t next = 0;  // index of the operation to execute
  const Op* barrier = nullptr;
  std::uint64_t executed = 0;
  std::uint8_t* scratch = nullptr;
  std::uint8_t* scratch_defined = nullptr;
  Workgroup* group = nullptr;
  const Target* target = nullptr;

  // Accesses up to this number are ordered before whatever wave `now` does.
  std::uint32_t visible_to(const Wave& now, bool dma) const { return complete_at[now.passed & 3][dma]; }

  std::uint64_t exec() const { return read_mask(kExec); }
  std::uint64_t all_lanes() const { return lanes == 64 ? ~std::uint64_t(0) : 0xffffffffu; }
  std::uint64_t read64(int reg) const {
    std::uint64_t value;
    std::memcpy(&value, &s[reg], sizeof value);
    return value;
  }
  std::uint64_t defined64(int reg) const {
    std::uint64_t value;
    std::memcpy(&value, &s_defined[reg], sizeof value);
    return value;
  }
  // Lane masks: one register in wave32, a pair in wave64.
  std::uint64_t read_mask(int reg) const { return lanes == 64 ? read64(reg) : s[reg]; }
  std::uint64_t defined_mask(int reg) const { return lanes == 64 ? defined64(reg) : s_defined[reg]; }
};

constexpr std::uint32_t kTicketBits = 28;
inline std::uint32_t make_ticket(Stream stream, std::uint32_t number) {
  return std::uint32_t(stream) << kTicketBits | number;
}
inline Stream ticket_stream(std::uint32_t ticket) { return Stream(ticket >> kTicketBits); }
inline std::uint32_t ticket_number(std::uint32_t ticket) { return ticket & ((1u << kTicketBits) - 1); }

// Findings. `lane` is -1 when the whole wave is meant. Throws StopWorkgroup when the launch has enough of them.
void report(Wave& wave, const Op& op, const char* kind, int lane, const std::string& message);
bool checking(const Wave& wave, unsigned check);

// Memory operations and the waits for them.
std::uint32_t issue(Wave& wave, Stream stream);
void mark_pending(Wave& wave, const Operand& result, Stream stream, std::uint32_t number, int dwords);
void wait_for(Wave& wave, Stream stream, std::uint32_t outstanding);

// Scalar operands.
std::uint64_t read_scalar(const Wave& wave, const Operand& operand);
bool scalar_defined(const Wave& wave, const Operand& operand);
void write_scalar(Wave& wave, const Op& op, const Operand& operand, std::uint64_t value, std::uint64_t defined);
// Writes a lane mask (the result of a comparison, a carry); EXEC included.
void write_mask(Wave& wave, const Op& op, const Operand& operand, std::uint64_t mask, std::uint64_t defined);

}  // namespace gfxsim
