//! Tensors: strided views of slices, which they keep borrowed, and beyond which they do not reach.

use std::marker::PhantomData;

use crate::error::Error;
use crate::ffi;

/// What a tensor may consist of.
///
/// # Safety
/// `DTYPE` is the library's name for values of exactly this size and meaning, and every pattern of bits is a value.
pub unsafe trait Element: Copy {
    const DTYPE: ffi::flash_attn_dtype;
}

unsafe impl Element for f32 {
    const DTYPE: ffi::flash_attn_dtype = ffi::FLASH_ATTN_F32;
}
unsafe impl Element for f64 {
    const DTYPE: ffi::flash_attn_dtype = ffi::FLASH_ATTN_F64;
}
unsafe impl Element for i32 {
    const DTYPE: ffi::flash_attn_dtype = ffi::FLASH_ATTN_I32;
}

/// A tensor that is read. Its dtype and shape are the library's to check, when a call is made.
///
/// The slice outlives it:
/// ```compile_fail
/// use flash_attn::View;
/// let view = {
///     let data = vec![0f32; 6];
///     View::contiguous(&data, &[2, 3]).unwrap()
/// };
/// drop(view);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(crate) raw: ffi::flash_attn_tensor,
    slice: PhantomData<&'a [u8]>,
}

/// A tensor that is written. Nothing else sees its slice meanwhile, and no two of its elements are the same.
#[derive(Debug)]
pub struct ViewMut<'a> {
    pub(crate) raw: ffi::flash_attn_tensor,
    slice: PhantomData<&'a mut [u8]>,
}

impl<'a> View<'a> {
    /// One to four dimensions, the first element of the slice first, strides in elements.
    pub fn strided<T: Element>(data: &'a [T], sizes: &[usize], strides: &[usize]) -> Result<Self, Error> {
        let raw = describe::<T>(data.as_ptr() as *mut T, data.len(), sizes, strides)?;
        Ok(View { raw, slice: PhantomData })
    }

    /// The last dimension varies fastest.
    pub fn contiguous<T: Element>(data: &'a [T], sizes: &[usize]) -> Result<Self, Error> {
        Self::strided(data, sizes, &row_major(sizes))
    }
}

impl<'a> ViewMut<'a> {
    /// As View::strided.
    pub fn strided<T: Element>(data: &'a mut [T], sizes: &[usize], strides: &[usize]) -> Result<Self, Error> {
        let raw = describe::<T>(data.as_mut_ptr(), data.len(), sizes, strides)?;
        refuse_overlap(sizes, strides)?;
        Ok(ViewMut { raw, slice: PhantomData })
    }

    /// The last dimension varies fastest.
    pub fn contiguous<T: Element>(data: &'a mut [T], sizes: &[usize]) -> Result<Self, Error> {
        Self::strided(data, sizes, &row_major(sizes))
    }

    /// To be read for a while.
    pub fn as_view(&self) -> View<'_> {
        View { raw: self.raw, slice: PhantomData }
    }
}

/// Sizes whose product overflows have strides that no slice is long enough for, or no elements.
fn row_major(sizes: &[usize]) -> Vec<usize> {
    (0..sizes.len()).map(|d| sizes[d + 1..].iter().fold(1, |product: usize, &n| product.saturating_mul(n))).collect()
}

/// The distance of the last element from the first, or None where a number overflows. Of a tensor with elements.
fn reach(sizes: &[usize], strides: &[usize]) -> Option<usize> {
    let mut last: usize = 0;
    for (size, stride) in sizes.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(*stride)?)?;
    }
    Some(last)
}

fn describe<T: Element>(
    data: *mut T,
    length: usize,
    sizes: &[usize],
    strides: &[usize],
) -> Result<ffi::flash_attn_tensor, Error> {
    let ndim = sizes.len();
    if !(1..=4).contains(&ndim) || strides.len() != ndim {
        return Err(Error::invalid(format!(
            "a tensor must have 1 to 4 sizes and as many strides, got sizes {sizes:?} and strides {strides:?}"
        )));
    }
    let fits = sizes.contains(&0) || reach(sizes, strides).map_or(false, |last| last < length);
    if !fits || sizes.iter().any(|&size| i64::try_from(size).is_err()) {
        return Err(Error::invalid(format!(
            "sizes {sizes:?} with strides {strides:?} must stay within the slice, which has {length} elements"
        )));
    }
    let mut raw = ffi::flash_attn_tensor {
        data: data.cast(),
        dtype: T::DTYPE as i32,
        ndim: ndim as i32,
        sizes: [0; 4],
        strides: [0; 4],
    };
    for d in 0..ndim {
        raw.sizes[d] = sizes[d] as i64;
        // Of one element or none the stride leads nowhere, and was not looked at.
        raw.strides[d] = if sizes[d] > 1 { strides[d].try_into().unwrap_or(0) } else { 1 };
    }
    Ok(raw)
}

/// The library's threads write elements at once. From the smallest stride on, each must step over all that lies below
/// it: more than is needed, and true of every view that slicing and transposing lead to.
fn refuse_overlap(sizes: &[usize], strides: &[usize]) -> Result<(), Error> {
    if sizes.contains(&0) {
        return Ok(());
    }
    let mut dims: Vec<(usize, usize)> = strides.iter().copied().zip(sizes.iter().copied()).collect();
    dims.retain(|&(_, size)| size > 1);
    dims.sort_unstable();
    let mut below = 0;
    for (stride, size) in dims {
        if stride <= below {
            return Err(Error::invalid(format!(
                "elements of a tensor that is written must not overlap, got sizes {sizes:?} with strides {strides:?}"
            )));
        }
        below += (size - 1) * stride;
    }
    Ok(())
}
