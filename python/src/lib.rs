//! The compiled module `onefold._onefold` of the Python package.
//!
//! `reader` opens datasets and iterates over their batches, each of which has one allocation of `memory`; `files`
//! lists the data files of a dataset; `allocator` keeps the process within its memory limit; `process` restricts
//! threads and objects to the process that created them; `commands` runs the commands of the binaries; `errors`
//! converts errors into exceptions. The Python modules of the package provide the public API.

mod allocator;
mod commands;
mod errors;
mod files;
mod memory;
mod process;
mod reader;

use pyo3::prelude::*;

/// The compiled part of the package `onefold`. The Python modules of the package provide the typed API.
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
