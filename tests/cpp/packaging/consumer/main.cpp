// A program outside this project: prints the library's version and the instruction sets of this machine.
#include <flash_attn/attention.h>

#include <iostream>

int main() {
  std::cout << "flash_attn " << flash_attn::kVersion << ", instruction sets:";
  for (const auto& name : flash_attn::cpu_instruction_sets()) std::cout << ' ' << name;
  std::cout << '\n';
}
