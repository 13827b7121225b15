#include "hip/runtime/shared_library.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#endif

namespace flash_attn::gpu {

#if defined(__linux__)

SharedLibrary SharedLibrary::open(const std::string& path, std::string& why) {
  SharedLibrary library;
  library.path_ = path;
  library.handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library.handle_) {
    const char* text = dlerror();
    why = text ? text : "no reason given";
  }
  return library;
}

void* SharedLibrary::find(const char* symbol) const { return handle_ ? dlsym(handle_, symbol) : nullptr; }

std::vector<std::string> loaded_libraries(const std::string& stem) {
  struct Search {
    const std::string& stem;
    std::vector<std::string> found;
  } search{stem, {}};
  const auto visit = [](dl_phdr_info* info, std::size_t, void* data) {
    auto& search = *static_cast<Search*>(data);
    const std::string path = info->dlpi_name ? info->dlpi_name : "";
    const auto slash = path.rfind('/');
    if (path.compare(slash == std::string::npos ? 0 : slash + 1, search.stem.size(), search.stem) == 0)
      search.found.push_back(path);
    return 0;
  };
  dl_iterate_phdr(visit, &search);
  return search.found;
}

#else

SharedLibrary SharedLibrary::open(const std::string& path, std::string& why) {
  SharedLibrary library;
  library.path_ = path;
  why = "GPU runtimes are opened on Linux only";
  return library;
}

void* SharedLibrary::find(const char*) const { return nullptr; }

std::vector<std::string> loaded_libraries(const std::string&) { return {}; }

#endif

}  // namespace flash_attn::gpu
