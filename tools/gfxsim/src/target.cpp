#include "target.h"

#include "gfxsim/gfxsim.h"

namespace gfxsim {

const Target& find_target(std::string_view name) {
  static const Target targets[] = {
      {"gfx90a", 9, false, false, false, 32},
      {"gfx942", 9, false, false, false, 32},
      {"gfx950", 9, false, false, false, 64, 160 * 1024},
      {"gfx1030", 10, true, true, false, 32},
      {"gfx1200", 12, true, true, true, 32},
      {"gfx1201", 12, true, true, true, 32},
  };
  std::string known;
  for (const Target& target : targets) {
    if (target.name == name) return target;
    known += (known.empty() ? "" : ", ") + target.name;
  }
  throw Error("target '" + std::string(name) + "' is not simulated; these are: " + known);
}

}  // namespace gfxsim
