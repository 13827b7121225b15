// The part of HIP's binary interface that this library offers: types and constants of the HIP API reference, ROCm 6
// and 7.
#pragma once

#include <cstddef>

namespace gfxsim::hip {

// hipError_t
enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchFailure = 719,
  kUnknown = 999,
};

// hipDeviceAttribute_t
enum Attribute : int {
  kComputeCapabilityMajor = 23,
  kMaxThreadsPerBlock = 56,
  kComputeCapabilityMinor = 61,
  kMultiprocessorCount = 63,
  kMaxSharedMemoryPerBlock = 74,
  kWarpSize = 87,
};

// hipDeviceProp_tR0600, 1472 bytes. Members that are not filled stand as bytes.
struct DeviceProperties {
  char name[256];
  char uuid[16], luid[8];
  unsigned luid_device_node_mask;
  std::size_t total_global_memory, shared_memory_per_block;
  int registers_per_block, warp_size;
  std::size_t memory_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid_size[3], clock_rate;
  std::size_t total_const_memory;
  int major, minor;
  char textures[20];
  int multi_processor_count;
  char limits[1160 - 392];
  char gcn_arch_name[256];
  char amd_specific[1472 - 1416];
};
static_assert(sizeof(DeviceProperties) == 1472);
static_assert(offsetof(DeviceProperties, warp_size) == 308);
static_assert(offsetof(DeviceProperties, max_threads_per_block) == 320);
static_assert(offsetof(DeviceProperties, major) == 360);
static_assert(offsetof(DeviceProperties, multi_processor_count) == 388);
static_assert(offsetof(DeviceProperties, gcn_arch_name) == 1160);

// Markers of hipModuleLaunchKernel's `extra`.
inline void* const kExtraPointer = reinterpret_cast<void*>(1);
inline void* const kExtraSize = reinterpret_cast<void*>(2);
inline void* const kExtraEnd = reinterpret_cast<void*>(3);

}  // namespace gfxsim::hip

/// Memory that kernels may access, of one caller's thread. `name` appears in findings; null: unnamed.
struct gfxsim_buffer {
  const void* data;
  unsigned long long bytes;
  int writable;
  const char* name;
};
