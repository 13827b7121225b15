//! Generation token by token over a cache that grows, compared with causal attention over all tokens at once.
//!
//!     PKG_CONFIG_PATH=<prefix>/lib/pkgconfig cargo run --bin cache

use std::error::Error;

use flash_attn::{version, Attention, Cache, View, ViewMut};

const B: usize = 2;
const H: usize = 4;
const HK: usize = 2;
const S: usize = 29;
const SLOTS: usize = 32;
const D: usize = 16;
const SCALE: f64 = 0.25; // 1 / sqrt(D)

/// Row `i` of every sequence, of a tensor (B,S,heads,D): its sizes and strides, from element i * heads * D on.
fn one_row(heads: usize) -> ([usize; 4], [usize; 4]) {
    ([B, 1, heads, D], [S * heads * D, heads * D, D, 1])
}
fn row(x: &[f32], i: usize, heads: usize) -> Result<View<'_>, flash_attn::Error> {
    let (sizes, strides) = one_row(heads);
    View::strided(&x[i * heads * D..], &sizes, &strides)
}
fn row_mut(x: &mut [f32], i: usize, heads: usize) -> Result<ViewMut<'_>, flash_attn::Error> {
    let (sizes, strides) = one_row(heads);
    ViewMut::strided(&mut x[i * heads * D..], &sizes, &strides)
}

fn main() -> Result<(), Box<dyn Error>> {
    let q: Vec<f32> = (0..B * S * H * D).map(|n| (n as f32 * 0.7).sin()).collect();
    let k: Vec<f32> = (0..B * S * HK * D).map(|n| (n as f32 * 1.3).cos()).collect();
    let v: Vec<f32> = (0..B * S * HK * D).map(|n| (n as f32 * 0.3 + 1.0).sin()).collect();

    let (mut k_slots, mut v_slots) = (vec![0f32; B * SLOTS * HK * D], vec![0f32; B * SLOTS * HK * D]);
    let mut step_by_step = vec![0f32; B * S * H * D];
    let mut lse = vec![0f32; B * H * S];
    for i in 0..S {
        let lengths = [i as i32; B];
        let mut cache = Cache {
            k: ViewMut::contiguous(&mut k_slots, &[B, SLOTS, HK, D])?,
            v: ViewMut::contiguous(&mut v_slots, &[B, SLOTS, HK, D])?,
            lengths: View::contiguous(&lengths, &[B])?,
        };
        let mut out = row_mut(&mut step_by_step, i, H)?;
        let mut lse = ViewMut::contiguous(&mut lse, &[B, H, 1])?;
        cache.append_and_attend(row(&q, i, H)?, (row(&k, i, HK)?, row(&v, i, HK)?), SCALE, &mut out, &mut lse)?;
    }

    let mut at_once = vec![0f32; B * S * H * D];
    let all = Attention {
        q: View::contiguous(&q, &[B, S, H, D])?,
        k: View::contiguous(&k, &[B, S, HK, D])?,
        v: View::contiguous(&v, &[B, S, HK, D])?,
        scale: SCALE,
        causal: true,
    };
    let mut out = ViewMut::contiguous(&mut at_once, &[B, S, H, D])?;
    all.forward(&mut out, &mut ViewMut::contiguous(&mut lse, &[B, H, S])?)?;

    let differences = step_by_step.iter().zip(&at_once).map(|(x, y)| (x - y).abs());
    let worst = differences.max_by(f32::total_cmp).unwrap(); // a NaN is the largest
    println!("flash_attn {}: {S} steps over a cache, largest difference from all at once {worst:.2e}", version());
    if worst < 1e-5 {
        Ok(())
    } else {
        Err("the results differ".into())
    }
}
