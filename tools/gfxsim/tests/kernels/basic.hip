// Plain kernels for every target: memory, control flow, LDS, shuffles, atomics, arithmetic.
#include "device.h"

GLOBAL void vector_add(const float* a, const float* b, float* c, int n) {
  const int i = block() * 256 + thread();
  if (i < n) c[i] = a[i] + b[i];
}

// y[row] = softmax of row `row` of x, one workgroup of 256 threads per row, n columns.
GLOBAL THREADS(256) void softmax_row(const float* x, float* y, int n) {
  SHARED float scratch[8];
  const float* in = x + long(block()) * n;
  float* out = y + long(block()) * n;
  const int waves = 256 / __builtin_amdgcn_wavefrontsize();
  const int wave = thread() / __builtin_amdgcn_wavefrontsize();
  auto reduce = [&](float value, bool is_max) {
    for (int step = 1; step < int(__builtin_amdgcn_wavefrontsize()); step *= 2) {
      const float other =
          __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane() ^ step) * 4, __builtin_bit_cast(int, value)));
      value = is_max ? __builtin_fmaxf(value, other) : value + other;
    }
    barrier();
    if (lane() == 0) scratch[wave] = value;
    barrier();
    float total = scratch[0];
    for (int w = 1; w < waves; ++w) total = is_max ? __builtin_fmaxf(total, scratch[w]) : total + scratch[w];
    return total;
  };
  float max = -__builtin_inff();
  for (int i = thread(); i < n; i += 256) max = __builtin_fmaxf(max, in[i]);
  max = reduce(max, true);
  const float log2e = 1.44269504088896f;
  float sum = 0;
  for (int i = thread(); i < n; i += 256) sum += __builtin_amdgcn_exp2f((in[i] - max) * log2e);
  sum = reduce(sum, false);
  const float scale = __builtin_amdgcn_rcpf(sum);
  for (int i = thread(); i < n; i += 256) out[i] = __builtin_amdgcn_exp2f((in[i] - max) * log2e) * scale;
}

// Tree reduction through LDS: out[block] = sum of 256 inputs.
GLOBAL THREADS(256) void lds_sum(const float* x, float* out) {
  SHARED float tile[256];
  tile[thread()] = x[block() * 256 + thread()];
  barrier();
  for (int half = 128; half > 0; half /= 2) {
    if (thread() < half) tile[thread()] += tile[thread() + half];
    barrier();
  }
  if (thread() == 0) out[block()] = tile[0];
}

GLOBAL void histogram(const unsigned* x, unsigned* bins, float* total, int n) {
  const int i = block() * 256 + thread();
  if (i >= n) return;
  __hip_atomic_fetch_add(bins + x[i] % 16, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __builtin_amdgcn_global_atomic_fadd_f32((__attribute__((address_space(1))) float*)total, float(x[i] % 16));
}

// Number of Collatz steps: a loop whose trip count differs per lane.
GLOBAL void collatz(const unsigned* x, unsigned* steps, int n) {
  const int i = block() * 256 + thread();
  if (i >= n) return;
  unsigned value = x[i], count = 0;
  while (value != 1) {
    if (value & 1) {
      value = 3 * value + 1;
    } else {
      value /= 2;
    }
    ++count;
  }
  steps[i] = count;
}

// Integer division, 64-bit offsets, conversions, comparisons of every width.
GLOBAL void arithmetic(const int* a, const int* b, long* out, float* fout, int n) {
  const int i = block() * 256 + thread();
  if (i >= n) return;
  const int x = a[i], y = b[i];
  out[4L * i] = long(x) * y + (x >> 3);
  out[4L * i + 1] = y ? x / y : x;
  out[4L * i + 2] = y ? unsigned(x) % unsigned(y) : 0;
  out[4L * i + 3] = long(x) < (long(y) << 7) ? long(unsigned(x)) >> 3 : (long(x) ^ 0x123456789L);
  fout[4 * i] = float(x) / float(y);
  fout[4 * i + 1] = __builtin_sqrtf(float(unsigned(x)));
  fout[4 * i + 2] = __builtin_floorf(float(x) * 0.3f) + float(f16(float(y)));
  fout[4 * i + 3] = __builtin_amdgcn_logf(__builtin_fabsf(float(x)) + 1.0f) + float(bf16(float(y)));
}

// Half-precision packed arithmetic on pairs.
GLOBAL void packed_half(const f16x2* a, const f16x2* b, f16x2* out, int n) {
  const int i = block() * 256 + thread();
  if (i < n) out[i] = __builtin_elementwise_max(a[i] * b[i] + a[i], b[i] - a[i]);
}

GLOBAL void packed_float(const f32x2* a, const f32x2* b, f32x2* out, int n) {
  const int i = block() * 256 + thread();
  if (i < n) out[i] = __builtin_elementwise_fma(a[i], b[i], a[i] * b[i]) + b[i];
}

// Row-of-16 butterfly through DPP, then readlane of lane 5 and a ballot.
GLOBAL void shuffles(const int* x, int* out) {
  const int v = x[thread()];
  const int quad = __builtin_amdgcn_update_dpp(0, v, 0xB1, 0xF, 0xF, true);
  const int mirror = __builtin_amdgcn_update_dpp(v, v, 0x140, 0xF, 0xF, false);
  const int shifted = __builtin_amdgcn_update_dpp(-1, v, 0x111, 0xF, 0xF, false);
  const int fifth = __builtin_amdgcn_readlane(v, 5);
  const int first = __builtin_amdgcn_readfirstlane(v);
  const int swizzled = __builtin_amdgcn_ds_swizzle(v, 0x401F);
  const int votes = __builtin_popcountll(__builtin_amdgcn_ballot_w64(v > fifth));
  int* o = out + 8 * thread();
  o[0] = quad, o[1] = mirror, o[2] = shifted, o[3] = fifth, o[4] = first, o[5] = swizzled, o[6] = votes,
  o[7] = quad + v;
}

// A matrix transpose through LDS with 16-byte accesses and a two-dimensional launch.
GLOBAL THREADS(256) void transpose(const float* x, float* y, int rows, int columns) {
  SHARED float tile[32][36];
  const int tx = thread() % 8, ty = thread() / 8;
  const int column0 = __builtin_amdgcn_workgroup_id_x() * 32, row0 = __builtin_amdgcn_workgroup_id_y() * 32;
  *(f32x4*)&tile[ty][tx * 4] = *(const f32x4*)&x[long(row0 + ty) * columns + column0 + tx * 4];
  barrier();
  f32x4 out;
  for (int i = 0; i < 4; ++i) out[i] = tile[tx * 4 + i][ty];
  *(f32x4*)&y[long(column0 + ty) * rows + row0 + tx * 4] = out;
}

// What hidden arguments and the launch tell: block counts, group size, grid ids in three dimensions.
GLOBAL void launch_info(int* out) {
  const auto* hidden = (const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr();
  const int x = __builtin_amdgcn_workgroup_id_x(), y = __builtin_amdgcn_workgroup_id_y(),
            z = __builtin_amdgcn_workgroup_id_z();
  const unsigned size_xy = hidden[3];
  const int group = x + int(hidden[0]) * (y + int(hidden[1]) * z);
  const int local = __builtin_amdgcn_workitem_id_x() +
                    int(size_xy & 0xffff) *
                        (__builtin_amdgcn_workitem_id_y() + int(size_xy >> 16) * __builtin_amdgcn_workitem_id_z());
  const int size = int(size_xy & 0xffff) * int(size_xy >> 16) * int(hidden[4] & 0xffff);
  out[group * size + local] = group * 1000 + local;
}

// Private memory that must live in scratch.
GLOBAL void scratch(const int* x, int* out, int n) {
  volatile int local[32];
  for (int i = 0; i < 32; ++i) local[i] = x[(thread() + i) % n];
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += local[(x[thread() % n] + i) & 31] * i;
  out[thread()] = sum;
}
