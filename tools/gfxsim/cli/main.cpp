// The gfxsim command: see --help.
#include <cstdio>
#include <string>
#include <vector>

#include "commands.h"
#include "gfxsim/gfxsim.h"

namespace {

constexpr const char* kHelp = R"(gfxsim: executes AMDGPU code objects on the CPU and checks what they do.

  gfxsim run FILE --kernel NAME [options]   run a kernel, print what was found; exit status 1 if anything was
  gfxsim stats FILE [--kernel NAME]         registers, LDS, spills and static opcode counts of each kernel
  gfxsim disasm FILE [--kernel NAME]        instructions, with those that cannot be simulated marked
  gfxsim opcodes [FILE]                     opcodes that are simulated, or those in FILE with their counts; exit
                                            status 1 when one in FILE is not simulated or has no unit check
  gfxsim selfcheck [--seed N] [--fail-fast] the unit checks of all opcodes, or those up to the first that fails

Options of every command:
  --target NAME       gfx942, gfx950, gfx1100 to gfx1103, gfx1150, gfx1151, gfx1200 or gfx1201 (default gfx942)
  --json              print JSON

Options of run:
  --grid X[,Y[,Z]]    workgroups (default 1)
  --block X[,Y[,Z]]   work-items of a workgroup (default 64)
  --lds BYTES         dynamic LDS (default 0)
  --arg KIND:VALUE    the next argument, in the kernel's order:
                        i32:N  i64:N  f32:X          a value
                        buffer:BYTES                 a zeroed buffer of its own
                        random:TYPE:COUNT            numbers from a normal distribution; TYPE is f32, f16 or bf16
                        file:PATH                    a buffer with the file's bytes
                        bytes:HEX                    raw bytes, as they are
  --attention B=1,H=2,S=512,...   instead of --arg, --grid and --block: a problem for a kernel of csrc/hip (build/dev/kernels).
                        B, H, Hk, Sq, Sk, D, Dv, S (both lengths), causal=1; the type is the kernel's.
                        Buffers are q, k, v, out, lse, and of backward dout, dq, dk, dv, delta, filled at random
  --dump BUFFER=PATH  after the run, write a buffer to a file: an argument's number (from 0), or a name of --attention
  --compare-orders N  run in N wave orders and report results that differ
  --schedule NAME     in-order, round-robin or random (default in-order)
  --seed N            of the random schedule and of random buffers (default 0)
  --check LIST        all, none, or some of undefined,races,waits,barriers,unit-checks (default all)
  --threads N         host threads; 0: one per processor (default 1)
  --nop-at ADDRESS    leave out one instruction: is this barrier or wait needed?
  --max-instructions N  of one wave, before it counts as a run-away loop
)";

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
      std::fputs(kHelp, stdout);
      return arguments.empty() ? 2 : 0;
    }
    return gfxsim::cli::dispatch(gfxsim::cli::parse_options(arguments));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gfxsim: %s\n", error.what());
    return 2;
  }
}
