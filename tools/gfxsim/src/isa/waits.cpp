// Waits for memory. gfx9: vmcnt covers loads and stores, lgkmcnt LDS and scalar loads. gfx10 and gfx11: stores have
// vscnt. gfx12: one counter each.
#include "waits.h"

#include "opcode_table.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

// A wait that ends with fewer operations on their way did something; what, is counted for statistics.
void wait_noting(Wave& wave, const Op& op, Stream stream, std::uint32_t count) {
  const std::uint32_t before = wave.done[stream];
  wait_for(wave, stream, count);
  if (wave.done[stream] == before || !wave.group->options.statistics) return;
  const bool only_stores = stream == kLoads && wave.last_load <= before;
  wave.group->counts.waited_for[op.index] |= std::uint8_t(1u << (only_stores ? kStores : stream));
}
void wait_lgkm(Wave& wave, const Op& op, std::uint32_t count) {
  wait_noting(wave, op, kLds, count);
  wait_noting(wave, op, kScalarLoads, count);
}

void run_waitcnt(Wave& wave, const Op& op) {
  if (op.offset0 != kNoWait) wait_noting(wave, op, kLoads, std::uint32_t(op.offset0));
  if (op.offset1 != kNoWait) wait_lgkm(wave, op, std::uint32_t(op.offset1));
}

void run_wait_loads(Wave& wave, const Op& op) { wait_noting(wave, op, kLoads, std::uint32_t(op.offset0)); }
void run_wait_lds(Wave& wave, const Op& op) { wait_noting(wave, op, kLds, std::uint32_t(op.offset0)); }
void run_wait_stores(Wave& wave, const Op& op) { wait_noting(wave, op, kStores, std::uint32_t(op.offset0)); }
void run_wait_scalar(Wave& wave, const Op& op) { wait_noting(wave, op, kScalarLoads, std::uint32_t(op.offset0)); }
void run_wait_loads_lds(Wave& wave, const Op& op) {
  wait_noting(wave, op, kLoads, std::uint32_t(op.offset0) >> 8 & 63);
  wait_noting(wave, op, kLds, std::uint32_t(op.offset0) & 63);
}
void run_wait_stores_lds(Wave& wave, const Op& op) {
  wait_noting(wave, op, kStores, std::uint32_t(op.offset0) >> 8 & 63);
  wait_noting(wave, op, kLds, std::uint32_t(op.offset0) & 63);
}
void run_nothing(Wave&, const Op&) {}

}  // namespace

void add_waits(OpcodeTable& t) {
  const auto add = [&](const char* name, Handler run) {
    t.add({name}, {"", run, Class::wait, 0, Literal::b32, kNoOperands});
  };
  add("s_waitcnt", run_waitcnt);
  add("s_wait_loadcnt", run_wait_loads);
  add("s_wait_storecnt", run_wait_stores);
  add("s_waitcnt_vscnt", run_wait_stores);
  add("s_wait_dscnt", run_wait_lds);
  add("s_wait_kmcnt", run_wait_scalar);
  add("s_wait_loadcnt_dscnt", run_wait_loads_lds);
  add("s_wait_storecnt_dscnt", run_wait_stores_lds);
  // Nothing that is modelled counts on these.
  for (const char* name : {"s_wait_samplecnt", "s_wait_bvhcnt", "s_wait_expcnt", "s_wait_xcnt", "s_waitcnt_depctr"})
    add(name, run_nothing);
}

}  // namespace gfxsim
