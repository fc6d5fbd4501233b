//! Collects the problems of a configuration and its logs: the first problem ends the run, or all are collected and
//! reported together.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex};

use onefold_base::fault::{Explain as _, Fault, Kind};
use onefold_base::sync::locked;

use crate::error::{Error, Result, bug};

/// The kind of a problem with a value of a column, of which only the first is reported.
const VALUE: &str = "value";

/// The destination of problems. By default the first problem is an error. A collection keeps problems until
/// [`check`](Self::check), and the code that meets one continues with a default value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Problems(Option<Arc<Mutex<Vec<Problem>>>>);

#[derive(Debug)]
struct Problem {
    fault: Fault,
    /// The number of rows with the problem per part of the input, so that a part that is read again is counted once.
    rows: BTreeMap<String, u64>,
    /// The place and the kind of a problem, by which it is recognized, and the rest of the message if rows are counted.
    counted: Option<[String; 3]>,
}

/// A number of rows with one problem. The message is `place: 3 what`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrongRows<'a> {
    pub(crate) place: &'a str,
    /// Identifies the problem among the problems of its place.
    pub(crate) kind: &'a str,
    pub(crate) what: &'a str,
    pub(crate) hint: &'a str,
}

impl Problem {
    fn told(&self) -> Fault {
        match &self.counted {
            Some([place, _, what]) if !self.rows.is_empty() => {
                let rows: u64 = self.rows.values().sum();
                Fault { message: format!("{place}: {rows} {what}").into(), ..self.fault.clone() }
            }
            _ => self.fault.clone(),
        }
    }

    fn is(&self, place: &str, kind: &str) -> bool {
        self.counted.as_ref().is_some_and(|[known, its_kind, _]| known == place && its_kind == kind)
    }
}

impl Problems {
    /// Makes a collection.
    pub(crate) fn collected() -> Self {
        Self(Some(Arc::default()))
    }

    /// Returns whether problems are collected.
    pub(crate) fn collects(&self) -> bool {
        self.0.is_some()
    }

    /// Reports a problem.
    ///
    /// # Errors
    ///
    /// `error`, unless problems are collected. The error of a store that does not answer is not a problem of the logs,
    /// so it is always returned.
    pub(crate) fn report(&self, error: Error) -> Result<()> {
        let Some(found) = &self.0 else { return Err(error) };
        let faults = match error {
            Error::Problems(faults) => faults,
            error => match error.fault() {
                fault if fault.kind == Kind::Storage => return Err(error),
                fault => vec![fault],
            },
        };
        let mut found = locked(found);
        for fault in faults {
            if found.iter().all(|known| known.told() != fault) {
                found.push(Problem { fault, rows: BTreeMap::new(), counted: None });
            }
        }
        Ok(())
    }

    /// Returns `values`, or `others` if problems are collected and `values` is the error of a value of the column `name`.
    /// Only the first such error is reported, because the errors of other batches name other values.
    ///
    /// # Errors
    ///
    /// The error, unless it was reported.
    pub(crate) fn or<T>(&self, name: &str, values: Result<T>, others: impl FnOnce() -> T) -> Result<T> {
        match (values, &self.0) {
            (Err(error), Some(found)) if error.fault().kind == Kind::Data => {
                let mut found = locked(found);
                if !found.iter().any(|known| known.is(name, VALUE)) {
                    let counted = Some([name, VALUE, ""].map(str::to_owned));
                    found.push(Problem { fault: error.fault(), rows: BTreeMap::new(), counted });
                }
                Ok(others())
            }
            (values, _) => values,
        }
    }

    /// Returns whether rows with this problem were counted before.
    pub(crate) fn knows(&self, place: &str, kind: &str) -> bool {
        let Some(found) = &self.0 else { return false };
        let found = locked(found);
        found.iter().any(|known| known.is(place, kind))
    }

    /// Reports that `rows` rows of `part` have a problem. The first report determines the message. A part with a name
    /// may be read several times, and counts with the largest number of rows; the rows of a part without a name are
    /// added up.
    ///
    /// # Errors
    ///
    /// The problem, unless problems are collected.
    pub(crate) fn count(&self, wrong: &WrongRows<'_>, part: &str, rows: u64) -> Result<()> {
        let WrongRows { place, kind, what, hint } = *wrong;
        let Some(found) = &self.0 else {
            return Err(Error::data(place, format!("{rows} {what}"), hint));
        };
        let mut found = locked(found);
        let at = found.iter().position(|known| known.is(place, kind)).unwrap_or(found.len());
        if at == found.len() {
            let fault = Fault::new(Kind::Data, "").hint(hint);
            let counted = Some([place, kind, what].map(str::to_owned));
            found.push(Problem { fault, rows: BTreeMap::new(), counted });
        }
        let of_part = found[at].rows.entry(part.to_owned()).or_default();
        *of_part = if part.is_empty() { *of_part + rows } else { rows.max(*of_part) };
        Ok(())
    }

    /// Combines `error` with the problems that were collected before it.
    pub(crate) fn and(&self, error: Error) -> Error {
        // A stopped run or a full disk is not a problem of the logs.
        if !matches!(error.fault().kind, Kind::Data | Kind::Options | Kind::Failed) {
            return error;
        }
        match self.report(error).and_then(|()| self.check()) {
            Err(error) => error,
            Ok(()) => bug("a problem that was collected is not there"),
        }
    }

    /// Checks that no problems have been collected.
    ///
    /// # Errors
    ///
    /// All collected problems.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(found) = &self.0 else { return Ok(()) };
        let found = locked(found);
        let mut faults: Vec<Fault> = found.iter().map(Problem::told).collect();
        match faults.len() {
            0 => Ok(()),
            1 => Err(faults.remove(0).into()),
            _ => Err(Error::Problems(faults)),
        }
    }
}

/// Functions of the engine that report problems compare as equal, regardless of their destination.
impl PartialEq for Problems {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Problems {}

impl Hash for Problems {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_problem_is_an_error_unless_they_are_collected() {
        let nulls = WrongRows {
            place: "column `a`",
            kind: "null",
            what: "samples have no value",
            hint: "fill it in",
        };
        let strict = Problems::default();
        assert!(strict.report(Error::column("a", "is wrong", "mend it")).is_err());
        let error = strict.count(&nulls, "", 3).unwrap_err();
        assert!(error.to_string().starts_with("column `a`: 3 samples have no value"), "{error}");

        let problems = Problems::collected();
        problems.check().unwrap();
        for (part, rows) in [("part 1", 1), ("part 1", 3), ("part 1", 3), ("", 2), ("", 2)] {
            problems.count(&nulls, part, rows).unwrap();
        }
        let one = problems.check().unwrap_err().to_string();
        assert_eq!(one, "column `a`: 7 samples have no value\n  hint: fill it in");
        assert!(problems.knows("column `a`", "null") && !problems.knows("column `a`", "type"));
        for _ in 0..2 {
            problems.report(Error::column("b", "is wrong", "mend it")).unwrap();
        }
        let all = problems.check().unwrap_err().to_string();
        // A problem that was reported before is not added again.
        let again = problems.and(problems.check().unwrap_err()).to_string();
        assert_eq!(again, all);
        for part in [
            "there are 2 problems",
            "\n1. column `a`: 7 samples",
            "\n2. column `b`: is wrong\n   fix: mend it",
        ] {
            assert!(all.contains(part), "{all}");
        }
    }
}
