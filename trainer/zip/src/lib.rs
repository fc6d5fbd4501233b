//! Exports zip 7 under the names of zip 0.6 that tch and torch-sys use to read archives and to write
//! uncompressed entries.

#![forbid(unsafe_code)]

pub use zip7::{CompressionMethod, ZipArchive, ZipWriter, result};

/// The options for writing archives.
pub mod write {
    pub use zip7::write::SimpleFileOptions as FileOptions;
}
