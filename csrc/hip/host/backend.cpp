// The GPU backend: chooses kernels, fills their arguments, launches them on the caller's stream. It allocates nothing,
// waits for nothing and reads nothing from GPU memory, so a call can be captured in a graph.
#include "core/backend.h"

#include "core/features.h"
#include "hip/host/arguments.h"
#include "hip/host/choice.h"

namespace flash_attn {
namespace gpu {
namespace {

GpuRuntime& runtime_of(const GpuQueue& queue) {
  if (queue.runtime) return *queue.runtime;
  throw Error(
      "flash_attn: the tensors are on a GPU and the executor names no GPU queue; set Executor::gpu.runtime, for "
      "instance to &flash_attn::gpu_runtime()");
}

void require_supported(const Problem& p, Pass pass) {
  if (pass != Pass::forward)
    return require_features(p, "GPU", {Feature::softcap, Feature::alibi_slopes, Feature::window, Feature::dropout});
  require_features(p, "GPU",
                   {Feature::softcap, Feature::alibi_slopes, Feature::window, Feature::dropout, Feature::block_table,
                    Feature::cache_batch_idx, Feature::seqused_k, Feature::leftpad_k});
}

// Blocks of a launch: `tiles` for every head and sequence, and with cu_seqlens for every head as many once more, which
// share the rows outside of all sequences, to clear them. S_dmask has none.
std::uint32_t blocks_of(const AttentionArgs& a, const KernelRow& row, index_t heads) {
  const index_t blocks =
      a.tiles * heads * (index_t(a.B) + (a.cu_seqlens_q && row.family != Family::forward_dmask ? 1 : 0));
  // HIP counts the grid in work-items, in 32 bits.
  const index_t most = ((index_t(1) << 32) - 1) / row.threads();
  if (blocks > most)
    throw NotSupported(std::string("flash_attn: a launch of ") + std::to_string(blocks) +
                       " blocks is needed for B = " + std::to_string(a.B) + " and " + std::to_string(heads) +
                       " heads, and a GPU takes at most " + std::to_string(most) + "; split the batch");
  return static_cast<std::uint32_t>(blocks);
}

std::int32_t tiles_of(index_t rows, const KernelRow& row) {
  return std::int32_t(max_of<index_t>(1, ceil_div(rows, index_t(row.block_rows()))));
}

bool keeps_keys(Family family) {
  return family == Family::backward_dkdv || family == Family::backward_dk || family == Family::backward_dv;
}

std::string list_names(const std::vector<const KernelRow*>& rows) {
  std::string names;
  for (const KernelRow* row : rows) names += (names.empty() ? "" : ", ") + std::string(row->name);
  return names;
}

std::string tile_of(const KernelRow& row) {
  if (row.family == Family::append) return "a block for a row of all heads";
  const auto number = [](int n) { return std::to_string(n); };
  const bool keys = keeps_keys(row.family);
  return std::string("blocks of ") + number(row.block_rows()) + (keys ? " keys x " : " queries x ") +
         number(row.streamed_rows) + (keys ? " queries" : " keys") + " a step, " + number(row.waves) + " waves";
}

// Whether a head has one row, which sees the same keys by the same rule as those of the heads that share its key head.
bool can_fold(const Problem& p) {
  return !p.varlen && p.Sq == 1 && p.group() > 1 && p.window_left < 0 && !p.alibi_slopes && !p.dropout.active;
}

// Decoding: these heads as rows of one, so that a block loads keys for all of them. The LSE lies the same.
ForwardProblem fold_heads(ForwardProblem f) {
  Problem& p = f.problem;
  if (!can_fold(p)) return f;
  const index_t group = p.group();
  for (Operand* x : {&p.q, &f.out}) x->row_stride = x->head_stride, x->head_stride *= group;
  p.Sq = group, p.H = p.Hk;
  p.window_right = -1;
  return f;
}

// A forward pass that is known to be possible.
struct ForwardLaunch {
  GpuRuntime& runtime;
  ForwardArgs args;
  std::vector<const KernelRow*> rows;
  std::uint32_t blocks;

  ForwardLaunch(const ForwardProblem& given, const Executor& executor) : runtime(runtime_of(executor.gpu)) {
    const ForwardProblem f = fold_heads(given);
    const Problem& p = f.problem;
    const Pass pass = f.s_dmask ? Pass::forward_and_s_dmask : Pass::forward;
    require_supported(p, pass);
    args = forward_args(f);
    const Variant variant = choose_variant(p, args.attention.regular).variant;
    rows = choose_kernels(p, pass, runtime.device(executor.gpu.device).target, variant);
    args.attention.tiles = tiles_of(p.Sq, *rows[0]);
    blocks = blocks_of(args.attention, *rows[0], p.H);
  }
  void run(const GpuQueue& queue) const { runtime.launch(*rows[0], queue, blocks, &args); }
};

class GpuBackend final : public Backend {
 public:
  const char* name() const override { return "gpu"; }

  Explanation explain(const Problem& given, Pass pass, const Executor& executor) const override {
    require_supported(given, pass);
    ForwardProblem f;
    f.problem = given;
    const bool folded = pass == Pass::forward && can_fold(given);
    const Problem p = folded ? fold_heads(f).problem : given;
    const GpuDevice device = runtime_of(executor.gpu).device(executor.gpu.device);
    const VariantChoice choice = choose_variant(p, is_regular(p));
    const std::vector<const KernelRow*> rows = choose_kernels(p, pass, device.target, choice.variant);
    Explanation e;
    e.backend = name();
    e.kernel = list_names(rows);
    e.instruction_set = device.target;
    for (const KernelRow* each : rows) e.tile += (e.tile.empty() ? "" : "; ") + tile_of(*each);
    const KernelRow& row = pass == Pass::backward ? *rows.back() : *rows.front();
    const bool has_no_other = row.variant != choice.variant;
    e.reasons = {std::string("GPU ") + std::to_string(executor.gpu.device) + " is a " + device.target + " (" +
                     device.runtime + ")",
                 has_no_other ? "general variant: " + device.target + " has no other" : choice.reason,
                 std::string("head dims D = ") + std::to_string(p.D) + ", Dv = " + std::to_string(p.Dv) +
                     " are padded to the kernel's " + std::to_string(row.D) + ", " + std::to_string(row.Dv)};
    if (folded)
      e.reasons.push_back("one query to a sequence: the " + std::to_string(given.group()) +
                          " heads that share a key head are rows of one");
    return e;
  }

  void forward(const ForwardProblem& f, const Executor& executor) const override {
    const ForwardLaunch launch(f, executor);
    if (launch.runtime.simulated()) launch.runtime.set_buffers(buffers_of(f));
    launch.run(executor.gpu);
    if (f.s_dmask) write_s_dmask(f, *launch.rows[1], executor.gpu, launch.runtime);
  }

  void forward_with_cache(const CacheProblem& c, const Executor& executor) const override {
    const Problem& p = c.forward.problem;
    if (p.storage.appended == 0 && !c.rotary.given) return forward(c.forward, executor);
    ForwardProblem f = c.forward;
    // Rotated queries need memory, and out has it: a block reads its queries before it writes their rows of out.
    if (c.rotary.given) f.problem.q = f.out;
    if (c.rotary.given && p.D > p.Dv)
      throw NotSupported("flash_attn: the GPU backend rotates q into out, which needs Dv >= D, got D = " +
                         std::to_string(p.D) + ", Dv = " + std::to_string(p.Dv) +
                         "; rotate q and k by apply_rotary_emb first, or move the tensors to the CPU");
    const ForwardLaunch launch(f, executor);
    AppendArgs args = append_args(c);
    const KernelRow& row = append_kernel(p, launch.runtime.device(executor.gpu.device).target);
    const std::uint32_t blocks = blocks_of(args.attention, row, 1);
    if (launch.runtime.simulated()) launch.runtime.set_buffers(buffers_of(c));
    if (blocks > 0) launch.runtime.launch(row, executor.gpu, blocks, &args);
    if (launch.runtime.simulated()) launch.runtime.set_buffers(buffers_of(f));
    launch.run(executor.gpu);
  }

  void backward(const BackwardProblem& b, const Executor& executor) const override {
    const Problem& p = b.problem;
    require_supported(p, Pass::backward);
    const GpuQueue& queue = executor.gpu;
    GpuRuntime& runtime = runtime_of(queue);
    BackwardArgs args = backward_args(b);
    const Variant variant = choose_variant(p, args.attention.regular).variant;
    const std::vector<const KernelRow*> rows =
        choose_kernels(p, Pass::backward, runtime.device(queue.device).target, variant);
    if (runtime.simulated()) runtime.set_buffers(buffers_of(b));
    for (const KernelRow* row : rows) {
      const bool keys = keeps_keys(row->family);
      args.attention.tiles = tiles_of(keys ? p.Sk : p.Sq, *row);
      runtime.launch(*row, queue, blocks_of(args.attention, *row, keys ? p.Hk : p.H), &args);
    }
  }

 private:
  static void write_s_dmask(const ForwardProblem& f, const KernelRow& row, const GpuQueue& queue, GpuRuntime& runtime) {
    const Problem& p = f.problem;
    ForwardDmaskArgs args = dmask_args(f);
    args.attention.tiles = tiles_of(p.Sq, row);
    if (p.Sq * p.Sk > 0) runtime.launch(row, queue, blocks_of(args.attention, row, p.H), &args);
  }
};

}  // namespace
}  // namespace gpu

const Backend& gpu_backend() {
  static const gpu::GpuBackend backend;
  return backend;
}

}  // namespace flash_attn
