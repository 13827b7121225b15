// Arguments of the attention kernels of csrc/hip, so that one can be run from the command line. Only this file of
// gfxsim knows them.
#include <cmath>
#include <cstring>

#include "commands.h"

#ifdef GFXSIM_ATTENTION
#include "hip/kernels/args.h"
#include "hip/manifest.h"

namespace gfxsim::cli {
namespace {

using namespace flash_attn;

struct Problem {
  std::int64_t B = 1, H = 1, Hk = 0, Sq = 64, Sk = 64, D = 0, Dv = 0;
  bool causal = false;
};

Problem parse_problem(const std::string& text, const gpu::KernelRow& row) {
  Problem p;
  p.D = row.D, p.Dv = row.Dv;
  std::int64_t causal = 0, S = 0;
  const std::map<std::string, std::int64_t*> fields = {{"B", &p.B},   {"H", &p.H},   {"Hk", &p.Hk},
                                                       {"Sq", &p.Sq}, {"Sk", &p.Sk}, {"D", &p.D},
                                                       {"Dv", &p.Dv}, {"S", &S},     {"causal", &causal}};
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    const std::size_t equals = item.find('=');
    const auto field = fields.find(item.substr(0, equals));
    char* rest = nullptr;
    const std::int64_t value = equals == std::string::npos ? -1 : std::strtoll(item.c_str() + equals + 1, &rest, 10);
    if (field == fields.end() || value < 0 || *rest)
      throw Error("--attention takes B, H, Hk, Sq, Sk, S, D, Dv and causal, each =NUMBER, not '" + item + "'");
    *field->second = value;
    at = end + 1;
  }
  if (S) p.Sq = p.Sk = S;
  if (!p.Hk) p.Hk = p.H;
  p.causal = causal != 0;
  if (p.B < 1 || p.H < 1 || p.H % p.Hk || p.D < 1 || p.D > row.D || p.Dv < 1 || p.Dv > row.Dv)
    throw Error("--attention: B and H from 1 on, H a multiple of Hk, D up to " + std::to_string(row.D) +
                " and Dv up to " + std::to_string(row.Dv) + " are what this kernel takes, not '" + text + "'");
  return p;
}

class Filler {
 public:
  Filler(const Problem& problem, const gpu::KernelRow& row, ArgumentList& arguments)
      : p_(problem), row_(row), arguments_(arguments) {}

  gpu::TensorArg tensor(const char* name, std::int64_t rows, std::int64_t heads, std::int64_t width) {
    const std::string type = row_.dtype == DType::f32 ? "f32" : row_.dtype == DType::f16 ? "f16" : "bf16";
    const std::int64_t count = p_.B * rows * heads * width;
    auto bytes = count ? arguments_.random_bytes(type + ":" + std::to_string(count)) : std::vector<std::byte>();
    return {arguments_.add_buffer(std::move(bytes), name), rows * heads * width, heads * width, width};
  }
  // One number for each query and head; as LSE, it is near the true one for inputs of unit variance.
  float* statistic(const char* name) {
    const std::vector<float> values(std::size_t(p_.B * p_.H * p_.Sq), std::log(float(p_.Sk)) + 0.5f);
    const auto bytes = std::as_bytes(std::span(values));
    return static_cast<float*>(arguments_.add_buffer({bytes.begin(), bytes.end()}, name));
  }
  gpu::AttentionArgs attention(bool by_query) {
    gpu::AttentionArgs a{};
    a.q = tensor("q", p_.Sq, p_.H, p_.D), a.k = tensor("k", p_.Sk, p_.Hk, p_.D), a.v = tensor("v", p_.Sk, p_.Hk, p_.Dv);
    a.B = int(p_.B), a.H = int(p_.H), a.Hk = int(p_.Hk), a.D = int(p_.D), a.Dv = int(p_.Dv);
    a.Sq = a.Tq = int(p_.Sq), a.Sk = a.Tk = int(p_.Sk);
    a.scale_log2 = float(1.44269504088896 / std::sqrt(double(p_.D)));
    a.window_left = -1, a.window_right = p_.causal ? 0 : -1;
    a.keep_threshold = 255, a.keep_scale = 1.0f;
    const std::int64_t unit = 16 / row_.element_size();
    a.regular = p_.D % unit == 0 && p_.Dv % unit == 0;
    if (!a.regular && row_.variant == gpu::Variant::plain)
      throw Error("--attention: the plain kernels take D and Dv that are multiples of " + std::to_string(unit));
    a.tiles = int(std::max<std::int64_t>(1, ceil_div(by_query ? p_.Sq : p_.Sk, row_.block_rows())));
    return a;
  }

 private:
  const Problem& p_;
  const gpu::KernelRow& row_;
  ArgumentList& arguments_;
};

const gpu::KernelRow& find_row(const Options& options) {
  const std::optional<gpu::Target> target = gpu::amd_target(options.target);
  for (const gpu::KernelRow& row : gpu::kKernels)
    if (row.target == target && row.name == options.kernel && row.family != gpu::Family::forward_dmask &&
        row.family != gpu::Family::append)
      return row;
  throw Error("--attention: forward and backward have no kernel '" + options.kernel + "' for " + options.target);
}

}  // namespace

void add_attention(const std::string& problem, const Options& options, ArgumentList& arguments, Dim3& grid,
                   Dim3& block) {
  const gpu::KernelRow& row = find_row(options);
  const Problem p = parse_problem(problem, row);
  Filler fill(p, row, arguments);
  const bool forward = row.family == gpu::Family::forward;
  const bool by_query = forward || row.family == gpu::Family::backward_delta || row.family == gpu::Family::backward_dq;
  const gpu::AttentionArgs a = fill.attention(by_query);
  grid = {std::uint32_t(a.tiles * (by_query ? p.H : p.Hk) * p.B), 1, 1};
  block = {std::uint32_t(row.threads()), 1, 1};
  if (forward) {
    gpu::ForwardArgs args{};
    args.attention = a;
    args.out = fill.tensor("out", p.Sq, p.H, p.Dv), args.lse = fill.statistic("lse");
    args.splits.count = 1;
    return arguments.add_bytes(std::as_bytes(std::span(&args, 1)));
  }
  gpu::BackwardArgs args{};
  args.attention = a;
  args.dout = fill.tensor("dout", p.Sq, p.H, p.Dv), args.out = fill.tensor("out", p.Sq, p.H, p.Dv);
  args.dq = fill.tensor("dq", p.Sq, p.H, p.D), args.dk = fill.tensor("dk", p.Sk, p.Hk, p.D);
  args.dv = fill.tensor("dv", p.Sk, p.Hk, p.Dv);
  args.lse = fill.statistic("lse"), args.delta = fill.statistic("delta");
  arguments.add_bytes(std::as_bytes(std::span(&args, 1)));
}

}  // namespace gfxsim::cli
#else
namespace gfxsim::cli {

void add_attention(const std::string&, const Options&, ArgumentList&, Dim3&, Dim3&) {
  throw Error("--attention needs csrc/hip, beside which this gfxsim was not built; give the arguments with --arg");
}

}  // namespace gfxsim::cli
#endif
