// The GPU kernels against double precision, kernel by kernel, without torch: memory, launch, compare.
//
//   kernel_check DIRECTORY [--only TEXT] [--time]
//
// DIRECTORY holds the code objects. Prints one line per (case, dtype, variant): the error in units of the tolerance,
// above 1 is wrong. --time measures instead. Exit status 1 when anything is wrong.
#include <cstdio>

#include "kernel_backward.h"
#include "kernel_forward.h"

namespace flash_attn {
// The library's own are in csrc/core/attention.cpp, which brings a backend along.
std::int64_t size_of(DType dtype) noexcept { return dtype == DType::f32 ? 4 : dtype == DType::f64 ? 8 : 2; }
}  // namespace flash_attn

namespace flash_attn::testing {
namespace {

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16";
}

std::vector<KernelCase> correctness_cases() {
  std::vector<KernelCase> cases;
  const auto add = [&](std::string name, Shape shape, Features features = {}) -> KernelCase& {
    cases.push_back({std::move(name), shape, features, {}, {}});
    return cases.back();
  };
  Features causal, window, softcap, alibi, dropout, everything;
  causal.causal = true;
  window.window_left = 30, window.window_right = 9;
  softcap.softcap = 3.0;
  alibi.alibi = true, alibi.causal = true;
  dropout.dropout_p = 0.17;
  everything.alibi = true, everything.dropout_p = 0.4, everything.window_left = 100, everything.causal = true;
  for (std::int64_t D : {64, 128, 256}) {
    const std::string d = " D=" + std::to_string(D);
    add("dense" + d, {2, 2, 2, 200, 333, D, D});
    add("causal" + d, {1, 3, 3, 450, 450, D, D}, causal);
    add("causal Sq>Sk, GQA 3" + d, {1, 6, 2, 260, 130, D, D}, causal);
    add("causal Sq<Sk, GQA 3" + d, {1, 3, 1, 77, 411, D, D}, causal);
    add("window" + d, {1, 2, 1, 300, 290, D, D}, window);
    add("softcap" + d, {1, 2, 2, 150, 150, D, D}, softcap);
    add("alibi causal" + d, {2, 4, 2, 190, 230, D, D}, alibi);
    add("dropout" + d, {2, 2, 1, 170, 200, D, D}, dropout);
    add("alibi dropout window causal" + d, {1, 2, 1, 310, 310, D, D}, everything);
    KernelCase& varlen = add("varlen" + d, {5, 4, 2, 260, 300, D, D}, causal);
    varlen.q_lengths = {70, 0, 260, 1, 33}, varlen.k_lengths = {65, 20, 300, 0, 140}, varlen.extra_rows = 7;
    KernelCase& drop = add("varlen dropout" + d, {3, 2, 1, 129, 140, D, D}, dropout);
    drop.q_lengths = {31, 129, 64}, drop.k_lengths = {140, 80, 63};
    add("misaligned" + d, {1, 2, 2, 100, 120, D, D}).misaligned = true;
    add("negative scale" + d, {1, 1, 1, 90, 90, D, D}).scale = -0.1;
  }
  add("D=40", {1, 2, 1, 140, 150, 40, 40}, causal);
  add("D=72 Dv=24", {1, 2, 1, 140, 150, 72, 24});
  add("D=33 Dv=17", {1, 2, 1, 140, 150, 33, 17});
  add("D=1", {1, 2, 1, 65, 70, 1, 1});
  add("D=192 Dv=128", {1, 2, 1, 140, 150, 192, 128}, causal);
  add("one query", {2, 2, 1, 1, 257, 128, 128});
  add("one key", {2, 2, 1, 130, 1, 64, 64});
  add("no keys", {1, 2, 1, 30, 0, 64, 64});
  return cases;
}

// One line; whether it is right.
template <class Check>
bool check_case(KernelDevice& device, const KernelCase& c, DType dtype, gpu::Variant variant,
                const std::string& label) {
  std::string kernel;
  double error = -1;
  try {
    Check run(device, c, dtype);
    kernel = run.kernel(variant);
    error = run.run(variant);
  } catch (const std::exception& e) {
    std::printf("WRONG  %-54s %-34s %s\n", label.c_str(), kernel.c_str(), e.what());
    return false;
  }
  const bool ok = error >= 0 && error <= 1;
  std::printf("%s %8.3g  %-54s %s\n", ok ? "ok   " : "WRONG", error, label.c_str(), kernel.c_str());
  return ok;
}

// A case by every variant that takes it.
struct Tally {
  int wrong = 0, total = 0;

  void check(KernelDevice& device, const KernelCase& c, DType dtype, gpu::Variant variant, const std::string& only) {
    // The plain variant lacks features, the decode variant some head dims. The cache's kernels compute without a cache
    // what the general ones do.
    if (variant == gpu::Variant::plain && needs_general(c, dtype)) return;
    const std::string name = c.name + " " + dtype_name(dtype);
    const bool decode = variant == gpu::Variant::decode;
    const Shape& s = c.shape;
    if (decode && !look_up_kernel(gpu::Family::forward, device.target(), dtype, s.D, s.Dv, variant)) return;
    count<ForwardCheck>(device, c, dtype, variant, "forward " + name, only);
    if (variant == gpu::Variant::plain || variant == gpu::Variant::general)
      return count<BackwardCheck>(device, c, dtype, variant, "backward " + name, only);
    KernelCase split = c;
    split.splits = 3;
    count<ForwardCheck>(device, split, dtype, variant, "forward " + name + " in 3 ranges", only);
  }

  template <class Check>
  void count(KernelDevice& device, const KernelCase& c, DType dtype, gpu::Variant variant, const std::string& label,
             const std::string& only) {
    if (label.find(only) == std::string::npos) return;
    wrong += !check_case<Check>(device, c, dtype, variant, label);
    std::fflush(stdout);
    ++total;
  }
};

int check(KernelDevice& device, const std::string& only) {
  Tally tally;
  for (const KernelCase& c : correctness_cases())
    for (DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (gpu::Variant variant :
           {gpu::Variant::plain, gpu::Variant::general, gpu::Variant::cache, gpu::Variant::decode})
        tally.check(device, c, dtype, variant, only);
  std::printf("%d of %d wrong\n", tally.wrong, tally.total);
  return tally.wrong ? 1 : 0;
}

// `products`: matrix products of the pass, by convention 2 forward and 5 backward.
template <class Check>
void time_case(KernelDevice& device, const KernelCase& c, DType dtype, const std::string& label, int products) {
  const Shape& s = c.shape;
  Check run(device, c, dtype);
  const gpu::Variant variant = dtype == DType::f32 ? gpu::Variant::general : gpu::Variant::plain;
  const double ms = double(run.milliseconds(variant, s.Sq > 4096 ? 5 : 20));
  const double flops =
      2.0 * products * double(s.B * s.H) * double(s.Sq) * double(s.Sk) * double(s.D) / (c.features.causal ? 2 : 1);
  std::printf("%-44s %9.3f ms %8.1f TFLOP/s\n", label.c_str(), ms, flops / ms * 1e-9);
  std::fflush(stdout);
}

int time(KernelDevice& device, const std::string& only) {
  for (bool backward : {false, true})
    for (DType dtype : {DType::bf16, DType::f32})
      for (std::int64_t D : {64, 128, 256})
        for (std::int64_t S : {512, 2048, 8192, 16384})
          for (bool causal : {false, true}) {
            if (dtype == DType::f32 && S > 2048) continue;
            KernelCase c;
            c.shape = {max_of<std::int64_t>(1, 16384 / S), 2048 / D, 2048 / D, S, S, D, D};
            c.features.causal = causal;
            const std::string label = std::string(backward ? "backward" : "forward") + " S=" + std::to_string(S) +
                                      " D=" + std::to_string(D) + (causal ? " causal " : " ") + dtype_name(dtype);
            if (label.find(only) == std::string::npos) continue;
            if (backward)
              time_case<BackwardCheck>(device, c, dtype, label, 5);
            else
              time_case<ForwardCheck>(device, c, dtype, label, 2);
          }
  return 0;
}

}  // namespace
}  // namespace flash_attn::testing

int main(int argc, char** argv) {
  using namespace flash_attn::testing;
  std::string directory, only;
  bool timing = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--time")
      timing = true;
    else if (argument == "--only" && i + 1 < argc)
      only = argv[++i];
    else
      directory = argument;
  }
  if (directory.empty()) {
    std::fprintf(stderr, "usage: kernel_check DIRECTORY [--only TEXT] [--time]\n");
    return 2;
  }
  const auto device = open_device(directory);
  return timing ? time(*device, only) : check(*device, only);
}
