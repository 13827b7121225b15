#include "target.h"

#include "gfxsim/gfxsim.h"

namespace gfxsim {

const Target& find_target(std::string_view name) {
  static const Target targets[] = {
      {.name = "gfx906", .packs_items = false},
      {.name = "gfx908", .packs_items = false},
      {.name = "gfx90a", .unified_registers = true},
      {.name = "gfx942", .unified_registers = true},
      {.name = "gfx950", .lds_banks = 64, .lds_bytes = 160 * 1024, .unified_registers = true},
      {.name = "gfx1030", .generation = 10, .counts_stores = true, .keeps_high_half = true, .packs_items = false},
      {.name = "gfx1100", .generation = 11, .counts_stores = true, .keeps_high_half = true},
      {.name = "gfx1101", .generation = 11, .counts_stores = true, .keeps_high_half = true},
      {.name = "gfx1102", .generation = 11, .counts_stores = true, .keeps_high_half = true},
      {.name = "gfx1103", .generation = 11, .counts_stores = true, .keeps_high_half = true},
      {.name = "gfx1150", .generation = 11, .counts_stores = true, .keeps_high_half = true},
      {.name = "gfx1151", .generation = 11, .counts_stores = true, .keeps_high_half = true},
      {.name = "gfx1200", .generation = 12, .counts_stores = true, .keeps_high_half = true, .groups_in_ttmp = true},
      {.name = "gfx1201", .generation = 12, .counts_stores = true, .keeps_high_half = true, .groups_in_ttmp = true},
  };
  std::string known;
  for (const Target& target : targets) {
    if (target.name == name) return target;
    known += (known.empty() ? "" : ", ") + target.name;
  }
  throw Error("target '" + std::string(name) + "' is not simulated; these are: " + known);
}

}  // namespace gfxsim
