//! flash_attn's C interface from Rust. Letters as in flash_attn/attention.h: B batch, H query heads, Hk key/value heads
//! (H % Hk == 0), Sq / Sk query / key length, D head dim of queries and keys, Dv of values.

mod attention;
mod error;
pub mod ffi;
mod view;

pub use attention::{Attention, Cache, Gradients, Saved};
pub use error::{version, Error, Status};
pub use view::{Element, View, ViewMut};
