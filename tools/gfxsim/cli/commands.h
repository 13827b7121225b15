#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gfxsim/gfxsim.h"

namespace gfxsim::cli {

struct Options {
  std::string command, file, kernel, target = "gfx942";
  bool json = false, fail_fast = false;
  Dim3 grid, block{64, 1, 1};
  std::uint32_t lds = 0;
  std::vector<std::string> arguments;
  std::string attention;                     // a problem for kernels of csrc/hip, instead of arguments
  int compare_orders = 0;                    // runs in this many wave orders
  std::map<std::string, std::string> dumps;  // buffer -> path
  LaunchOptions launch;
};

/// Throws Error naming the option that is wrong and what it accepts.
Options parse_options(const std::vector<std::string>& words);

/// Runs the command; the process's exit status.
int dispatch(const Options& options);

int run(const Options& options);

/// The arguments of a kernel, and the buffers behind them.
class ArgumentList {
 public:
  ArgumentList(Device& device, std::uint64_t seed) : device_(device), random_(seed) {}

  /// One --arg. Throws Error.
  void add(const std::string& text);
  /// A buffer of its own that is no argument by itself; returns its address.
  void* add_buffer(std::vector<std::byte> data, const std::string& name);
  /// "TYPE:COUNT" numbers from a normal distribution.
  std::vector<std::byte> random_bytes(const std::string& text);
  void add_bytes(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }

  const std::vector<std::byte>& bytes() const { return bytes_; }
  /// Writes a buffer to a file, by its name or by its argument's number.
  void dump(const std::string& name, const std::string& path) const;

 private:
  struct NamedBuffer {
    std::string name;
    std::vector<std::byte> data;
  };
  template <class T>
  void put(T value);

  Device& device_;
  std::mt19937_64 random_;
  std::vector<std::byte> bytes_;
  std::deque<NamedBuffer> buffers_;
  std::size_t count_ = 0;
};

/// Fills `arguments` for one kernel of csrc/hip from "B=1,H=2,S=512,..."; sets grid and block. Throws Error.
void add_attention(const std::string& problem, const Options& options, ArgumentList& arguments, Dim3& grid,
                   Dim3& block);

std::vector<std::byte> read_file(const std::string& path);

/// Text as a JSON string, quotation marks included.
std::string quoted(const std::string& text);

}  // namespace gfxsim::cli
