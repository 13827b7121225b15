#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace gfxsim::hip {
namespace {

constexpr std::align_val_t kAlignment{256};

// Bytes of the ELF file at `image`: up to the last of its headers and segments.
std::size_t image_bytes(const void* image) {
  const auto field = [&]<class T>(T value, std::size_t offset) {
    std::memcpy(&value, static_cast<const std::byte*>(image) + offset, sizeof value);
    return value;
  };
  if (!image) throw Failure{kInvalidValue, "image is null"};
  if (std::memcmp(image, "\x7f\x45LF\2\1", 6) != 0)
    throw Failure{kInvalidImage, "image is not a little-endian ELF64 file"};
  const auto programs_at = field(std::uint64_t(), 32), sections_at = field(std::uint64_t(), 40);
  const std::uint64_t program_bytes = field(std::uint16_t(), 54), programs = field(std::uint16_t(), 56);
  const std::uint64_t section_bytes = field(std::uint16_t(), 58), sections = field(std::uint16_t(), 60);
  std::uint64_t end = std::max(programs_at + programs * program_bytes, sections_at + sections * section_bytes);
  for (std::uint64_t i = 0; i < programs; ++i) {
    const std::uint64_t header = programs_at + i * program_bytes;
    end = std::max(end, field(std::uint64_t(), header + 8) + field(std::uint64_t(), header + 32));
  }
  return end;
}

bool is_hidden(const KernelArgument& argument) { return argument.kind.compare(0, 7, "hidden_") == 0; }

// The argument block from hipModuleLaunchKernel's two ways to give it.
std::vector<std::byte> argument_block(const KernelInfo& kernel, void** params, void** extra) {
  if (params && extra) throw Failure{kInvalidValue, "both kernelParams and extra were given; HIP takes one of them"};
  std::vector<std::byte> block;
  if (extra) {
    const void* data = nullptr;
    std::size_t bytes = 0;
    for (void** item = extra; *item != kExtraEnd; item += 2) {
      if (*item == kExtraPointer) {
        data = item[1];
      } else if (*item == kExtraSize) {
        bytes = *static_cast<std::size_t*>(item[1]);
      } else {
        throw Failure{kInvalidValue, "extra holds an unknown marker; it takes BUFFER_POINTER, BUFFER_SIZE and END"};
      }
    }
    if (bytes && !data) throw Failure{kInvalidValue, "extra has no HIP_LAUNCH_PARAM_BUFFER_POINTER"};
    block.resize(bytes);
    if (bytes) std::memcpy(block.data(), data, bytes);
    return block;
  }
  std::size_t index = 0;
  for (const KernelArgument& argument : kernel.arguments) {
    if (is_hidden(argument)) continue;
    if (!params || !params[index])
      throw Failure{kInvalidValue, "kernelParams[" + std::to_string(index) + "] of kernel " + kernel.name +
                                       " (argument '" + argument.name + "') is null"};
    block.resize(std::max<std::size_t>(block.size(), argument.offset + argument.size));
    std::memcpy(block.data() + argument.offset, params[index++], argument.size);
  }
  return block;
}

std::uint64_t read_number(const char* argument, const char* text) {
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text, &end, 0);
  if (!*text || *end || *text == '-')
    throw Error(std::string(argument) + " takes a number that is not negative, not '" + text + "'");
  return value;
}

}  // namespace

Configuration read_configuration(const char* target, const char* schedule, const char* seed, const char* checks,
                                 const char* threads) {
  Configuration out;
  if (target) out.target = target;
  Device{out.target};
  if (schedule) out.options.schedule = parse_schedule(schedule);
  if (seed) out.options.seed = read_number("seed", seed);
  if (checks) out.options.checks = parse_checks(checks);
  if (threads) out.options.threads = int(read_number("threads", threads));
  return out;
}

std::vector<Range> merge(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> out;
  for (Range& range : ranges) {
    if (range.begin == range.end) continue;
    if (out.empty() || range.begin >= out.back().end) {
      out.push_back(std::move(range));
      continue;
    }
    Range& last = out.back();
    last.end = std::max(last.end, range.end);
    last.writable = last.writable || range.writable;
    if (last.name != range.name) last.name += "+" + range.name;
  }
  return out;
}

std::vector<Range>& thread_buffers() {
  thread_local std::vector<Range> buffers;
  return buffers;
}

Runtime::Runtime()
    : configuration_(read_configuration(std::getenv("GFXSIM_TARGET"), std::getenv("GFXSIM_SCHEDULE"),
                                        std::getenv("GFXSIM_SEED"), std::getenv("GFXSIM_CHECK"),
                                        std::getenv("GFXSIM_THREADS"))) {}

Runtime& Runtime::get() {
  try {
    static Runtime* const runtime = new Runtime;  // never destroyed: calls may come from other libraries' destructors
    return *runtime;
  } catch (const Error& error) {
    throw Failure{kInvalidValue, std::string("environment variables GFXSIM_*: ") + error.what()};
  }
}

void Runtime::configure(Configuration configuration) {
  const std::lock_guard lock(mutex_);
  configuration_ = std::move(configuration);
}

Configuration Runtime::configuration() const {
  const std::lock_guard lock(mutex_);
  return configuration_;
}

void* Runtime::load(const void* image) {
  const std::size_t bytes = image_bytes(image);
  const std::string target = configuration().target;
  auto loaded = std::make_unique<LoadedImage>();
  try {
    loaded->module = Device(target).load({static_cast<const std::byte*>(image), bytes});
  } catch (const WrongTarget& error) {
    throw Failure{kNoBinaryForGpu, error.what()};
  } catch (const Error& error) {
    throw Failure{kInvalidImage, error.what()};
  }
  const std::lock_guard lock(mutex_);
  void* const handle = loaded.get();
  modules_.emplace(handle, std::move(loaded));
  return handle;
}

void Runtime::unload(void* module) {
  const std::lock_guard lock(mutex_);
  if (!modules_.erase(module)) throw Failure{kInvalidHandle, "module is not loaded (or was unloaded before)"};
}

void* Runtime::function(void* module, const char* name) {
  if (!name) throw Failure{kInvalidValue, "name is null"};
  const std::lock_guard lock(mutex_);
  const auto found = modules_.find(module);
  if (found == modules_.end()) throw Failure{kInvalidHandle, "module is not loaded (or was unloaded before)"};
  LoadedImage& image = *found->second;
  for (Function& function : image.functions)
    if (function.kernel->name == name) return &function;
  std::string known;
  for (const KernelInfo& kernel : image.module->kernels()) {
    if (kernel.name == name) return &image.functions.emplace_back(Function{image.module, &kernel});
    known += (known.empty() ? "" : ", ") + kernel.name;
  }
  throw Failure{kNotFound, std::string("no kernel '") + name + "' in this module; it holds: " + known};
}

Function Runtime::find_function(void* function) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, image] : modules_)
    for (const Function& candidate : image->functions)
      if (&candidate == function) return candidate;
  throw Failure{kInvalidHandle, "function is of no loaded module"};
}

std::vector<Range> Runtime::reachable() const {
  std::vector<Range> ranges = thread_buffers();
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, bytes] : allocations_) ranges.push_back({begin, begin + bytes, true, "hipMalloc"});
  return merge(std::move(ranges));
}

void Runtime::launch(void* handle, Dim3 grid, Dim3 block, std::uint32_t lds, void** params, void** extra) {
  const Function function = find_function(handle);
  const Configuration current = configuration();
  const std::string where = "kernel " + function.kernel->name + " (" + function.module->target() + "): ";
  if (function.module->target() != current.target)
    throw Failure{kInvalidHandle, where + "the simulated device is " + current.target + " by now"};
  if (grid.count() == 0 || block.count() == 0)
    throw Failure{kInvalidConfiguration, where + "a dimension of the grid or the block is 0"};
  const std::vector<std::byte> arguments = argument_block(*function.kernel, params, extra);
  Device device(current.target);
  for (const Range& range : reachable()) {
    auto* const data = reinterpret_cast<std::byte*>(range.begin);
    if (range.writable) {
      device.register_buffer(data, range.end - range.begin, range.name);
    } else {
      device.register_buffer(static_cast<const void*>(data), range.end - range.begin, range.name);
    }
  }
  try {
    const LaunchResult result =
        device.launch(*function.module, function.kernel->name, grid, block, lds, arguments, current.options);
    ++launches;
    instructions += result.statistics.instructions;
    if (result.ok()) return;
    std::string text;
    for (const Report& report : result.reports) text += (text.empty() ? "" : "\n") + report.to_string();
    throw Failure{kLaunchFailure, text};
  } catch (const Error& error) {
    throw Failure{kLaunchFailure, where + error.what()};
  }
}

void* Runtime::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* const data = ::operator new(bytes, kAlignment, std::nothrow);
  if (!data) throw Failure{kOutOfMemory, "cannot allocate " + std::to_string(bytes) + " bytes"};
  // NaN in every floating-point type: a value read before it is written shows.
  std::memset(data, 0xff, bytes);
  const std::lock_guard lock(mutex_);
  allocations_.emplace(reinterpret_cast<std::uint64_t>(data), bytes);
  return data;
}

void Runtime::release(void* pointer) {
  if (!pointer) return;
  const std::lock_guard lock(mutex_);
  if (!allocations_.erase(reinterpret_cast<std::uint64_t>(pointer)))
    throw Failure{kInvalidValue, "hipFree of a pointer that hipMalloc did not return, or that was freed before"};
  ::operator delete(pointer, kAlignment);
}

}  // namespace gfxsim::hip
