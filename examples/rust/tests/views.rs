//! Safe code cannot lead the library beyond a slice, and gets its words when it refuses.

use flash_attn::{Attention, Cache, Error, Status, View, ViewMut};

fn refused<T: std::fmt::Debug>(result: Result<T, Error>, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.status, Status::Invalid);
    assert!(error.text.contains(words), "{error}");
}

#[test]
fn views_stay_within_their_slices() {
    let x = [0f32; 12];
    for (sizes, strides) in [
        (&[12][..], &[1][..]),
        (&[3, 4], &[4, 1]),
        (&[4, 3], &[1, 4]),           // transposed
        (&[2, 4], &[8, 1]),           // rows apart
        (&[100, 12], &[0, 1]),        // the same row again and again
        (&[1, 12], &[usize::MAX, 1]), // a stride that is not taken
        (&[0, 12], &[usize::MAX, 1]), // no elements
        (&[2, 2, 3, 1], &[6, 3, 1, 1]),
    ] {
        View::strided(&x, sizes, strides).unwrap();
    }
    for (sizes, strides) in [
        (&[13][..], &[1][..]),
        (&[3, 4], &[5, 1]),
        (&[2, 4], &[9, 1]),
        (&[2, 1], &[usize::MAX, 1]),
        (&[3, 3], &[usize::MAX / 2 + 1, usize::MAX / 2 + 1]), // the sum overflows to 0
        (&[usize::MAX, usize::MAX], &[1, 1]),
    ] {
        refused(View::strided(&x, sizes, strides), "must stay within the slice, which has 12 elements");
    }
    refused(View::contiguous(&x, &[usize::MAX, 2]), "must stay within");
    refused(View::contiguous(&x, &[usize::MAX, usize::MAX, 2]), "must stay within");
    refused(View::contiguous(&x[..0], &[1]), "has 0 elements");
    refused(View::contiguous(&x, &[0, usize::MAX]), "must stay within"); // more than C's signed number holds
    refused(View::contiguous(&x, &[]), "1 to 4 sizes");
    refused(View::contiguous(&x, &[1; 5]), "1 to 4 sizes");
    refused(View::strided(&x, &[3, 4], &[1]), "as many strides");
}

#[test]
fn what_is_written_does_not_overlap() {
    let mut x = [0f32; 12];
    for (sizes, strides) in
        [(&[3, 4][..], &[4, 1][..]), (&[4, 3], &[1, 4]), (&[2, 4], &[8, 1]), (&[1, 12], &[0, 1]), (&[0, 9, 9], &[0; 3])]
    {
        ViewMut::strided(&mut x, sizes, strides).unwrap();
    }
    for (sizes, strides) in [(&[2, 12][..], &[0, 1][..]), (&[3, 4], &[3, 1]), (&[3, 3], &[2, 2])] {
        refused(ViewMut::strided(&mut x, sizes, strides), "must not overlap");
    }
    refused(ViewMut::strided(&mut x, &[3, 4], &[5, 1]), "must stay within");
}

#[test]
fn what_the_library_refuses_is_said_in_its_words() {
    let (x, wide) = ([1f32; 8], [1f64; 8]);
    let (mut out, mut lse) = ([7f32; 8], [7f32; 2]);
    let view = View::contiguous(&x, &[1, 2, 1, 4]).unwrap();
    let attention = Attention { q: view, k: view, v: view, scale: 0.5, causal: true };
    let mut forward = |attention: Attention, out_sizes: &[usize]| {
        let mut lse = ViewMut::contiguous(&mut lse, &[1, 1, 2])?;
        attention.forward(&mut ViewMut::contiguous(&mut out, out_sizes)?, &mut lse)
    };
    let transposed = View::strided(&x, &[1, 2, 1, 4], &[8, 1, 8, 2]).unwrap();
    refused(
        forward(Attention { k: transposed, ..attention }, &[1, 2, 1, 4]),
        "k must have a contiguous last dimension",
    );
    let wide = View::contiguous(&wide, &[1, 2, 1, 4]).unwrap();
    refused(forward(Attention { v: wide, ..attention }, &[1, 2, 1, 4]), "v must have dtype float32");
    refused(forward(attention, &[1, 1, 2, 4]), "out must have shape");
    refused(forward(Attention { scale: f64::NAN, ..attention }, &[1, 2, 1, 4]), "softmax_scale must be finite");
    forward(attention, &[1, 2, 1, 4]).unwrap();
    assert_eq!(out, [1f32; 8]); // the mean of ones
}

#[test]
fn a_cache_that_is_full_is_left_as_it_is() {
    let x = [1f32; 4];
    let (mut k, mut v, mut out, mut lse) = ([0f32; 8], [0f32; 8], [0f32; 4], [0f32; 1]);
    let row = View::contiguous(&x, &[1, 1, 1, 4]).unwrap();
    for (lengths, words) in
        [([2], "make k_cache longer"), ([i32::MAX], "make k_cache longer"), ([-1], "not be negative")]
    {
        let mut cache = Cache {
            k: ViewMut::contiguous(&mut k, &[1, 2, 1, 4]).unwrap(),
            v: ViewMut::contiguous(&mut v, &[1, 2, 1, 4]).unwrap(),
            lengths: View::contiguous(&lengths, &[1]).unwrap(),
        };
        let mut out = ViewMut::contiguous(&mut out, &[1, 1, 1, 4]).unwrap();
        let mut lse = ViewMut::contiguous(&mut lse, &[1, 1, 1]).unwrap();
        refused(cache.append_and_attend(row, (row, row), 0.5, &mut out, &mut lse), words);
    }
    assert_eq!((k, v), ([0f32; 8], [0f32; 8]));
}
