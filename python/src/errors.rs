//! Converts errors of the libraries into exceptions of `onefold._errors`.

use onefold_base::fault::{Explain, Kind};
use onefold_terminal::Failure;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Returns an exception of the class `class` in `onefold._errors` with this message.
fn exception(py: Python<'_>, class: &str, message: &str) -> PyErr {
    let made = || -> PyResult<PyErr> {
        let class = py.import("onefold._errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call1((message,))?))
    };
    made().unwrap_or_else(|error| error)
}

/// Returns the class of the exception for an error of this kind.
fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Usage | Kind::Options => "OptionsError",
        Kind::Data => "DataError",
        Kind::Storage => "StorageError",
        Kind::Failed | Kind::Stopped | Kind::Internal => "OnefoldError",
    }
}

/// Converts an error of a library into an exception with the same message and hint. The class depends on the kind of
/// the error.
pub(crate) fn of_library(py: Python<'_>, error: &impl Explain) -> PyErr {
    let fault = error.fault();
    exception(py, class(fault.kind), &fault.to_string())
}

/// Converts the failure of a command into an exception with the same message and hints. The class depends on the kind
/// of the error, and `summary` contains the results that the command had printed before.
pub(crate) fn of_command(py: Python<'_>, failure: &Failure) -> PyErr {
    let error = exception(py, class(failure.kind), &failure.to_string());
    let Some(summary) = &failure.summary else { return error };
    let attach = || error.value(py).setattr("summary", py.import("json")?.call_method1("loads", (summary,))?);
    match attach() {
        Ok(()) => error,
        Err(other) => other,
    }
}

/// Raises the failure that a program has written as JSON.
#[pyfunction]
pub(crate) fn raise_failure(py: Python<'_>, json: &str) -> PyResult<()> {
    let failure = serde_json::from_str(json).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Err(of_command(py, &failure))
}

/// Returns an exception for invalid options, with the problem and the remedy.
pub(crate) fn wrong_option(py: Python<'_>, message: &str, hint: &str) -> PyErr {
    exception(py, "OptionsError", &format!("{message}\n  hint: {hint}"))
}

/// Returns an exception for the use of an object in a process that cannot use it.
pub(crate) fn wrong_process(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ProcessError", message)
}
