//! Errors of the libraries as exceptions of `onefold._errors`.

use onefold_ikjt::{Error, ServiceErrorKind};
use onefold_terminal::{Failure, FailureKind};
use pyo3::prelude::*;

/// The exception `class` of `onefold._errors` with this message.
fn exception(py: Python<'_>, class: &str, message: &str) -> PyErr {
    let made = || -> PyResult<PyErr> {
        let class = py.import("onefold._errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call1((message,))?))
    };
    made().unwrap_or_else(|error| error)
}

/// An error of the reader as an exception: the same message and hint, and a class by what went wrong.
pub(crate) fn of_reader(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::Options { .. } | Error::PreprocessFile { .. } | Error::Preprocess { .. } => "OptionsError",
        Error::Corrupt { .. }
        | Error::IdOutsideTable { .. }
        | Error::Mismatch { .. }
        | Error::Invariant { .. } => "DataError",
        Error::Io(_) => "StorageError",
        Error::Service { kind, .. } => match kind {
            ServiceErrorKind::Options => "OptionsError",
            ServiceErrorKind::Data => "DataError",
            ServiceErrorKind::Unreachable => "StorageError",
        },
        _ => "OnefoldError",
    };
    exception(py, class, &error.to_string())
}

/// The failure of a command: the same message and hints, a class by what went wrong, and in `summary` what the
/// command had found before.
pub(crate) fn of_command(py: Python<'_>, failure: &Failure) -> PyErr {
    let class = match failure.kind {
        FailureKind::Usage => "OptionsError",
        FailureKind::System => "StorageError",
        FailureKind::Failed | FailureKind::Stopped | FailureKind::Internal => "OnefoldError",
    };
    let error = exception(py, class, &failure.to_string());
    let Some(summary) = &failure.summary else { return error };
    let attach = || error.value(py).setattr("summary", py.import("json")?.call_method1("loads", (summary,))?);
    match attach() {
        Ok(()) => error,
        Err(other) => other,
    }
}

/// Options that cannot be: what is wrong, and what to do.
pub(crate) fn wrong_option(py: Python<'_>, message: &str, hint: &str) -> PyErr {
    exception(py, "OptionsError", &format!("{message}\n  hint: {hint}"))
}

/// A use of an object in a process that cannot use it.
pub(crate) fn wrong_process(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ProcessError", message)
}
