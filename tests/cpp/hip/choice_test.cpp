// The choice of kernels: every combination has a row or a reason.
#include "hip/host/choice.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "flash_attn/gpu.h"
#include "hip/page_size.h"
#include "hip/runtime/code_objects.h"

namespace flash_attn::gpu {
namespace {

Problem problem(DType dtype, index_t D, index_t Dv) {
  Problem p;
  p.dtype = dtype, p.device = Device::gpu;
  p.B = 1, p.H = p.Hk = 2, p.Sq = p.Sk = 100, p.D = D, p.Dv = Dv;
  p.scale = 0.1;
  return p;
}

std::vector<std::string> amd_targets() {
  std::vector<std::string> targets;
  for (const std::string& target : embedded_targets())
    if (target.rfind("gfx", 0) == 0) targets.push_back(target);
  return targets;
}

std::string refusal(const Problem& p, Pass pass, const std::string& target) {
  try {
    choose_kernels(p, pass, target, Variant::general);
  } catch (const NotSupported& error) {
    return error.what();
  }
  return "";
}

TEST(Choice, EveryHeadDimUpTo256HasKernelsBothWays) {
  for (const std::string& target : amd_targets())
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32})
      for (const Variant variant : {Variant::plain, Variant::general})
        for (const index_t D : {1, 40, 64, 65, 128, 129, 192, 256})
          for (const index_t Dv : {1, 64, 80, 256})
            for (const Pass pass : {Pass::forward, Pass::backward, Pass::forward_and_s_dmask}) {
              const auto rows = choose_kernels(problem(dtype, D, Dv), pass, target, variant);
              const std::size_t backward = rows.size() == 4 ? 4 : 3;
              ASSERT_EQ(rows.size(), pass == Pass::forward ? 1 : pass == Pass::forward_and_s_dmask ? 2 : backward);
              for (const KernelRow* row : rows)
                EXPECT_TRUE(row->D >= D && row->Dv >= Dv && row->dtype == dtype) << row->name;
            }
}

TEST(Choice, TheNarrowestRowIsTaken) {
  for (const std::string& target : amd_targets()) {
    const auto name = [&](index_t D, index_t Dv) {
      return std::string(choose_kernels(problem(DType::bf16, D, Dv), Pass::forward, target, Variant::plain)[0]->name);
    };
    const bool has_matrix_engine = target_kind(target) != Target::gcn && target_kind(target) != Target::rdna2;
    const std::string variant = has_matrix_engine ? "plain" : "general";
    EXPECT_EQ(name(64, 64), "fa_forward_bf16_d64_" + variant);
    EXPECT_EQ(name(65, 8), "fa_forward_bf16_d128_" + variant);
    EXPECT_EQ(name(8, 129), "fa_forward_bf16_d256_" + variant);
  }
}

TEST(Choice, EveryKindOfTargetHasRowsForEveryDtypeAndPass) {
  for (const Target target : {Target::gcn, Target::cdna, Target::rdna2, Target::rdna4, Target::cuda})
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32})
      for (const int D : {64, 128, 256}) {
        const auto has = [&](Family family) {
          return std::any_of(std::begin(kKernels), std::end(kKernels), [&](const KernelRow& row) {
            return row.family == family && row.target == target && row.dtype == dtype && row.D == D &&
                   row.variant == Variant::general;
          });
        };
        EXPECT_TRUE(has(Family::forward) && has(Family::backward_dq)) << to_string(dtype) << D;
        EXPECT_NE(has(Family::backward_dkdv), has(Family::backward_dk) && has(Family::backward_dv)) << D;
      }
}

TEST(Choice, TargetsHaveTheirKind) {
  EXPECT_EQ(target_kind("gfx906"), Target::gcn);
  EXPECT_EQ(target_kind("gfx90a"), Target::cdna);
  EXPECT_EQ(target_kind("gfx1030"), Target::rdna2);
  EXPECT_EQ(target_kind("gfx1201"), Target::rdna4);
  EXPECT_EQ(target_kind("sm_90"), Target::cuda);
}

TEST(Choice, RefusalsNameWhatThereIs) {
  for (const std::string& target : amd_targets()) {
    EXPECT_NE(refusal(problem(DType::bf16, 257, 64), Pass::forward, target).find("up to D = 256"), std::string::npos);
    EXPECT_NE(refusal(problem(DType::f64, 64, 64), Pass::backward, target).find("accepted dtypes"), std::string::npos);
  }
  const std::string unknown = refusal(problem(DType::bf16, 64, 64), Pass::forward, "gfx803");
  EXPECT_NE(unknown.find("gfx803"), std::string::npos);
  EXPECT_NE(unknown.find("gfx942"), std::string::npos);
  const std::string lacking = refusal(problem(DType::bf16, 64, 64), Pass::forward, "sm_120");
  EXPECT_NE(lacking.find("GPU_ARCHS=sm_120"), std::string::npos) << lacking;
}

TEST(Choice, FeaturesThatNeedTheGeneralVariant) {
  const auto variant = [](const Problem& p, bool regular = true) { return choose_variant(p, regular).variant; };
  Problem p = problem(DType::bf16, 64, 64);
  EXPECT_EQ(variant(p), Variant::plain);
  EXPECT_EQ(variant(p, false), Variant::general);
  p.window_right = 0;
  EXPECT_EQ(variant(p), Variant::plain);
  p.window_right = 1;
  EXPECT_EQ(variant(p), Variant::general);
  p = problem(DType::bf16, 64, 64), p.window_left = 3;
  EXPECT_EQ(variant(p), Variant::general);
  p = problem(DType::bf16, 64, 64), p.scale = 0;
  EXPECT_EQ(variant(p), Variant::general);
  p = problem(DType::bf16, 64, 64), p.softcap = 2;
  EXPECT_EQ(variant(p), Variant::general);
  p = problem(DType::bf16, 64, 64), p.dropout.active = true;
  EXPECT_EQ(variant(p), Variant::general);
  EXPECT_EQ(variant(problem(DType::f32, 64, 64)), Variant::general);
}

TEST(Choice, KeysInACacheHaveAVariantOfTheirOwn) {
  const std::int32_t any = 0;
  const auto of = [](const Problem& p) { return choose_variant(p, true); };
  for (const DType dtype : {DType::bf16, DType::f32}) {
    Problem p = problem(dtype, 64, 64);
    p.softcap = 2;
    for (const std::int32_t** table : {&p.storage.used, &p.storage.leftpad, &p.storage.batch_index, &p.storage.pages}) {
      *table = &any;
      EXPECT_EQ(of(p).variant, Variant::cache);
      EXPECT_EQ(of(p).reason,
                std::string("cache variant: keys in ") + (table == &p.storage.pages ? "pages" : "a cache"));
      *table = nullptr;
    }
  }
  for (const std::string& target : amd_targets()) {
    Problem p = problem(DType::bf16, 100, 64);
    p.storage.appended = 1;
    const auto rows = choose_kernels(p, Pass::forward, target, Variant::cache);
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(std::string(rows[0]->name), "fa_forward_bf16_d128_cache");
    EXPECT_EQ(rows[1], &only_kernel(p, Family::append, target));
    p.D = 300;
    EXPECT_THROW(only_kernel(p, Family::append, target), NotSupported);
  }
}

// One query to a sequence of 4096 keys: a block for each of two heads.
Problem decoding() {
  Problem p = problem(DType::bf16, 128, 128);
  p.Sq = 1, p.Sk = 4096;
  return p;
}

TEST(Splits, FillAGpuThatHasMoreMultiprocessorsThanThereAreBlocks) {
  const auto count = [](const Problem& p, int multiprocessors, Pass pass = Pass::forward) {
    return choose_splits(p, pass, {"gfx942", "", multiprocessors}, true).count;
  };
  Problem p = decoding();
  EXPECT_EQ(count(p, 4), 8) << "four blocks of the decode variant to a multiprocessor";
  p.B = 2;
  EXPECT_EQ(count(p, 4), 4);
  EXPECT_EQ(count(p, 1), 1);
  p = decoding();
  EXPECT_EQ(count(p, 304), 32) << "a range of fewer keys than kKeysWorthARange is not worth combining";
  EXPECT_EQ(count(p, 304, Pass::forward_and_s_dmask), 1);
  p.Sk = 1 << 20;
  EXPECT_EQ(count(p, 304), 128);
  p = decoding(), p.Sq = 4096;
  EXPECT_EQ(count(p, 304), 1) << "there is a faster variant while many blocks are there";
  const std::int32_t any = 0;
  p.storage.used = &any;
  EXPECT_GT(count(p, 304), 1);
  p.window_left = 1000, p.window_right = 0;
  EXPECT_EQ(count(p, 304), 9) << "a block has no use for more keys";
  p.B = 0;
  EXPECT_EQ(count(p, 304), 1);
}

TEST(Splits, AreWhatNumSplitsAsksFor) {
  Problem p = decoding();
  const auto choose = [&](bool has_scratch) {
    return choose_splits(p, Pass::forward, {"gfx1201", "", 64}, has_scratch);
  };
  p.num_splits = 1;
  EXPECT_EQ(choose(true).count, 1);
  p.num_splits = 7;
  EXPECT_EQ(choose(true).count, 7);
  EXPECT_EQ(choose(true).reason, "keys in 7 ranges: num_splits");
  p.Sk = 40;
  EXPECT_LT(choose(true).count, 7) << "a range has a step of keys";
  p.Sk = 0;
  EXPECT_EQ(choose(true).count, 1);
}

TEST(Splits, NeedMemoryThatTheCallerLends) {
  Problem p = decoding();
  const GpuDevice device{"gfx942", "", 304};
  EXPECT_EQ(choose_splits(p, Pass::forward, device, false).count, 1);
  EXPECT_NE(choose_splits(p, Pass::forward, device, false).reason.find("no scratch memory"), std::string::npos);
  p.num_splits = 2;
  EXPECT_THROW(choose_splits(p, Pass::forward, device, false), NotSupported);
  p.num_splits = 1;
  EXPECT_EQ(choose_splits(p, Pass::forward, device, false).reason, "");
}

TEST(Splits, AreTakenByVariantsForCaches) {
  const auto choose = [](const Problem& p, int multiprocessors) {
    const SplitChoice splits = choose_splits(p, Pass::forward, {"gfx942", "", multiprocessors}, true);
    return choose_variant(p, true, splits);
  };
  EXPECT_EQ(choose(decoding(), 8).variant, Variant::decode);
  EXPECT_EQ(choose(decoding(), 8).reason, "decode variant: keys in ranges");
  EXPECT_EQ(choose(decoding(), 304).variant, Variant::cache) << "too few blocks of a wave";
  Problem p = decoding();
  p.num_splits = 1;
  EXPECT_EQ(choose(p, 1).variant, Variant::plain) << "neither a cache nor ranges";
  const std::int32_t any = 0;
  p.storage.pages = &any;
  EXPECT_EQ(choose(p, 1).variant, Variant::decode);
  EXPECT_EQ(choose(p, 1).reason, "decode variant: keys in pages");
  p.Sq = 17;
  EXPECT_EQ(choose(p, 1).variant, Variant::cache) << "more queries than a block has rows";
  p.Sq = 1, p.dtype = DType::f32;
  EXPECT_EQ(choose(p, 1).variant, Variant::cache) << "there is no such kernel";
}

TEST(PageSize, DividesEverySlot) {
  for (std::int64_t size = 1; size < std::int64_t(1) << 31; size = size < 300 ? size + 1 : size * 3 + 1) {
    const PageSize page = page_size(std::int32_t(size));
    const auto check = [&](std::int64_t slot) {
      if (slot < 0 || slot >= std::int64_t(1) << 31) return;
      ASSERT_EQ(page.page_of(std::uint32_t(slot)), slot / size) << slot << " by " << size;
    };
    for (std::int64_t slot = 0; slot < 3 * std::min<std::int64_t>(size, 300); ++slot) check(slot);
    for (std::int64_t pages = 1; pages < std::int64_t(1) << 31; pages = pages * 2 + 1)
      for (const std::int64_t offset : {-1, 0, 1}) check(pages * size + offset);
    for (std::int64_t slot = (std::int64_t(1) << 31) - 300; slot < std::int64_t(1) << 31; ++slot) check(slot);
  }
}

TEST(CodeObjects, EveryRowOfEveryTargetIsInItsObject) {
  for (const std::string& target : embedded_targets())
    for (const std::string_view name : {"forward", "backward"}) {
      const std::vector<std::byte> object = unpack_code_object(target, std::string(name));
      const std::string_view text(reinterpret_cast<const char*>(object.data()), object.size());
      for (const KernelRow& row : kKernels) {
        if (row.target != target_kind(target) || object_name(row.family) != name) continue;
        ASSERT_NE(text.find(row.name), std::string_view::npos) << row.name << " in " << target;
      }
    }
}

TEST(CodeObjects, AreListedOrTheirAbsenceExplained) {
  EXPECT_NE(code_objects().empty(), missing_code_objects().empty());
  for (const CodeObject& object : code_objects())
    EXPECT_EQ(unpack_code_object(object.target, object.name).size(), object.bytes);
  EXPECT_THROW(unpack_code_object("gfx803", "forward"), NotSupported);
}

TEST(CodeObjects, NvidiaRunsOlderMinorsOfItsMajor) {
  const auto targets = embedded_targets();
  if (std::find(targets.begin(), targets.end(), "sm_80") != targets.end()) {
    EXPECT_EQ(embedded_target_for("sm_86"), "sm_80");
  }
  EXPECT_EQ(embedded_target_for("gfx803"), "");
  EXPECT_EQ(embedded_target_for("sm_30"), "");
}

}  // namespace
}  // namespace flash_attn::gpu
