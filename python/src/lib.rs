//! The Python package of Onefold: what `onefold._onefold` holds.
//!
//! `reader` opens datasets and iterates over their batches, each of which has one allocation of `memory`, `files` lists
//! a dataset's data files, `allocator` keeps the process within its memory limit, `process` keeps threads and objects to
//! the process that made them, `commands` runs the commands of the binaries, `errors` turns errors into exceptions. The
//! package's modules in Python give them their face.

mod allocator;
mod commands;
mod errors;
mod files;
mod memory;
mod process;
mod reader;

use pyo3::prelude::*;

/// The compiled half of the package `onefold`, which gives it a typed face.
#[pymodule]
mod _onefold {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::commands::{describe_command, run_command, run_program};
    #[pymodule_export]
    use super::errors::raise_failure;
    #[pymodule_export]
    use super::files::list_files;
    #[pymodule_export]
    use super::process::configure;
    #[pymodule_export]
    use super::reader::{BatchIterator, Block, Reader};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
