#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gfxsim/gfxsim.h"

namespace gfxsim::cli {

struct Options {
  std::string command, file, kernel, target = "gfx942";
  bool json = false;
  Dim3 grid, block{64, 1, 1};
  std::uint32_t lds = 0;
  std::vector<std::string> arguments;
  std::map<std::size_t, std::string> dumps;  // argument number -> path
  LaunchOptions launch;
};

/// Throws Error naming the option that is wrong and what it accepts.
Options parse_options(const std::vector<std::string>& words);

/// Runs the command; the process's exit status.
int dispatch(const Options& options);

int run(const Options& options);

std::vector<std::byte> read_file(const std::string& path);

/// Text as a JSON string, quotation marks included.
std::string quoted(const std::string& text);

}  // namespace gfxsim::cli
