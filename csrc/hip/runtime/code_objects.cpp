#include "hip/runtime/code_objects.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>

#include "flash_attn/gpu.h"
#include "hip/runtime/archive.h"
#if defined(FLASH_ATTN_ZSTD)
#include <zstd.h>
#endif

#if !defined(FLASH_ATTN_NO_CODE_OBJECTS)
extern "C" const char flash_attn_code_objects[], flash_attn_code_objects_end[];
#endif

namespace flash_attn {
namespace gpu {
namespace {

#if defined(FLASH_ATTN_NO_CODE_OBJECTS)
const char* archive() { return nullptr; }
std::span<const ArchiveEntry> entries() { return {}; }
#else
const char* archive() { return flash_attn_code_objects; }

std::span<const ArchiveEntry> entries() {
  const auto* header = reinterpret_cast<const ArchiveHeader*>(archive());
  return {reinterpret_cast<const ArchiveEntry*>(header + 1), header->count};
}
#endif

std::string all_targets() {
  std::string text;
  for (const std::string& target : embedded_targets()) text += (text.empty() ? "" : ", ") + target;
  return text.empty() ? "none" : text;
}

void decompress(const ArchiveEntry& entry, std::vector<std::byte>& bytes) {
  const char* data = archive() + entry.offset;
  switch (entry.codec) {
    case Codec::stored: std::memcpy(bytes.data(), data, bytes.size()); return;
    case Codec::zstd:
#if defined(FLASH_ATTN_ZSTD)
      if (ZSTD_decompress(bytes.data(), bytes.size(), data, entry.stored_bytes) == entry.bytes) return;
#endif
      break;
  }
  throw Error(std::string("flash_attn: the embedded code object ") + entry.name + " for " + entry.target +
              " is damaged; build the library again");
}

}  // namespace

std::vector<std::string> embedded_targets() {
  std::vector<std::string> targets;
  for (const ArchiveEntry& entry : entries())
    if (std::find(targets.begin(), targets.end(), entry.target) == targets.end()) targets.push_back(entry.target);
  return targets;
}

std::string embedded_target_for(const std::string& device_target) {
  const std::vector<std::string> targets = embedded_targets();
  if (std::find(targets.begin(), targets.end(), device_target) != targets.end()) return device_target;
  if (device_target.rfind("sm_", 0) != 0) return "";
  // CUDA's binary compatibility: a cubin runs on later minor revisions of its major.
  const auto number = [](const std::string& target) { return std::atoi(target.c_str() + 3); };
  std::string best;
  for (const std::string& target : targets) {
    if (target.rfind("sm_", 0) != 0 || number(target) / 10 != number(device_target) / 10) continue;
    if (number(target) <= number(device_target) && (best.empty() || number(target) > number(best))) best = target;
  }
  return best;
}

std::vector<std::byte> unpack_code_object(const std::string& target, const std::string& name) {
  for (const ArchiveEntry& entry : entries()) {
    if (entry.target != target || entry.name != name) continue;
    std::vector<std::byte> bytes(entry.bytes);
    decompress(entry, bytes);
    return bytes;
  }
  throw NotSupported("flash_attn: no code object " + name + " for " + target + " in this build, which has " +
                     all_targets() + "; build with GPU_ARCHS=" + target);
}

}  // namespace gpu

std::vector<CodeObject> code_objects() {
  std::vector<CodeObject> objects;
  for (const gpu::ArchiveEntry& entry : gpu::entries())
    objects.push_back({entry.target, entry.name, std::size_t(entry.bytes), std::size_t(entry.stored_bytes)});
  return objects;
}

std::vector<std::byte> code_object(const std::string& target, const std::string& name) {
  const std::string embedded = gpu::embedded_target_for(target);
  return gpu::unpack_code_object(embedded.empty() ? target : embedded, name);
}

std::string missing_code_objects() {
#if defined(FLASH_ATTN_NO_CODE_OBJECTS)
  return FLASH_ATTN_NO_CODE_OBJECTS;
#else
  return "";
#endif
}

}  // namespace flash_attn
