// The GPU backend: chooses kernels, fills their arguments, launches them on the caller's stream. It allocates nothing
// itself, waits for nothing and reads nothing from GPU memory, so a call can be captured in a graph.
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

std::uint32_t checked_blocks(index_t blocks, const KernelRow& row, index_t B, index_t heads) {
  // HIP counts the grid in work-items, in 32 bits.
  const index_t most = ((index_t(1) << 32) - 1) / row.threads();
  if (blocks > most)
    throw NotSupported(std::string("flash_attn: a launch of ") + std::to_string(blocks) +
                       " blocks is needed for B = " + std::to_string(B) + " and " + std::to_string(heads) +
                       " heads, and a GPU takes at most " + std::to_string(most) + "; split the batch");
  return static_cast<std::uint32_t>(blocks);
}

// Blocks of a launch: `tiles` * `splits` for every head and sequence, and with cu_seqlens for every head as many once
// more, which share the rows outside of all sequences, to clear them. S_dmask has none.
std::uint32_t blocks_of(const AttentionArgs& a, const KernelRow& row, index_t heads, index_t splits = 1) {
  const bool clears = a.cu_seqlens_q && row.family != Family::forward_dmask;
  return checked_blocks(a.tiles * splits * heads * (index_t(a.B) + (clears ? 1 : 0)), row, a.B, heads);
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
  if (row.family == Family::combine) return "a wave for " + std::to_string(row.wave()) + " features of a row";
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

void* lend(const GpuQueue& queue, index_t bytes) {
  if (bytes == 0) return nullptr;
  if (void* memory = queue.scratch(queue.scratch_context, bytes)) return memory;
  throw Error("flash_attn: GpuQueue::scratch lent no memory where " + std::to_string(bytes) +
              " bytes were asked for; it must lend them, or pass num_splits = 1");
}

// The kernels of a forward pass, and why these. Of a folded problem (fold_heads).
struct ForwardKernels {
  SplitChoice splits;
  VariantChoice variant;
  std::vector<const KernelRow*> rows;  // forward, then what writes S_dmask
  const KernelRow* combine = nullptr;  // If keys are in more than one range.

  ForwardKernels(const Problem& p, Pass pass, bool regular, const GpuDevice& device, bool has_scratch)
      : splits(choose_splits(p, pass, device, has_scratch)),
        variant(choose_variant(p, regular, splits)),
        rows(choose_kernels(p, pass, device.target, variant.variant)) {
    if (splits.count > 1) combine = &only_kernel(p, Family::combine, device.target);
  }
};

// A forward pass that is known to be possible.
class ForwardLaunch {
 public:
  GpuRuntime& runtime;

  ForwardLaunch(const ForwardProblem& given, const GpuQueue& queue)
      : runtime(runtime_of(queue)), queue_(queue), f_(fold_heads(given)), args_(forward_args(f_)) {
    const Pass pass = f_.s_dmask ? Pass::forward_and_s_dmask : Pass::forward;
    require_supported(f_.problem, pass);
    const ForwardKernels kernels(f_.problem, pass, args_.attention.regular, runtime.device(queue.device),
                                 queue.scratch != nullptr);
    rows_ = kernels.rows, combine_ = kernels.combine;
    args_.attention.tiles = tiles_of(f_.problem.Sq, *rows_[0]);
    args_.splits.count = std::int32_t(kernels.splits.count);
    blocks_ = blocks_of(args_.attention, *rows_[0], f_.problem.H, args_.splits.count);
    if (!combine_) return;
    combine_args_ = combine_args(f_, args_, combine_->wave());
    const index_t blocks = ceil_div(args_.splits.rows * combine_args_.waves_per_row, index_t(combine_->waves));
    combine_blocks_ = checked_blocks(blocks, *combine_, f_.problem.B, f_.problem.H);
    give_scratch(args_.splits, f_.problem, lend(queue, scratch_bytes(f_.problem, args_.splits.count)));
    combine_args_.splits = args_.splits;
  }

  void run() const {
    if (runtime.simulated()) runtime.set_buffers(buffers_of(f_, args_.splits));
    runtime.launch(*rows_[0], queue_, blocks_, &args_);
    if (f_.s_dmask) write_s_dmask();
    if (combine_blocks_ > 0) runtime.launch(*combine_, queue_, combine_blocks_, &combine_args_);
  }

 private:
  void write_s_dmask() const {
    const Problem& p = f_.problem;
    const KernelRow& row = *rows_[1];
    ForwardDmaskArgs args = dmask_args(f_);
    args.attention.tiles = tiles_of(p.Sq, row);
    if (p.Sq * p.Sk > 0) runtime.launch(row, queue_, blocks_of(args.attention, row, p.H), &args);
  }

  const GpuQueue& queue_;
  ForwardProblem f_;
  ForwardArgs args_;
  std::vector<const KernelRow*> rows_;
  const KernelRow* combine_;
  CombineArgs combine_args_{};
  std::uint32_t blocks_, combine_blocks_ = 0;
};

class GpuBackend final : public Backend {
 public:
  const char* name() const override { return "gpu"; }

  Explanation explain(const Problem& given, Pass pass, const Executor& executor) const override {
    require_supported(given, pass);
    const GpuQueue& queue = executor.gpu;
    const GpuDevice& device = runtime_of(queue).device(queue.device);
    if (pass == Pass::backward) {
      const VariantChoice choice = choose_variant(given, is_regular(given));
      return explanation_of(given, queue, choice, choose_kernels(given, pass, device.target, choice.variant));
    }
    ForwardProblem f;
    f.problem = given;
    if (pass == Pass::forward) f = fold_heads(f);
    const Problem& p = f.problem;
    ForwardKernels kernels(p, pass, is_regular(p), device, queue.scratch != nullptr);
    if (kernels.combine) kernels.rows.push_back(kernels.combine);
    Explanation e = explanation_of(p, queue, kernels.variant, kernels.rows);
    if (!kernels.splits.reason.empty()) e.reasons.push_back(kernels.splits.reason);
    if (p.H != given.H)
      e.reasons.push_back("one query to a sequence: the " + std::to_string(given.group()) +
                          " heads that share a key head are rows of one");
    return e;
  }

  void forward(const ForwardProblem& f, const Executor& executor) const override {
    ForwardLaunch(f, executor.gpu).run();
  }

  void forward_with_cache(const CacheProblem& c, const Executor& executor) const override {
    const Problem& p = c.forward.problem;
    if (p.storage.appended == 0 && !c.rotary.given) return forward(c.forward, executor);
    const GpuQueue& queue = executor.gpu;
    ForwardProblem f = c.forward;
    if (c.rotary.given) f.problem.q = rotated_queries(c, queue);
    const ForwardLaunch launch(f, queue);
    GpuRuntime& runtime = launch.runtime;
    AppendArgs args = append_args(c, f.problem.q);
    const KernelRow& row = only_kernel(p, Family::append, runtime.device(queue.device).target);
    const std::uint32_t blocks = blocks_of(args.attention, row, 1);
    if (runtime.simulated()) runtime.set_buffers(buffers_of(c, f.problem.q));
    if (blocks > 0) runtime.launch(row, queue, blocks, &args);
    launch.run();
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
  // Rotated queries need memory, and out has it where Dv >= D: a block reads its queries before it writes their rows.
  static Operand rotated_queries(const CacheProblem& c, const GpuQueue& queue) {
    const Problem& p = c.forward.problem;
    if (p.D <= p.Dv) return c.forward.out;
    if (!queue.scratch)
      throw NotSupported("flash_attn: rotating q with D = " + std::to_string(p.D) +
                         " above Dv = " + std::to_string(p.Dv) +
                         " needs GPU memory, which GpuQueue::scratch does not lend; set it, or rotate q and k before");
    return {lend(queue, p.B * p.Sq * p.H * p.D * size_of(p.dtype)), p.Sq * p.H * p.D, p.H * p.D, p.D};
  }

  static Explanation explanation_of(const Problem& p, const GpuQueue& queue, const VariantChoice& choice,
                                    const std::vector<const KernelRow*>& rows) {
    const GpuDevice& device = queue.runtime->device(queue.device);
    Explanation e;
    e.backend = "gpu";
    e.kernel = list_names(rows);
    e.instruction_set = device.target;
    for (const KernelRow* each : rows) e.tile += (e.tile.empty() ? "" : "; ") + tile_of(*each);
    const KernelRow& row = rows[0]->family == Family::backward_delta ? *rows.back() : *rows.front();
    const bool has_no_other = row.variant != choice.variant;
    e.reasons = {
        std::string("GPU ") + std::to_string(queue.device) + " is a " + device.target + " (" + device.runtime + ")",
        has_no_other ? "general variant: " + device.target + " has no other" : choice.reason,
        std::string("head dims D = ") + std::to_string(p.D) + ", Dv = " + std::to_string(p.Dv) +
            " are padded to the kernel's " + std::to_string(row.D) + ", " + std::to_string(row.Dv)};
    return e;
  }
};

}  // namespace
}  // namespace gpu

const Backend& gpu_backend() {
  static const gpu::GpuBackend backend;
  return backend;
}

}  // namespace flash_attn
