//! The Python package of Onefold: what `onefold._onefold` holds.

use pyo3::prelude::*;

/// The compiled half of the package `onefold`, which gives it a typed face.
#[pymodule]
mod _onefold {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
