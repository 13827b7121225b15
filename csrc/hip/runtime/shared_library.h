// A shared library opened at run time.
#pragma once

#include <string>
#include <vector>

namespace flash_attn::gpu {

class SharedLibrary {
 public:
  // Null handle and the loader's text in `why` when it cannot be opened. Never closed: runtimes do not survive that.
  static SharedLibrary open(const std::string& path, std::string& why);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  // Null when there is no such symbol.
  void* find(const char* symbol) const;

 private:
  void* handle_ = nullptr;
  std::string path_;
};

// Paths of the libraries loaded in this process whose file name begins with `stem`, in the order of loading.
std::vector<std::string> loaded_libraries(const std::string& stem);

}  // namespace flash_attn::gpu
