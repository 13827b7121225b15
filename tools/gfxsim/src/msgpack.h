// A reader of MessagePack values, as in a code object's metadata.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace gfxsim {

struct Value {
  std::int64_t number = 0;
  std::string text;
  std::vector<Value> list;
  std::map<std::string, Value> map;

  /// The member `name`, or an empty value.
  const Value& operator[](const std::string& name) const;
};

/// Throws Error.
Value parse_msgpack(std::span<const std::byte> data);

}  // namespace gfxsim
