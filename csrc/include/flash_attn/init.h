/* All fields of a struct at their defaults, struct_size set. Inline, so that the size is the one that the program was
 * compiled with: a newer library may know more of the struct. Included by flash_attn.h. */
#ifndef FLASH_ATTN_INIT_H
#define FLASH_ATTN_INIT_H

#include "flash_attn/flash_attn.h"

static inline void flash_attn_problem_init(flash_attn_problem* problem) {
  flash_attn_default_problem(problem, sizeof(*problem));
}
static inline void flash_attn_forward_args_init(flash_attn_forward_args* args) {
  flash_attn_default_forward_args(args, sizeof(*args));
}
static inline void flash_attn_backward_args_init(flash_attn_backward_args* args) {
  flash_attn_default_backward_args(args, sizeof(*args));
}
static inline void flash_attn_cache_args_init(flash_attn_cache_args* args) {
  flash_attn_default_cache_args(args, sizeof(*args));
}
static inline void flash_attn_rotary_args_init(flash_attn_rotary_args* args) {
  flash_attn_default_rotary_args(args, sizeof(*args));
}

#endif
