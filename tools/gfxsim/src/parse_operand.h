#pragma once

#include <string_view>

#include "op.h"
#include "target.h"

namespace gfxsim {

/// A register, a named operand or a constant, with its sign modifiers. False when `text` is none of these.
bool parse_operand(std::string_view text, Literal literal, Operand& out);

/// One modifier such as offset:16 or row_mask:0xf. False when it is unknown or the opcode does not take it.
bool parse_modifier(std::string_view text, Op& op);

}  // namespace gfxsim
