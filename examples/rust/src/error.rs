//! Why a call did not succeed.

use std::ffi::CStr;
use std::fmt;

use crate::ffi;

/// flash_attn_status without FLASH_ATTN_OK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Malformed arguments: nothing was written.
    Invalid,
    /// Well-formed, and no backend of the library computes it: nothing was written.
    NotSupported,
    /// Out of memory, or a status that this file does not know.
    Failed,
    /// The library is older than these declarations, which it does not know.
    Version,
}

/// A call that did not succeed. The text names the argument, what was passed and what is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub status: Status,
    pub text: String,
}

impl Error {
    pub(crate) fn invalid(text: String) -> Self {
        Error { status: Status::Invalid, text }
    }

    /// What a status of the library means. To be asked on the thread that made the call, before it makes another.
    pub(crate) fn check(status: ffi::flash_attn_status) -> Result<(), Self> {
        let status = match status {
            ffi::FLASH_ATTN_OK => return Ok(()),
            ffi::FLASH_ATTN_INVALID => Status::Invalid,
            ffi::FLASH_ATTN_NOT_SUPPORTED => Status::NotSupported,
            ffi::FLASH_ATTN_VERSION => Status::Version,
            _ => Status::Failed,
        };
        // SAFETY: a string of the library's, never null, that stays as it is until this thread's next call.
        let text = unsafe { CStr::from_ptr(ffi::flash_attn_last_error()) };
        Err(Error { status, text: text.to_string_lossy().into_owned() })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} ({:?})", self.text, self.status)
    }
}

impl std::error::Error for Error {}

/// "major.minor.patch" of the library.
pub fn version() -> String {
    // SAFETY: a constant string of the library's.
    unsafe { CStr::from_ptr(ffi::flash_attn_version()) }.to_string_lossy().into_owned()
}
