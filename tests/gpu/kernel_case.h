// One attention problem for the kernels: inputs, guarded device buffers, the reference, and the comparison.
#pragma once

#include <cstring>
#include <functional>
#include <stdexcept>

#include "attention_reference.h"
#include "core/softmax.h"
#include "device.h"
#include "hip/kernels/args.h"

namespace flash_attn::testing {

struct KernelCase {
  std::string name;
  Shape shape;  // Varlen: Sq and Sk are the longest lengths, B is the number of sequences.
  Features features;
  std::vector<std::int32_t> q_lengths, k_lengths;  // Empty: dense
  std::int64_t extra_rows = 0;                     // Varlen: rows behind the last sequence
  bool misaligned = false;                         // Rows at odd element offsets
  double scale = 0.0;                              // 0: 1 / sqrt(D)
  int splits = 1;                                  // Ranges of keys; more are for the cache variant.

  bool varlen() const { return !q_lengths.empty(); }
};

// A device buffer between two margins of poison, which nothing may change.
class GuardedBuffer {
 public:
  GuardedBuffer(KernelDevice& device, std::size_t bytes, std::size_t shift = 0)
      : device_(device),
        bytes_(bytes),
        shift_(shift),
        image_(bytes + 2 * kGuardBytes + shift, char(0x5a)),
        base_(static_cast<char*>(device.allocate(image_.size()))) {}
  ~GuardedBuffer() { device_.release(base_); }
  GuardedBuffer(const GuardedBuffer&) = delete;

  char* data() const { return base_ + kGuardBytes + shift_; }
  void fill(const void* from) {
    if (from) std::memcpy(image_.data() + kGuardBytes + shift_, from, bytes_);
    device_.upload(base_, image_.data(), image_.size());
  }
  void fetch(void* to) {
    std::vector<char> got(image_.size());
    device_.download(got.data(), base_, got.size());
    const std::size_t begin = kGuardBytes + shift_;
    if (std::memcmp(got.data(), image_.data(), begin) != 0 ||
        std::memcmp(got.data() + begin + bytes_, image_.data() + begin + bytes_, kGuardBytes) != 0)
      throw std::runtime_error("a kernel wrote outside of an output");
    if (to) std::memcpy(to, got.data() + begin, bytes_);
  }

 private:
  KernelDevice& device_;
  std::size_t bytes_, shift_;
  std::vector<char> image_;
  char* base_;
};

// Null where there is none.
inline const gpu::KernelRow* look_up_kernel(gpu::Family family, gpu::Target target, DType dtype, std::int64_t D,
                                            std::int64_t Dv, gpu::Variant variant) {
  const gpu::KernelRow* best = nullptr;
  for (const gpu::KernelRow& row : gpu::kKernels) {
    if (row.family != family || row.target != target || row.dtype != dtype || row.variant != variant) continue;
    if (row.D < D || row.Dv < Dv || (best && best->D <= row.D)) continue;
    best = &row;
  }
  return best;
}
inline const gpu::KernelRow& find_kernel(gpu::Family family, gpu::Target target, DType dtype, std::int64_t D,
                                         std::int64_t Dv, gpu::Variant variant) {
  if (const gpu::KernelRow* row = look_up_kernel(family, target, dtype, D, Dv, variant)) return *row;
  throw std::runtime_error("the manifest has no kernel for this problem");
}

// Kernel arguments with everything but pointers, for contiguous tensors.
inline gpu::AttentionArgs plain_arguments(const KernelCase& c, std::int64_t Tq, std::int64_t Tk) {
  const Shape& s = c.shape;
  gpu::AttentionArgs a{};
  const auto operand = [&](std::int64_t rows, std::int64_t heads, std::int64_t features) {
    return gpu::TensorArg{nullptr, c.varlen() ? 0 : rows * heads * features, heads * features, features};
  };
  a.q = operand(s.Sq, s.H, s.D);
  a.k = operand(s.Sk, s.Hk, s.D);
  a.v = operand(s.Sk, s.Hk, s.Dv);
  a.B = int(s.B), a.H = int(s.H), a.Hk = int(s.Hk), a.D = int(s.D), a.Dv = int(s.Dv);
  a.Sq = int(s.Sq), a.Sk = int(s.Sk), a.Tq = int(Tq), a.Tk = int(Tk);
  const double scale = c.scale != 0 ? c.scale : 1.0 / std::sqrt(double(s.D));
  a.scale_log2 = float(scale * kLog2e);
  a.softcap_log2 = float(c.features.softcap * kLog2e);
  a.inverse_softcap = c.features.softcap > 0 ? float(scale / c.features.softcap) : 0.0f;
  a.window_left = int(c.features.window_left);
  a.window_right = c.features.causal ? 0 : int(c.features.window_right);
  a.keep_threshold = 255;
  a.keep_scale = 1.0f;
  return a;
}

inline bool needs_general(const KernelCase& c, DType dtype) {
  const Features& f = c.features;
  const std::int64_t unit = 16 / size_of(dtype);
  return c.misaligned || f.softcap > 0 || f.alibi || f.dropout_p > 0 || f.window_left >= 0 || f.window_right >= 0 ||
         c.scale < 0 || c.shape.D % unit || c.shape.Dv % unit || dtype == DType::f32;
}

}  // namespace flash_attn::testing
