//! zip 7 under the names of zip 0.6 that tch and torch-sys use: they read archives, and write stored entries.

#![forbid(unsafe_code)]

pub use zip7::{CompressionMethod, ZipArchive, ZipWriter, result};

/// Writes archives.
pub mod write {
    pub use zip7::write::SimpleFileOptions as FileOptions;
}
