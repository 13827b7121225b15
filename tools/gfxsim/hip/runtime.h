// One simulated GPU behind HIP's functions: its configuration, modules, memory, and launches.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "abi.h"
#include "gfxsim/gfxsim.h"

namespace gfxsim::hip {

// What a call returns besides hipSuccess, and why.
struct Failure {
  Status status;
  std::string message;
};

struct Configuration {
  std::string target = "gfx942";
  LaunchOptions options;
};

struct Range {
  std::uint64_t begin = 0, end = 0;
  bool writable = true;
  std::string name;
};

// Overlapping ranges become one, writable if one of them is.
std::vector<Range> merge(std::vector<Range> ranges);

struct Function;
struct LoadedImage {
  std::shared_ptr<const Module> module;
  std::deque<Function> functions;
};
struct Function {
  std::shared_ptr<const Module> module;
  const KernelInfo* kernel;
};

class Runtime {
 public:
  /// Reads GFXSIM_TARGET, GFXSIM_SCHEDULE, GFXSIM_SEED, GFXSIM_CHECK and GFXSIM_THREADS when first used. Throws
  /// Failure.
  static Runtime& get();

  void configure(Configuration configuration);
  Configuration configuration() const;

  void* load(const void* image);
  void unload(void* module);
  void* function(void* module, const char* name);
  /// Runs to the end; findings throw Failure.
  void launch(void* function, Dim3 grid, Dim3 block, std::uint32_t lds, void** params, void** extra);

  void* allocate(std::size_t bytes);
  void release(void* pointer);

  static inline std::atomic<unsigned long long> launches{0}, instructions{0};

 private:
  Runtime();
  Function find_function(void* function) const;
  std::vector<Range> reachable() const;

  mutable std::mutex mutex_;
  Configuration configuration_;
  std::map<void*, std::unique_ptr<LoadedImage>> modules_;
  std::map<std::uint64_t, std::uint64_t> allocations_;  // address -> bytes
};

/// Buffers of the calling thread.
std::vector<Range>& thread_buffers();

/// Throws Error naming the argument that is wrong. Null text leaves a field as it is.
Configuration read_configuration(const char* target, const char* schedule, const char* seed, const char* checks,
                                 const char* threads);

}  // namespace gfxsim::hip
