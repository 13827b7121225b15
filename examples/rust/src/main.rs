//! Causal attention with grouped heads and its gradients, compared with the definition in double precision.
//!
//!     PKG_CONFIG_PATH=<prefix>/lib/pkgconfig cargo run

use std::process::ExitCode;

use flash_attn::{version, Attention, Error, Gradients, Saved, Status, View, ViewMut};

const B: usize = 2;
const H: usize = 4;
const HK: usize = 2;
const SQ: usize = 23;
const SK: usize = 37;
const D: usize = 16;
const SCALE: f64 = 0.25; // 1 / sqrt(D)

/// A tensor (B, length, heads, D) whose rows are found by batch element, position and head.
#[derive(Clone)]
struct Rows<T> {
    data: Vec<T>,
    length: usize,
    heads: usize,
}

impl<T: Copy + Default> Rows<T> {
    fn new(length: usize, heads: usize, element: impl Fn(f64) -> T) -> Self {
        Rows { data: (0..B * length * heads * D).map(|n| element(n as f64)).collect(), length, heads }
    }
    fn zeros(length: usize, heads: usize) -> Self {
        Self::new(length, heads, |_| T::default())
    }
    fn sizes(&self) -> [usize; 4] {
        [B, self.length, self.heads, D]
    }
    fn row(&self, b: usize, i: usize, h: usize) -> &[T] {
        &self.data[((b * self.length + i) * self.heads + h) * D..][..D]
    }
    fn row_mut(&mut self, b: usize, i: usize, h: usize) -> &mut [T] {
        &mut self.data[((b * self.length + i) * self.heads + h) * D..][..D]
    }
}

struct Inputs {
    q: Rows<f32>,
    k: Rows<f32>,
    v: Rows<f32>,
    dout: Rows<f32>,
}

struct Results<T> {
    out: Rows<T>,
    lse: Vec<T>, // (B, H, Sq)
    dq: Rows<T>,
    dk: Rows<T>,
    dv: Rows<T>,
}

impl<T: Copy + Default> Results<T> {
    fn zeros() -> Self {
        Results {
            out: Rows::zeros(SQ, H),
            lse: vec![T::default(); B * H * SQ],
            dq: Rows::zeros(SQ, H),
            dk: Rows::zeros(SK, HK),
            dv: Rows::zeros(SK, HK),
        }
    }
    fn all(&self) -> impl Iterator<Item = &T> {
        let tensors = [&self.out.data, &self.lse, &self.dq.data, &self.dk.data, &self.dv.data];
        tensors.into_iter().flatten()
    }
}

fn attention<'a>(x: &'a Inputs, k_sizes: &[usize]) -> Result<Attention<'a>, Error> {
    Ok(Attention {
        q: View::contiguous(&x.q.data, &x.q.sizes())?,
        k: View::contiguous(&x.k.data, k_sizes)?,
        v: View::contiguous(&x.v.data, &x.v.sizes())?,
        scale: SCALE,
        causal: true,
    })
}

fn by_the_library(x: &Inputs) -> Result<Results<f32>, Error> {
    let attention = attention(x, &x.k.sizes())?;
    let mut r = Results::zeros();
    let mut softmax_d = r.lse.clone();

    let sizes = r.out.sizes();
    let mut out = ViewMut::contiguous(&mut r.out.data, &sizes)?;
    let mut lse = ViewMut::contiguous(&mut r.lse, &[B, H, SQ])?;
    attention.forward(&mut out, &mut lse)?;

    let dout = View::contiguous(&x.dout.data, &sizes)?;
    let saved = Saved { out: out.as_view(), lse: lse.as_view() };
    let mut gradients = Gradients {
        dq: ViewMut::contiguous(&mut r.dq.data, &x.q.sizes())?,
        dk: ViewMut::contiguous(&mut r.dk.data, &x.k.sizes())?,
        dv: ViewMut::contiguous(&mut r.dv.data, &x.v.sizes())?,
        softmax_d: ViewMut::contiguous(&mut softmax_d, &[B, H, SQ])?,
    };
    attention.backward(dout, saved, &mut gradients)?;
    Ok(r)
}

fn by_definition(x: &Inputs) -> Results<f64> {
    let mut r = Results::zeros();
    for b in 0..B {
        for h in 0..H {
            for i in 0..SQ {
                row_by_definition(x, b, h, i, &mut r);
            }
        }
    }
    r
}

/// P = softmax(scale q k^T), out = P v, and by the chain rule dv = P^T dout, dS = P * (dout v^T - rowsum(dout * out)),
/// dq = scale dS k, dk = scale dS^T q: what row i of q adds to these.
fn row_by_definition(x: &Inputs, b: usize, h: usize, i: usize, r: &mut Results<f64>) {
    let kv_head = h / (H / HK);
    let (q, dout) = (wide(x.q.row(b, i, h)), wide(x.dout.row(b, i, h)));
    let k = |j| wide(x.k.row(b, j, kv_head));
    let v = |j| wide(x.v.row(b, j, kv_head));

    let seen = 0..=i + SK - SQ;
    let scores: Vec<f64> = seen.map(|j| SCALE * dot(&q, &k(j))).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln();
    let p: Vec<f64> = scores.iter().map(|score| (score - lse).exp()).collect();

    r.lse[(b * H + h) * SQ + i] = lse;
    for (j, &p) in p.iter().enumerate() {
        add(r.out.row_mut(b, i, h), p, &v(j));
    }
    let d = dot(&dout, r.out.row(b, i, h));
    for (j, &p) in p.iter().enumerate() {
        let ds = p * (dot(&dout, &v(j)) - d);
        add(r.dv.row_mut(b, j, kv_head), p, &dout);
        add(r.dq.row_mut(b, i, h), SCALE * ds, &k(j));
        add(r.dk.row_mut(b, j, kv_head), SCALE * ds, &q);
    }
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&x| f64::from(x)).collect()
}
fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
/// y += a * x
fn add(y: &mut [f64], a: f64, x: &[f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

/// A k of half the head dim, which the slice is long enough for, and the library refuses.
fn wrong_shape(x: &Inputs) -> Result<(), Error> {
    let mut r = Results::<f32>::zeros();
    let sizes = r.out.sizes();
    let mut out = ViewMut::contiguous(&mut r.out.data, &sizes)?;
    let mut lse = ViewMut::contiguous(&mut r.lse, &[B, H, SQ])?;
    attention(x, &[B, SK, HK, D / 2])?.forward(&mut out, &mut lse)
}

fn run() -> Result<bool, Error> {
    let x = Inputs {
        q: Rows::new(SQ, H, |n| (n * 0.7).sin() as f32),
        k: Rows::new(SK, HK, |n| (n * 1.3).cos() as f32),
        v: Rows::new(SK, HK, |n| (n * 0.3 + 1.0).sin() as f32),
        dout: Rows::new(SQ, H, |n| (n * 1.1).cos() as f32),
    };
    let (ours, expected) = (by_the_library(&x)?, by_definition(&x));
    let errors = ours.all().zip(expected.all()).map(|(x, y)| (f64::from(*x) - y).abs());
    let worst = errors.max_by(f64::total_cmp).unwrap(); // a NaN is the largest
    let refused = wrong_shape(&x);
    let reason = refused.as_ref().map_or_else(Error::to_string, |_| "accepted".to_string());
    println!("flash_attn {}: largest error of out, lse, dq, dk, dv {worst:.2e}; a wrong shape: {reason}", version());
    Ok(worst < 1e-5 && matches!(refused, Err(Error { status: Status::Invalid, .. })))
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("attention: {error}");
            ExitCode::FAILURE
        }
    }
}
