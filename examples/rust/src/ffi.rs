//! flash_attn/flash_attn.h, declaration by declaration and in its order. What arguments mean, their shapes and dtypes:
//! flash_attn/attention.h and flash_attn/rotary.h. `cargo test` compares this file with the installed header.
#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_int, c_uint, c_void};

/// What a call returns. A number and no Rust enum: a later library may return one that this file does not know.
pub type flash_attn_status = c_uint;
/// The call has done what was asked for.
pub const FLASH_ATTN_OK: flash_attn_status = 0;
/// Malformed arguments: nothing was written.
pub const FLASH_ATTN_INVALID: flash_attn_status = 1;
/// Well-formed, and no backend of the library computes it: nothing was written.
pub const FLASH_ATTN_NOT_SUPPORTED: flash_attn_status = 2;
/// Out of memory, or a GPU runtime's error.
pub const FLASH_ATTN_FAILED: flash_attn_status = 3;
/// A struct_size that the library does not know.
pub const FLASH_ATTN_VERSION: flash_attn_status = 4;

/// What a tensor's elements are.
pub type flash_attn_dtype = c_uint;
/// IEEE half precision.
pub const FLASH_ATTN_F16: flash_attn_dtype = 0;
/// The upper half of an f32.
pub const FLASH_ATTN_BF16: flash_attn_dtype = 1;
/// Rust's f32.
pub const FLASH_ATTN_F32: flash_attn_dtype = 2;
/// Rust's f64.
pub const FLASH_ATTN_F64: flash_attn_dtype = 3;
/// Rust's i32.
pub const FLASH_ATTN_I32: flash_attn_dtype = 4;
/// Rust's i64.
pub const FLASH_ATTN_I64: flash_attn_dtype = 5;
/// One byte, nonzero is true.
pub const FLASH_ATTN_BOOL: flash_attn_dtype = 6;

/// Strided view of the caller's memory, strides in elements. `ndim` = 0: not given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flash_attn_tensor {
    pub data: *mut c_void,
    pub dtype: i32,
    pub ndim: i32,
    pub sizes: [i64; 4],
    pub strides: [i64; 4],
}

/// attention.h: AttentionProblem. Defaults other than zero: `softmax_scale` 1, windows -1 (unbounded).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flash_attn_problem {
    pub struct_size: usize,
    pub q: flash_attn_tensor,
    pub k: flash_attn_tensor,
    pub v: flash_attn_tensor,
    pub cu_seqlens_q: flash_attn_tensor,
    pub cu_seqlens_k: flash_attn_tensor,
    pub max_seqlen_q: i64,
    pub max_seqlen_k: i64,
    pub softmax_scale: f64,
    pub softcap: f64,
    pub causal: i32,
    pub reserved: i32,
    pub window_left: i64,
    pub window_right: i64,
    pub alibi_slopes: flash_attn_tensor,
    pub dropout_p: f64,
    pub rng_state: flash_attn_tensor,
    pub attn_bias: flash_attn_tensor,
    pub attn_mask: flash_attn_tensor,
    pub key_begin: flash_attn_tensor,
    pub key_end: flash_attn_tensor,
    pub block_table: flash_attn_tensor,
    pub cache_batch_idx: flash_attn_tensor,
    pub seqused_k: flash_attn_tensor,
    pub leftpad_k: flash_attn_tensor,
    pub num_splits: i64,
    pub learnable_sink: flash_attn_tensor,
}

/// attention.h: ForwardArgs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flash_attn_forward_args {
    pub struct_size: usize,
    pub problem: *const flash_attn_problem,
    pub out: flash_attn_tensor,
    pub lse: flash_attn_tensor,
    pub s_dmask: flash_attn_tensor,
}

/// attention.h: BackwardArgs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flash_attn_backward_args {
    pub struct_size: usize,
    pub problem: *const flash_attn_problem,
    pub dout: flash_attn_tensor,
    pub out: flash_attn_tensor,
    pub lse: flash_attn_tensor,
    pub dq: flash_attn_tensor,
    pub dk: flash_attn_tensor,
    pub dv: flash_attn_tensor,
    pub softmax_d: flash_attn_tensor,
    pub dlse: flash_attn_tensor,
    pub dbias: flash_attn_tensor,
    pub dsink: flash_attn_tensor,
}

/// attention.h: CacheArgs. Default other than zero: `rotary_interleaved` 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flash_attn_cache_args {
    pub struct_size: usize,
    pub problem: *const flash_attn_problem,
    pub k_new: flash_attn_tensor,
    pub v_new: flash_attn_tensor,
    pub rotary_cos: flash_attn_tensor,
    pub rotary_sin: flash_attn_tensor,
    pub rotary_interleaved: i32,
    pub reserved: i32,
    pub out: flash_attn_tensor,
    pub lse: flash_attn_tensor,
}

/// rotary.h: RotaryArgs. `out` may be `x`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flash_attn_rotary_args {
    pub struct_size: usize,
    pub x: flash_attn_tensor,
    pub cos: flash_attn_tensor,
    pub sin: flash_attn_tensor,
    pub out: flash_attn_tensor,
    pub offset: i64,
    pub offsets: flash_attn_tensor,
    pub cu_seqlens: flash_attn_tensor,
    pub max_seqlen: i64,
    pub interleaved: i32,
    pub conjugate: i32,
}

/// The caller's threads. `run` calls body(arg, worker) for worker = 0, and for as many of 1 .. n-1 as it has threads
/// for, and returns when these calls have.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct flash_attn_executor {
    pub struct_size: usize,
    pub num_threads: i32,
    pub reserved: i32,
    pub run: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            n: c_int,
            body: Option<unsafe extern "C" fn(arg: *mut c_void, worker: c_int)>,
            arg: *mut c_void,
        ),
    >,
    pub context: *mut c_void,
}

extern "C" {
    /// Defaults into the `struct_size` bytes that the caller has for a struct, and that number itself.
    pub fn flash_attn_default_problem(problem: *mut flash_attn_problem, struct_size: usize);
    /// As flash_attn_default_problem.
    pub fn flash_attn_default_forward_args(args: *mut flash_attn_forward_args, struct_size: usize);
    /// As flash_attn_default_problem.
    pub fn flash_attn_default_backward_args(args: *mut flash_attn_backward_args, struct_size: usize);
    /// As flash_attn_default_problem.
    pub fn flash_attn_default_cache_args(args: *mut flash_attn_cache_args, struct_size: usize);
    /// As flash_attn_default_problem.
    pub fn flash_attn_default_rotary_args(args: *mut flash_attn_rotary_args, struct_size: usize);

    /// Attention. `executor`, here and below: null is the library's own pool with one thread per processor.
    pub fn flash_attn_forward(
        args: *const flash_attn_forward_args,
        executor: *const flash_attn_executor,
    ) -> flash_attn_status;
    /// Its gradients.
    pub fn flash_attn_backward(
        args: *const flash_attn_backward_args,
        executor: *const flash_attn_executor,
    ) -> flash_attn_status;
    /// Attention over a cache that new keys and values are appended to first.
    pub fn flash_attn_with_cache(
        args: *const flash_attn_cache_args,
        executor: *const flash_attn_executor,
    ) -> flash_attn_status;
    /// Rotary position embedding.
    pub fn flash_attn_rotary(
        args: *const flash_attn_rotary_args,
        executor: *const flash_attn_executor,
    ) -> flash_attn_status;

    /// What the last call on this thread that did not return FLASH_ATTN_OK has to say. Valid until the next call.
    pub fn flash_attn_last_error() -> *const c_char;
    /// "major.minor.patch" of the library.
    pub fn flash_attn_version() -> *const c_char;
}
