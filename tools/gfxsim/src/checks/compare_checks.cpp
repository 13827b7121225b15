// Models of comparisons: the relation is looked up by name in a table of (less, equal, greater, unordered).
#include <map>

#include "vector_row.h"

namespace gfxsim {
namespace {

using u64 = std::uint64_t;

// The outcomes for which a comparison is true.
constexpr int kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8;
const std::map<std::string, int>& relations() {
  static const std::map<std::string, int> table = {
      {"lt", kLess},
      {"eq", kEqual},
      {"le", kLess | kEqual},
      {"gt", kGreater},
      {"lg", kLess | kGreater},
      {"ge", kGreater | kEqual},
      {"o", kLess | kEqual | kGreater},
      {"u", kUnordered},
      {"nge", kLess | kUnordered},
      {"nlg", kEqual | kUnordered},
      {"ngt", kLess | kEqual | kUnordered},
      {"nle", kGreater | kUnordered},
      {"neq", kLess | kGreater | kUnordered},
      {"nlt", kGreater | kEqual | kUnordered},
      {"ne", kLess | kGreater},
  };
  return table;
}

template <class T>
int outcome(T a, T b) {
  return a < b ? kLess : a == b ? kEqual : a > b ? kGreater : kUnordered;
}

int compare(const std::string& type, u64 a, u64 b) {
  if (type == "f32") return outcome(In::f32(a), In::f32(b));
  if (type == "f16") return outcome(In::f16(a), In::f16(b));
  if (type == "i32") return outcome(std::int32_t(a), std::int32_t(b));
  if (type == "u32") return outcome(std::uint32_t(a), std::uint32_t(b));
  if (type == "i16") return outcome(std::int16_t(a), std::int16_t(b));
  if (type == "u16") return outcome(std::uint16_t(a), std::uint16_t(b));
  return type == "i64" ? outcome(std::int64_t(a), std::int64_t(b)) : outcome(a, b);
}

struct Comparison {
  std::string relation, type;
  bool to_exec;
};

std::string run(Bench& bench, const std::string& instruction, const Comparison& c) {
  Wave& wave = bench.wave();
  const Pool pool = c.type == "f32" ? Pool::f32 : c.type == "f16" ? Pool::f16 : Pool::u32;
  const auto& values = special_values(pool);
  for (int round = 0; round < 24; ++round) {
    bench.randomise_registers();
    u64 a[kMaxLanes], b[kMaxLanes];
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const std::size_t at = std::size_t(round * wave.lanes + lane), n = values.size();
      a[lane] = at < n * n ? values[at % n] : draw(bench, pool);
      b[lane] = at < n * n ? values[at / n] : bench.word() % 4 ? draw(bench, pool) : a[lane];
      for (int half = 0; half < 2; ++half) {
        wave.v[half][lane] = std::uint32_t(a[lane] >> (32 * half));
        wave.v[2 + half][lane] = std::uint32_t(b[lane] >> (32 * half));
      }
    }
    bench.choose_exec(round);
    const u64 exec = wave.exec();
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    const u64 mask = wave.read_mask(c.to_exec ? int(kExec) : 12);
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const bool wanted = (exec >> lane & 1) && (compare(c.type, a[lane], b[lane]) & relations().at(c.relation));
      if (bool(mask >> lane & 1) != wanted)
        return hexadecimal(a[lane]) + ", " + hexadecimal(b[lane]) + " should give " + (wanted ? "1" : "0");
    }
  }
  return "";
}

void add(Checks& checks, const std::string& relation, const std::string& type) {
  const std::string sources = type == "i64" || type == "u64" ? "v[0:1], v[2:3]" : "v0, v2";
  const Comparison plain{relation, type, false}, to_exec{relation, type, true};
  const std::string name = relation + "_" + type;
  add_check(checks, "v_cmp_" + name + "_e64 s[12:13], " + sources, "",
            [=](Bench& bench, const std::string& instruction) { return run(bench, instruction, plain); });
  add_check(checks, "v_cmpx_" + name + "_e32 " + sources, "",
            [=](Bench& bench, const std::string& instruction) { return run(bench, instruction, to_exec); });
}

// The class of a float by the C library.
std::string check_class(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  const auto& values = special_values(Pool::f32);
  for (int round = 0; round < 24; ++round) {
    bench.randomise_registers();
    for (int lane = 0; lane < wave.lanes; ++lane) {
      wave.v[0][lane] = std::uint32_t(values[std::size_t(lane) % values.size()]);
      wave.v[2][lane] = 1u << (round % 12) | (round >= 12 ? bench.word() & 0x3ff : 0);
    }
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const std::uint32_t bits = wave.v[0][lane];
      const float x = std::bit_cast<float>(bits);
      const bool negative = std::signbit(x);
      int index = 0;
      switch (std::fpclassify(x)) {
        case FP_NAN: index = bits & 0x400000 ? 1 : 0; break;
        case FP_INFINITE: index = negative ? 2 : 9; break;
        case FP_NORMAL: index = negative ? 3 : 8; break;
        case FP_SUBNORMAL: index = negative ? 4 : 7; break;
        default: index = negative ? 5 : 6;
      }
      if (bool(wave.read_mask(12) >> lane & 1) != bool(wave.v[2][lane] >> index & 1))
        return hexadecimal(bits) + " is misclassified";
    }
  }
  return "";
}

}  // namespace

void add_compare_checks(Checks& checks) {
  for (const auto& [relation, outcomes] : relations()) {
    const bool is_float = relation != "ne",
               is_integer = !(outcomes & kUnordered) && relation != "o" && relation != "lg";
    if (is_float)
      for (const char* type : {"f32", "f16"}) add(checks, relation, type);
    if (is_integer)
      for (const char* type : {"i32", "u32", "i64", "u64", "i16", "u16"}) add(checks, relation, type);
  }
  add_check(checks, "v_cmp_class_f32_e64 s[12:13], v0, v2", "", check_class);
  add_check(checks, "v_cmp_gt_u32_sdwa s[12:13], v0, v2 src0_sel:BYTE_2 src1_sel:DWORD", "gfx942",
            [](Bench& bench, const std::string& instruction) -> std::string {
              for (int lane = 0; lane < bench.lanes(); ++lane) bench.wave().v[2][lane] = std::uint32_t(lane * 4);
              if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
              for (int lane = 0; lane < bench.lanes(); ++lane) {
                const bool wanted = (bench.wave().v[0][lane] >> 16 & 255) > std::uint32_t(lane * 4);
                if (bool(bench.wave().read_mask(12) >> lane & 1) != wanted) return "lane " + std::to_string(lane);
              }
              return "";
            });
}

}  // namespace gfxsim
