// Names of launch options, for the command line and the HIP library.
#include <map>

#include "gfxsim/gfxsim.h"
#include "text.h"

namespace gfxsim {

Schedule parse_schedule(std::string_view name) {
  if (name == "in-order") return Schedule::in_order;
  if (name == "round-robin") return Schedule::round_robin;
  if (name == "random") return Schedule::random;
  throw Error("schedule takes in-order, round-robin or random, not '" + std::string(name) + "'");
}

unsigned parse_checks(std::string_view names) {
  const std::map<std::string, unsigned> known = {
      {"all", kCheckAll},     {"none", kCheckNone},         {"undefined", kCheckUndefined},   {"races", kCheckRaces},
      {"waits", kCheckWaits}, {"barriers", kCheckBarriers}, {"unit-checks", kCheckUnitChecks}};
  const std::string accepted = "check takes all, none, or some of undefined, races, waits, barriers and unit-checks";
  unsigned out = 0;
  const std::vector<std::string> parts = split(names, ',');
  if (parts.empty()) throw Error(accepted + ", not ''");
  for (const std::string& name : parts) {
    const auto found = known.find(name);
    if (found == known.end()) throw Error(accepted + ", not '" + name + "'");
    out |= found->second;
  }
  return out;
}

}  // namespace gfxsim
