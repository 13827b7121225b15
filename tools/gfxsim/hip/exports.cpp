// The functions of libamdhip64.so: HIP's C interface over one simulated GPU, and gfxsim's own beside it.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

#include "runtime.h"
#include "target.h"

#define GFXSIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace gfxsim::hip {
namespace {

struct Hardware {
  std::string_view target;
  const char* features;  // which the runtime names behind the target
  int multiprocessors, major, minor;
};

// One MI50, MI100, half of an MI250X, MI300X, MI355X, RX 6900 XT, RX 7900 XTX, RX 7800 XT, RX 7600, 780M, 890M, 8060S,
// RX 9060 XT or RX 9070 XT. HIP's multiprocessors are pairs of compute units on RDNA.
constexpr Hardware kHardware[] = {
    {"gfx906", ":sramecc+:xnack-", 60, 9, 0},
    {"gfx908", ":sramecc+:xnack-", 120, 9, 0},
    {"gfx90a", ":sramecc+:xnack-", 110, 9, 0},
    {"gfx942", ":sramecc+:xnack-", 304, 9, 4},
    {"gfx950", ":sramecc+:xnack-", 256, 9, 5},
    {"gfx1030", "", 40, 10, 3},
    {"gfx1100", "", 48, 11, 0},
    {"gfx1101", "", 30, 11, 0},
    {"gfx1102", "", 16, 11, 0},
    {"gfx1103", "", 6, 11, 0},
    {"gfx1150", "", 8, 11, 5},
    {"gfx1151", "", 20, 11, 5},
    {"gfx1200", "", 16, 12, 0},
    {"gfx1201", "", 32, 12, 0},
};
const Hardware& hardware(const std::string& target) {
  for (const Hardware& device : kHardware)
    if (device.target == target) return device;
  throw Error("there is no device for the target " + target);
}
int wave_lanes(const std::string& target) { return find_target(target).generation == 9 ? 64 : 32; }
constexpr int kMaxThreads = 1024;

struct ThreadState {
  Status last = kSuccess;
  std::string message;
};
ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

Status fail(Status status, std::string message) noexcept {
  thread_state() = {status, std::move(message)};
  return status;
}

// Runs `body`; whatever it throws becomes a status and this thread's message.
template <class Body>
int guarded(Body body) noexcept {
  try {
    body();
    return kSuccess;
  } catch (Failure& failure) {
    return fail(failure.status, std::move(failure.message));
  } catch (const std::bad_alloc&) {
    return fail(kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return fail(kUnknown, error.what());
  }
}

void require(bool condition, const char* message, Status status = kInvalidValue) {
  if (!condition) throw Failure{status, message};
}
void require_device(int device) {
  if (device != 0)
    throw Failure{kInvalidDevice, "device " + std::to_string(device) + " was asked for; gfxsim has one device, 0"};
}

struct StatusName {
  Status status;
  const char *name, *text;
};
constexpr StatusName kStatusNames[] = {
    {kSuccess, "hipSuccess", "no error"},
    {kInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {kOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {kInvalidConfiguration, "hipErrorInvalidConfiguration", "invalid configuration argument"},
    {kInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {kInvalidImage, "hipErrorInvalidImage", "device kernel image is invalid"},
    {kNoBinaryForGpu, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
    {kInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {kNotFound, "hipErrorNotFound", "named symbol not found"},
    {kLaunchFailure, "hipErrorLaunchFailure", "unspecified launch failure"},
    {kUnknown, "hipErrorUnknown", "unknown error"},
};
const StatusName& describe(int status) {
  for (const StatusName& entry : kStatusNames)
    if (entry.status == status) return entry;
  return kStatusNames[std::size(kStatusNames) - 1];
}

int attribute(const std::string& target, int attribute) {
  const Hardware& device = hardware(target);
  switch (attribute) {
    case kComputeCapabilityMajor: return device.major;
    case kComputeCapabilityMinor: return device.minor;
    case kMaxThreadsPerBlock: return kMaxThreads;
    case kMultiprocessorCount: return device.multiprocessors;
    case kMaxSharedMemoryPerBlock: return int(find_target(target).lds_bytes);
    case kWarpSize: return wave_lanes(target);
    default: break;
  }
  throw Failure{kInvalidValue,
                "device attribute " + std::to_string(attribute) + " is not known here; 23, 56, 61, 63, 74 and 87 are"};
}

DeviceProperties properties(const std::string& target) {
  const Hardware& device = hardware(target);
  DeviceProperties out{};
  std::strncpy(out.name, ("gfxsim " + target).c_str(), sizeof out.name - 1);
  std::strncpy(out.gcn_arch_name, (target + device.features).c_str(), sizeof out.gcn_arch_name - 1);
  out.total_global_memory = std::size_t(1) << 36;
  out.shared_memory_per_block = find_target(target).lds_bytes;
  out.registers_per_block = 65536;
  out.warp_size = wave_lanes(target);
  out.max_threads_per_block = kMaxThreads;
  for (int& limit : out.max_threads_dim) limit = kMaxThreads;
  for (int& limit : out.max_grid_size) limit = 0x7fffffff;
  out.major = device.major, out.minor = device.minor;
  out.multi_processor_count = device.multiprocessors;
  return out;
}

void copy(void* to, const void* from, std::size_t bytes) {
  require(bytes == 0 || (to && from), "dst or src is null");
  if (bytes) std::memmove(to, from, bytes);
}
void fill(void* to, int value, std::size_t bytes) {
  require(bytes == 0 || to, "dst is null");
  if (bytes) std::memset(to, value, bytes);
}
void create_stream(void** stream) {
  require(stream, "stream is null");
  *stream = new char;
}

}  // namespace
}  // namespace gfxsim::hip

using namespace gfxsim::hip;

GFXSIM_EXPORT int hipInit(unsigned flags) {
  return guarded([&] {
    require(flags == 0, "flags must be 0");
    Runtime::get();
  });
}
GFXSIM_EXPORT int hipRuntimeGetVersion(int* version) {
  return guarded([&] {
    require(version, "runtimeVersion is null");
    *version = 70000000;  // 7.0.0
  });
}
GFXSIM_EXPORT int hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }
GFXSIM_EXPORT int hipGetDeviceCount(int* count) {
  return guarded([&] {
    require(count, "count is null");
    *count = 1;
  });
}
GFXSIM_EXPORT int hipGetDevice(int* device) {
  return guarded([&] {
    require(device, "deviceId is null");
    *device = 0;
  });
}
GFXSIM_EXPORT int hipSetDevice(int device) {
  return guarded([&] { require_device(device); });
}
GFXSIM_EXPORT int hipDeviceGetAttribute(int* value, int which, int device) {
  return guarded([&] {
    require(value, "pi is null");
    require_device(device);
    *value = attribute(Runtime::get().configuration().target, which);
  });
}
GFXSIM_EXPORT int hipGetDevicePropertiesR0600(void* prop, int device) {
  return guarded([&] {
    require(prop, "prop is null");
    require_device(device);
    const DeviceProperties filled = properties(Runtime::get().configuration().target);
    std::memcpy(prop, &filled, sizeof filled);
  });
}

GFXSIM_EXPORT int hipModuleLoadData(void** module, const void* image) {
  return guarded([&] {
    require(module, "module is null");
    *module = Runtime::get().load(image);
  });
}
GFXSIM_EXPORT int hipModuleUnload(void* module) {
  return guarded([&] { Runtime::get().unload(module); });
}
GFXSIM_EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
  return guarded([&] {
    require(function, "function is null");
    *function = Runtime::get().function(module, name);
  });
}
GFXSIM_EXPORT int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                        unsigned bz, unsigned lds, void* /*stream: launches are synchronous*/,
                                        void** params, void** extra) {
  return guarded([&] { Runtime::get().launch(function, {gx, gy, gz}, {bx, by, bz}, lds, params, extra); });
}

GFXSIM_EXPORT const char* hipGetErrorName(int status) { return describe(status).name; }
GFXSIM_EXPORT const char* hipGetErrorString(int status) { return describe(status).text; }
GFXSIM_EXPORT int hipPeekAtLastError() { return thread_state().last; }
GFXSIM_EXPORT int hipGetLastError() { return std::exchange(thread_state().last, kSuccess); }

GFXSIM_EXPORT int hipMalloc(void** pointer, std::size_t bytes) {
  return guarded([&] {
    require(pointer, "ptr is null");
    *pointer = Runtime::get().allocate(bytes);
  });
}
GFXSIM_EXPORT int hipFree(void* pointer) {
  return guarded([&] { Runtime::get().release(pointer); });
}
GFXSIM_EXPORT int hipMemcpy(void* to, const void* from, std::size_t bytes, int /*kind: all memory is the host's*/) {
  return guarded([&] { copy(to, from, bytes); });
}
GFXSIM_EXPORT int hipMemcpyAsync(void* to, const void* from, std::size_t bytes, int /*kind*/, void* /*stream*/) {
  return guarded([&] { copy(to, from, bytes); });
}
GFXSIM_EXPORT int hipMemset(void* to, int value, std::size_t bytes) {
  return guarded([&] { fill(to, value, bytes); });
}
GFXSIM_EXPORT int hipMemsetAsync(void* to, int value, std::size_t bytes, void* /*stream*/) {
  return guarded([&] { fill(to, value, bytes); });
}
GFXSIM_EXPORT int hipStreamCreate(void** stream) {
  return guarded([&] { create_stream(stream); });
}
GFXSIM_EXPORT int hipStreamCreateWithFlags(void** stream, unsigned flags) {
  return guarded([&] {
    require(flags <= 1, "flags must be 0 or hipStreamNonBlocking (1)");
    create_stream(stream);
  });
}
GFXSIM_EXPORT int hipStreamDestroy(void* stream) {
  return guarded([&] {
    require(stream, "stream is null", kInvalidHandle);
    delete static_cast<char*>(stream);
  });
}
GFXSIM_EXPORT int hipStreamSynchronize(void* /*stream*/) { return kSuccess; }
GFXSIM_EXPORT int hipDeviceSynchronize() { return kSuccess; }

/// Makes the device another one, for launches from now on; every argument is needed. 0: done, else
/// gfxsim_last_message() says what was passed and what is accepted.
GFXSIM_EXPORT int gfxsim_configure(const char* target, const char* schedule, unsigned long long seed,
                                   const char* checks, int threads) {
  return guarded([&] {
    require(target && schedule && checks, "target, schedule and checks must not be null");
    require(threads >= 0, "threads must be 0 (one per processor) or more");
    try {
      Configuration configuration = read_configuration(target, schedule, nullptr, checks, nullptr);
      configuration.options.seed = seed;
      configuration.options.threads = threads;
      Runtime::get().configure(std::move(configuration));
    } catch (const gfxsim::Error& error) {
      throw Failure{kInvalidValue, error.what()};
    }
  });
}
/// Replaces the buffers that launches from the calling thread may access, besides hipMalloc's.
GFXSIM_EXPORT void gfxsim_set_buffers(const gfxsim_buffer* buffers, int count) {
  guarded([&] {
    std::vector<Range> ranges;
    for (int i = 0; i < count; ++i) {
      const auto begin = reinterpret_cast<std::uint64_t>(buffers[i].data);
      ranges.push_back(
          {begin, begin + buffers[i].bytes, buffers[i].writable != 0, buffers[i].name ? buffers[i].name : "unnamed"});
    }
    thread_buffers() = std::move(ranges);
  });
}
GFXSIM_EXPORT const char* gfxsim_last_message() { return thread_state().message.c_str(); }
GFXSIM_EXPORT unsigned long long gfxsim_launches() { return Runtime::launches; }
GFXSIM_EXPORT unsigned long long gfxsim_instructions() { return Runtime::instructions; }
