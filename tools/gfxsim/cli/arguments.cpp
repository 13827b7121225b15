// Kernel arguments from the command line.
#include <bit>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "commands.h"

namespace gfxsim::cli {
namespace {

std::uint16_t round_to_half(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits < 0x38800000) return sign;  // random numbers this small are of no interest
  return std::uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

}  // namespace

template <class T>
void ArgumentList::put(T value) {
  const std::size_t at = (bytes_.size() + sizeof(T) - 1) / sizeof(T) * sizeof(T);
  bytes_.resize(at + sizeof(T));
  std::memcpy(bytes_.data() + at, &value, sizeof value);
}

void ArgumentList::add(const std::string& text) {
  const auto colon = text.find(':');
  if (colon == std::string::npos) throw Error("--arg takes KIND:VALUE, not '" + text + "'");
  const std::string kind = text.substr(0, colon), value = text.substr(colon + 1), name = std::to_string(count_++);
  if (kind == "i32") {
    put(std::int32_t(std::strtoll(value.c_str(), nullptr, 0)));
  } else if (kind == "i64") {
    put(std::int64_t(std::strtoll(value.c_str(), nullptr, 0)));
  } else if (kind == "f32") {
    put(std::strtof(value.c_str(), nullptr));
  } else if (kind == "buffer") {
    put(add_buffer(std::vector<std::byte>(std::strtoull(value.c_str(), nullptr, 0)), name));
  } else if (kind == "file") {
    put(add_buffer(read_file(value), name));
  } else if (kind == "random") {
    put(add_buffer(random_bytes(value), name));
  } else if (kind == "bytes") {
    for (std::size_t i = 0; i + 1 < value.size(); i += 2)
      bytes_.push_back(std::byte(std::strtoul(value.substr(i, 2).c_str(), nullptr, 16)));
  } else {
    throw Error("--arg takes i32, i64, f32, buffer, random, file or bytes, not '" + kind + "'");
  }
}

void* ArgumentList::add_buffer(std::vector<std::byte> data, const std::string& name) {
  buffers_.push_back({name, std::move(data)});
  std::vector<std::byte>& stored = buffers_.back().data;
  device_.register_buffer(stored.data(), stored.size(), name);
  return stored.data();
}

std::vector<std::byte> ArgumentList::random_bytes(const std::string& text) {
  const auto colon = text.find(':');
  const std::string type = text.substr(0, colon);
  const std::size_t count = colon == std::string::npos ? 0 : std::strtoull(text.c_str() + colon + 1, nullptr, 0);
  if (count == 0 || (type != "f32" && type != "f16" && type != "bf16"))
    throw Error("--arg random takes TYPE:COUNT with TYPE f32, f16 or bf16, not '" + text + "'");
  const std::size_t size = type == "f32" ? 4 : 2;
  std::vector<std::byte> out(count * size);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = normal(random_);
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint16_t small = type == "f16" ? round_to_half(value) : std::uint16_t(bits >> 16);
    std::memcpy(out.data() + i * size, size == 4 ? static_cast<const void*>(&bits) : &small, size);
  }
  return out;
}

void ArgumentList::dump(const std::string& name, const std::string& path) const {
  std::string known;
  for (const NamedBuffer& buffer : buffers_) {
    known += (known.empty() ? "" : ", ") + buffer.name;
    if (buffer.name != name) continue;
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(buffer.data.data()), std::streamsize(buffer.data.size()));
    if (!file.flush()) throw Error("cannot write '" + path + "'");
    return;
  }
  throw Error("--dump: there is no buffer '" + name + "'; there are " + known);
}

}  // namespace gfxsim::cli
