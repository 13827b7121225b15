//! The calls. Each makes the C struct of its arguments; shapes, dtypes and what they hold are the library's to check.

use std::mem::{size_of, MaybeUninit};
use std::ptr::{null, null_mut};

use crate::error::Error;
use crate::ffi;
use crate::view::{View, ViewMut};

/// softmax(scale * q k^T) v over the keys that a query sees: q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), of one dtype.
/// flash_attn_problem has more, such as packed batches, windows and bias: further fields here, set in `problem`.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    pub q: View<'a>,
    pub k: View<'a>,
    pub v: View<'a>,
    pub scale: f64,
    /// Query i sees key j iff j <= i + Sk - Sq.
    pub causal: bool,
}

/// What forward has written: out (B,Sq,H,Dv) and the log-sum-exp of each row's scores (B,H,Sq), contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    pub out: View<'a>,
    pub lse: View<'a>,
}

/// Of the shapes of q, k and v; softmax_d, of lse's, is rowsum(dout * out). Overwritten, not accumulated.
#[derive(Debug)]
pub struct Gradients<'a> {
    pub dq: ViewMut<'a>,
    pub dk: ViewMut<'a>,
    pub dv: ViewMut<'a>,
    pub softmax_d: ViewMut<'a>,
}

/// Keys and values of all tokens so far: k (B,slots,Hk,D), v (B,slots,Hk,Dv); sequence b fills `lengths[b]` of its slots.
#[derive(Debug)]
pub struct Cache<'a> {
    pub k: ViewMut<'a>,
    pub v: ViewMut<'a>,
    pub lengths: View<'a>, // i32 (B)
}

impl Attention<'_> {
    /// Writes out (B,Sq,H,Dv) and lse (B,H,Sq).
    pub fn forward(&self, out: &mut ViewMut, lse: &mut ViewMut) -> Result<(), Error> {
        let problem = self.problem();
        let args = ffi::flash_attn_forward_args {
            struct_size: size_of::<ffi::flash_attn_forward_args>(),
            problem: &problem,
            out: out.raw,
            lse: lse.raw,
            s_dmask: NOT_GIVEN,
        };
        // SAFETY: views stay within slices that are borrowed during this call; what is written overlaps nothing.
        Error::check(unsafe { ffi::flash_attn_forward(&args, null()) })
    }

    /// From the gradient of out those of q, k and v.
    pub fn backward(&self, dout: View, saved: Saved, gradients: &mut Gradients) -> Result<(), Error> {
        let problem = self.problem();
        let args = ffi::flash_attn_backward_args {
            struct_size: size_of::<ffi::flash_attn_backward_args>(),
            problem: &problem,
            dout: dout.raw,
            out: saved.out.raw,
            lse: saved.lse.raw,
            dq: gradients.dq.raw,
            dk: gradients.dk.raw,
            dv: gradients.dv.raw,
            softmax_d: gradients.softmax_d.raw,
            dlse: NOT_GIVEN,
            dbias: NOT_GIVEN,
            dsink: NOT_GIVEN,
        };
        // SAFETY: as in forward.
        Error::check(unsafe { ffi::flash_attn_backward(&args, null()) })
    }

    fn problem(&self) -> ffi::flash_attn_problem {
        ffi::flash_attn_problem {
            q: self.q.raw,
            k: self.k.raw,
            v: self.v.raw,
            softmax_scale: self.scale,
            causal: self.causal.into(),
            ..problem_at_defaults()
        }
    }
}

impl Cache<'_> {
    /// Appends k_new (B,Snew,Hk,D) and v_new (B,Snew,Hk,Dv), then lets q (B,Sq,H,D) attend to all keys, causally: the
    /// new ones count as the last. `lengths` are those before; the caller adds Snew to them.
    pub fn append_and_attend(
        &mut self,
        q: View,
        (k_new, v_new): (View, View),
        scale: f64,
        out: &mut ViewMut,
        lse: &mut ViewMut,
    ) -> Result<(), Error> {
        let problem = ffi::flash_attn_problem {
            q: q.raw,
            k: self.k.raw,
            v: self.v.raw,
            softmax_scale: scale,
            causal: 1,
            seqused_k: self.lengths.raw,
            ..problem_at_defaults()
        };
        let args = ffi::flash_attn_cache_args {
            struct_size: size_of::<ffi::flash_attn_cache_args>(),
            problem: &problem,
            k_new: k_new.raw,
            v_new: v_new.raw,
            rotary_cos: NOT_GIVEN,
            rotary_sin: NOT_GIVEN,
            rotary_interleaved: 1,
            reserved: 0,
            out: out.raw,
            lse: lse.raw,
        };
        // SAFETY: as in Attention::forward; k and v, which are written, too, are borrowed as such.
        Error::check(unsafe { ffi::flash_attn_with_cache(&args, null()) })
    }
}

const NOT_GIVEN: ffi::flash_attn_tensor =
    ffi::flash_attn_tensor { data: null_mut(), dtype: 0, ndim: 0, sizes: [0; 4], strides: [0; 4] };

fn problem_at_defaults() -> ffi::flash_attn_problem {
    let mut problem = MaybeUninit::zeroed();
    // SAFETY: the library writes no more than the size that it is told; all zero bytes are a problem, too.
    unsafe {
        ffi::flash_attn_default_problem(problem.as_mut_ptr(), size_of::<ffi::flash_attn_problem>());
        problem.assume_init()
    }
}
