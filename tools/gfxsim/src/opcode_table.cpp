#include "opcode_table.h"

#include "gfxsim/gfxsim.h"

namespace gfxsim {

OpcodeTable::OpcodeTable() {
  for (auto* add_group : {add_scalar, add_scalar_float, add_control, add_waits, add_float, add_transcendental,
                          add_integer, add_bits, add_carry, add_compare, add_convert, add_packed, add_cross_lane,
                          add_lds, add_global, add_scalar_memory, add_matrix})
    add_group(*this);
}

void OpcodeTable::add(Names names, Opcode opcode) {
  for (const char* name : names) {
    opcode.name = *names.begin();
    if (!opcodes_.emplace(name, opcode).second) throw Error(std::string("opcode ") + name + " is registered twice");
  }
}

const Opcode* OpcodeTable::find(std::string_view name) const {
  const auto found = opcodes_.find(name);
  return found == opcodes_.end() ? nullptr : &found->second;
}

const OpcodeTable& opcode_table() {
  static const OpcodeTable table;
  return table;
}

const char* class_name(Class c) {
  constexpr const char* names[] = {"salu",   "branch",     "wait", "barrier", "valu", "trans",
                                   "matrix", "cross_lane", "lds",  "smem",    "vmem", "flat"};
  return names[int(c)];
}

std::vector<std::string> supported_opcodes(std::string_view target) {
  find_target(target);
  std::vector<std::string> names;
  for (const auto& [name, opcode] : opcode_table().all()) names.push_back(name);
  return names;
}

}  // namespace gfxsim
