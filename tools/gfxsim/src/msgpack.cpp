#include "msgpack.h"

#include "gfxsim/gfxsim.h"

namespace gfxsim {
namespace {

class Parser {
 public:
  explicit Parser(std::span<const std::byte> data) : data_(data) {}

  Value value() {
    const std::uint8_t tag = std::uint8_t(number(1));
    if (tag < 0x80) return integer(tag);
    if (tag < 0x90) return map(tag & 15);
    if (tag < 0xa0) return list(tag & 15);
    if (tag < 0xc0) return text(tag & 31);
    if (tag >= 0xe0) return integer(std::int8_t(tag));
    switch (tag) {
      case 0xc0:
      case 0xc2: return integer(0);
      case 0xc3: return integer(1);
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf: return integer(std::int64_t(number(1 << (tag - 0xcc))));
      case 0xd0: return integer(std::int8_t(number(1)));
      case 0xd1: return integer(std::int16_t(number(2)));
      case 0xd2: return integer(std::int32_t(number(4)));
      case 0xd3: return integer(std::int64_t(number(8)));
      case 0xd9:
      case 0xda:
      case 0xdb: return text(number(1 << (tag - 0xd9)));
      case 0xdc: return list(number(2));
      case 0xdd: return list(number(4));
      case 0xde: return map(number(2));
      case 0xdf: return map(number(4));
    }
    throw Error("the metadata holds a MessagePack type that code objects do not use");
  }

 private:
  std::uint64_t number(int bytes) {
    std::uint64_t out = 0;
    for (int i = 0; i < bytes; ++i) out = out << 8 | std::uint64_t(take(1)[0]);
    return out;
  }
  std::span<const std::byte> take(std::uint64_t bytes) {
    if (bytes > data_.size()) throw Error("the metadata is cut short");
    const auto out = data_.first(bytes);
    data_ = data_.subspan(bytes);
    return out;
  }
  static Value integer(std::int64_t number) {
    Value out;
    out.number = number;
    return out;
  }
  Value text(std::uint64_t bytes) {
    const auto data = take(bytes);
    Value out;
    out.text.assign(reinterpret_cast<const char*>(data.data()), data.size());
    return out;
  }
  Value list(std::uint64_t count) {
    Value out;
    for (; count; --count) out.list.push_back(value());
    return out;
  }
  Value map(std::uint64_t count) {
    Value out;
    for (; count; --count) {
      const std::string name = value().text;
      out.map[name] = value();
    }
    return out;
  }
  std::span<const std::byte> data_;
};

}  // namespace

const Value& Value::operator[](const std::string& name) const {
  static const Value empty;
  const auto found = map.find(name);
  return found == map.end() ? empty : found->second;
}

Value parse_msgpack(std::span<const std::byte> data) { return Parser(data).value(); }

}  // namespace gfxsim
