// Loading test kernels and launching them on vectors.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gfxsim/gfxsim.h"

namespace gfxsim::testing {

inline std::vector<std::byte> read_code_object(const std::string& name, const std::string& target) {
  std::ifstream file(std::string(GFXSIM_TEST_KERNELS) + "/" + name + "_" + target + ".co", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  EXPECT_FALSE(bytes.empty()) << "no test kernels " << name << " for " << target;
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  return {data, data + bytes.size()};
}

// Kernel arguments at their natural alignment, as the compiler lays them out. Vectors are registered and passed by
// address.
class Arguments {
 public:
  explicit Arguments(Device& device) : device_(device) {}
  ~Arguments() {
    for (const void* pointer : registered_) device_.unregister_buffer(pointer);
  }
  template <class T, class Allocator>
  Arguments& operator()(std::vector<T, Allocator>& buffer, const char* name = "") {
    device_.register_buffer(buffer.data(), buffer.size() * sizeof(T), name);
    registered_.push_back(buffer.data());
    return (*this)(buffer.data());
  }
  template <class T>
  Arguments& operator()(T value) {
    bytes_.resize((bytes_.size() + sizeof(T) - 1) / sizeof(T) * sizeof(T) + sizeof(T));
    std::memcpy(bytes_.data() + bytes_.size() - sizeof(T), &value, sizeof(T));
    return *this;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  Device& device_;
  std::vector<std::byte> bytes_;
  std::vector<const void*> registered_;
};

// Every test of kernels runs on every target, in three wave orders.
class OnTarget : public ::testing::TestWithParam<std::string> {
 protected:
  OnTarget() : device(GetParam()) {}
  std::shared_ptr<const Module> load(const std::string& name) {
    return device.load(read_code_object(name, GetParam()));
  }
  Device device;
};

inline std::vector<LaunchOptions> all_schedules() {
  std::vector<LaunchOptions> out;
  for (const Schedule schedule : {Schedule::in_order, Schedule::round_robin, Schedule::random}) {
    LaunchOptions options;
    options.schedule = schedule;
    options.seed = 7;
    out.push_back(options);
  }
  return out;
}

inline void expect_no_reports(const LaunchResult& result) {
  for (const Report& report : result.reports) ADD_FAILURE() << report.to_string();
}

}  // namespace gfxsim::testing
