//! Chooses the role of each column of a log: time, session, label, feature, or unused.

mod labels;

use onefold_datasets::{BATCH_COLUMNS, SAMPLE_KEY_COLUMN, SESSION_COLUMN, TIME_COLUMN};

use super::columns::{Column, Type, in_comment, is_row_label, tokens};
use super::lists::{DecimalComma, TextLists};
use super::logs::Log;
use super::times;
use crate::config::{Format, MissingColumns, RESERVED};
use crate::sql::quote;

/// Words in the names of columns with sessions, users and keys of samples.
const SESSIONS: &str = "session visit sess sessionkey";
const USERS: &str =
    "user visitor uid userid customer member client account device cookie person player reader listener";
const KEYS: &str = "request impression event search query log row view uuid guid srch record";
/// Words in the names of integer columns that are quantities, not ids.
const NUMBERS: &str = "count cnt num number price amount age duration length len seconds minutes ms score rate rank \
    position pos size quantity qty total width height distance percent percentage clicks views usd eur \
    cost dwell";
/// Words in the names of lists with a meaningful order.
const SEQUENCES: &str = "history hist seq sequence past recent last previous prev behaviors timeline trail";

/// The names of columns that every dataset has.
const OWN_NAMES: [&str; 3] = [SESSION_COLUMN, TIME_COLUMN, SAMPLE_KEY_COLUMN];

/// Returns whether datasets or batches have another column with this name.
fn is_of_dataset(name: &str) -> bool {
    OWN_NAMES.contains(&name) || BATCH_COLUMNS.contains(&name)
}

/// A column of the samples: its name, and its SQL expression over the columns of the previous step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Expression {
    pub(super) name: String,
    pub(super) sql: String,
}

/// A line of `[features]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Feature {
    pub(super) name: String,
    /// The kind, as written in `[features]`.
    pub(super) kind: &'static str,
    pub(super) group: Option<String>,
    pub(super) hash: bool,
    pub(super) evidence: String,
    /// A question for the user to check.
    pub(super) check: Option<String>,
}

impl Feature {
    /// Makes a feature of a kind without a group.
    fn new(name: impl Into<String>, kind: &'static str, evidence: impl Into<String>) -> Self {
        let (name, evidence) = (name.into(), evidence.into());
        Self { name, kind, group: None, hash: false, evidence, check: None }
    }
}

/// A choice with its evidence, and a question for the user to check.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Choice {
    pub(super) columns: Vec<String>,
    pub(super) evidence: String,
    pub(super) check: Option<String>,
}

/// The samples of a log.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    /// The columns that the samples take from the log.
    pub(super) taken: Vec<Expression>,
    /// The lists to unnest together, each with a name for its items. Each position of the lists makes a sample.
    pub(super) unnested: Vec<(String, String)>,
    /// The expressions over the columns above.
    pub(super) made: Vec<Expression>,
    pub(super) rows: Choice,
    pub(super) key: Choice,
    /// The time: its column, and the keys of its configuration. If samples are in the order of their rows: the columns
    /// with the number of each row and, for several files, with the number of its file.
    pub(super) time: Choice,
    pub(super) time_keys: Vec<String>,
    /// Whether no column is a time, so that samples are in the order of their rows.
    pub(super) by_rows: bool,
    /// The columns of the session's key. Without columns, each row is a session, which needs `by_rows`.
    pub(super) session: Choice,
    /// Whether the session columns are a user, and a pause ends a session.
    pub(super) by_gap: bool,
    pub(super) partition: Choice,
    /// Whether samples are partitioned by day.
    pub(super) by_day: bool,
    /// Lines of `[checks]`, each with its reason.
    pub(super) checks: Vec<(String, String)>,
    pub(super) features: Vec<Feature>,
    /// The columns that are not used, with reasons.
    pub(super) unused: Vec<(String, String)>,
}

impl Plan {
    /// Returns all questions for the user to check.
    pub(super) fn to_check(&self) -> Vec<String> {
        let choices = [&self.rows, &self.key, &self.time, &self.session, &self.partition];
        let choices = choices.into_iter().filter_map(|choice| choice.check.clone());
        choices.chain(self.features.iter().filter_map(|feature| feature.check.clone())).collect()
    }

    fn take(&mut self, column: &str) {
        let expression = Expression { name: column.to_owned(), sql: quote(column) };
        if self.taken.iter().all(|taken| taken.name != column) {
            self.taken.push(expression);
        }
    }

    fn take_as(&mut self, name: &str, sql: String) {
        self.taken.push(Expression { name: name.to_owned(), sql });
    }
}

/// Returns the index of the log whose rows become samples, and their plan.
pub(super) fn decide(logs: &[Log]) -> (usize, Plan) {
    let plans = logs.iter().map(|log| Roles::new(log).plan());
    let score = |plan: &Plan| {
        let is_certain = |choice: &Choice| u32::from(choice.check.is_none());
        let has_label =
            plan.features.iter().any(|feature| feature.kind == "label" && feature.check.is_none());
        2 * is_certain(&plan.time) + 2 * is_certain(&plan.session) + 3 * u32::from(has_label)
    };
    let scored = plans.enumerate().map(|(place, plan)| (score(&plan), place, plan));
    let best = scored.reduce(|best, other| if other.0 > best.0 { other } else { best });
    best.map_or_else(Default::default, |(_, place, plan)| (place, plan))
}

/// The columns of a log that have no role yet.
struct Roles<'a> {
    log: &'a Log,
    /// The usable columns without a role.
    free: Vec<Column>,
    plan: Plan,
}

impl<'a> Roles<'a> {
    fn new(log: &'a Log) -> Self {
        let mut roles = Self { log, free: Vec::new(), plan: Plan::default() };
        let may_lack = log.source.missing_columns == MissingColumns::Null;
        if may_lack && log.format != Format::Json && log.source.delta.is_none() {
            let check =
                "some files lack columns, which are null there: make two sources if they are different logs";
            roles.plan.rows.check = Some(check.to_owned());
        }
        let unread = log.unread.iter().map(|name| (name.clone(), "values of several types".to_owned()));
        roles.plan.unused.extend(unread);
        let is_padded = |column: &&Column| {
            column.kind == Type::Text
                && column.present().next().is_some()
                && column.present().all(|text| text.starts_with(' '))
        };
        if let Some(column) = log.columns.iter().find(is_padded) {
            let check = format!(
                "all values of `{}` begin with a blank, so they are texts: remove the blanks behind the delimiters of the files",
                in_comment(&column.name)
            );
            roles.plan.rows.check = Some(check);
        }
        for column in &log.columns {
            let lengths_of = |other: &Column| column.name == format!("{}.length", other.name);
            let reason = if is_row_label(&column.name) {
                "the labels of rows, as pandas writes them"
            } else if column.name.starts_with(RESERVED) {
                "a name that no feature can have"
            } else if log.columns.iter().any(lengths_of) {
                "a name that the dataset has for the lengths of lists"
            } else if !column.is_folder && column.is_empty() {
                "no value in the first rows"
            } else if column.kind == Type::Other {
                "no number, text, time or list of these"
            } else {
                roles.free.push(column.clone());
                continue;
            };
            roles.plan.unused.push((column.name.clone(), reason.to_owned()));
        }
        roles
    }

    fn plan(mut self) -> Plan {
        self.time();
        self.folders();
        self.session();
        self.text_lists();
        self.key();
        self.labels();
        self.features();
        self.plan
    }

    /// Returns a name that no column has.
    fn unused_name(&self, name: &str) -> String {
        let columns = self.log.columns.iter().map(|column| &column.name);
        let made = self.plan.made.iter().map(|made| &made.name);
        let items = self.plan.unnested.iter().map(|(_, item)| item);
        let taken: Vec<String> = columns.chain(made).chain(items).map(|name| name.to_lowercase()).collect();
        let mut free = name.to_owned();
        while taken.contains(&free.to_lowercase()) || OWN_NAMES.contains(&free.as_str()) {
            free.push('_');
        }
        free
    }

    /// Removes a column from the columns without a role.
    fn remove(&mut self, name: &str) {
        self.free.retain(|column| column.name != name);
    }

    fn leave_out(&mut self, name: &str, reason: impl Into<String>) {
        self.remove(name);
        self.plan.unused.push((name.to_owned(), reason.into()));
    }

    fn time(&mut self) {
        let chosen = times::choose(&self.free).map(|(column, found)| (column.clone(), found));
        let Some((column, found)) = chosen else {
            let mut columns = vec![self.unused_name("row_number")];
            if self.log.files > 1 {
                columns.push(self.unused_name("file_number"));
            }
            for name in &columns {
                self.plan.take(name);
            }
            let check = "no column is a time, so samples are in the order of their rows: name the column if one is a \
                         time, as `time` of `[session]`";
            self.plan.time = Choice { columns, check: Some(check.to_owned()), ..Choice::default() };
            self.plan.by_rows = true;
            return;
        };
        let zone = self.free.iter().find(|other| found.is_local(&column) && times::are_zones(other));
        let zone = zone.map(|zone| {
            format!(
                "the times are read as UTC, but `{}` names the zone of each row ({}): write them in UTC, or with offsets",
                in_comment(&zone.name),
                zone.examples()
            )
        });
        self.plan.time = Choice {
            columns: vec![column.name.clone()],
            evidence: found.evidence(&column),
            check: zone.or(found.doubt.clone()),
        };
        self.plan.by_day = true;
        match column.kind {
            Type::Float32 => {
                self.plan.take_as(&column.name, format!("CAST({} AS DOUBLE)", quote(&column.name)))
            }
            _ => self.plan.take(&column.name),
        }
        let (has_past, has_future) = found.is_past_and_future();
        if has_past {
            let reason = "some times are before 1990; these rows are left out and counted";
            self.plan.checks.push(("past = \"skip\"".to_owned(), reason.to_owned()));
        }
        if has_future {
            let reason = "some times are after now; these rows are left out and counted";
            self.plan.checks.push(("future = \"skip\"".to_owned(), reason.to_owned()));
        }
        self.allow_nulls(&column);
        self.plan.time_keys = found.keys;
        self.remove(&column.name);
        for other in self.free.clone() {
            let is_time = times::read(&other).is_some_and(|found| found.doubt.is_none());
            if other.kind == Type::Time || is_time {
                let reason =
                    format!("another time ({}); a number made of it may be a feature", other.examples());
                self.leave_out(&other.name, reason);
            }
        }
    }

    /// If the column has nulls, adds a check that leaves out rows without a value.
    fn allow_nulls(&mut self, column: &Column) {
        let nulls = column.nulls();
        if nulls > 0 && self.plan.checks.iter().all(|(line, _)| !line.starts_with("null_keys")) {
            let name = in_comment(&column.name);
            let reason = format!(
                "{nulls} of {} rows have no `{name}`; such rows are left out and counted",
                self.log.rows
            );
            self.plan.checks.push(("null_keys = \"skip\"".to_owned(), reason));
        }
    }

    /// Makes columns from folder names the partition columns.
    fn folders(&mut self) {
        let folders: Vec<String> =
            self.free.iter().filter(|column| column.is_folder).map(|column| column.name.clone()).collect();
        let evidence = match folders.is_empty() {
            false => "folders `name=value` of the log",
            true => "the day, in UTC, on which a session begins",
        };
        for name in &folders {
            self.plan.take(name);
            self.remove(name);
        }
        self.plan.by_day &= folders.is_empty();
        if self.plan.by_day {
            // Partitions have a column with this name.
            self.free.iter().filter(|column| column.name == "date").for_each(|column| {
                self.plan.unused.push((column.name.clone(), "a name that partitions have".to_owned()));
            });
            self.remove("date");
        }
        self.plan.partition = Choice { columns: folders, evidence: evidence.to_owned(), check: None };
    }

    /// Chooses the session's key, or the user.
    fn session(&mut self) {
        let is_key = |column: &&Column| {
            let is_whole = column.is_id() && column.is_whole();
            let has_type = column.kind.is_integer() || column.kind == Type::Text || is_whole;
            !column.is_list && has_type && !column.is_binary()
        };
        // Select columns with an id; `device_type`, for example, is not one.
        let is_identity = |column: &&Column| {
            let other = "type age agent name country city category location count time score";
            is_key(column) && !column.says(other) && 2 * column.nulls() <= column.values.len()
        };
        let named = |words: &str| {
            let mut candidates: Vec<&Column> =
                self.free.iter().filter(is_identity).filter(|column| column.says(words)).collect();
            candidates.sort_by_key(|column| !(column.is_id() || tokens(&column.name).len() == 1));
            candidates.first().map(|column| (*column).clone())
        };
        let (session, user) = (named(SESSIONS), named(USERS).filter(|user| !user.says(SESSIONS)));
        let repeats = |column: &&Column| is_key(column) && column.nulls() == 0 && !column.is_unique();
        // Without names, take the first column whose values repeat but are not all equal.
        let unnamed =
            self.free.iter().filter(|column| column.is_unnamed && column.distinct().len() > 1).find(repeats);
        let (columns, check) = match (&session, &user, unnamed) {
            (Some(session), Some(user), _) => (vec![user.clone(), session.clone()], None),
            (Some(session), None, _) => (vec![session.clone()], None),
            (None, Some(user), _) => (vec![user.clone()], None),
            (None, None, Some(column)) => {
                let check = "the log has no header, and this column may be another one than the user";
                (vec![column.clone()], Some(check.to_owned()))
            }
            (None, None, None) if self.plan.by_rows => {
                let check = "no column names a session or a user, so each row is a session: name the column as `key` of \
                             `[session]`";
                self.plan.session.check = Some(check.to_owned());
                return;
            }
            (None, None, None) => {
                let name = self.unused_name("session");
                self.plan.take_as(&name, "0".to_owned());
                let check =
                    "no column names a session or a user, so all samples are one session: name the column";
                self.plan.session =
                    Choice { columns: vec![name], check: Some(check.to_owned()), ..Choice::default() };
                return;
            }
        };
        self.plan.by_gap = session.is_none() && !self.plan.by_rows;
        let shown = columns.iter().map(|column| {
            format!(
                "`{}`: {}, {} distinct in {} rows",
                in_comment(&column.name),
                column.examples(),
                column.distinct().len(),
                self.log.rows
            )
        });
        let evidence = shown.collect::<Vec<_>>().join("; ");
        for column in &columns {
            self.allow_nulls(column);
            match column.kind.is_float() {
                true => self.plan.take_as(&column.name, format!("whole_id({})", quote(&column.name))),
                false => self.plan.take(&column.name),
            }
        }
        let user = columns
            .iter()
            .find(|column| session.as_ref().is_none_or(|session| session.name != column.name))
            .cloned();
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        for name in &names {
            self.remove(name);
        }
        self.plan.session = Choice { columns: names, evidence, check };
        if let Some(user) = user
            && !is_of_dataset(&user.name)
        {
            let hash = matches!(user.kind, Type::Text | Type::Unsigned);
            let feature = Feature::new(&user.name, "sparse", user.examples());
            self.plan.features.push(Feature { group: Some("user".to_owned()), hash, ..feature });
        }
    }

    /// Converts text columns that contain lists to list columns.
    fn text_lists(&mut self) {
        let delimiter = self.log.source.delimiter;
        for column in &mut self.free {
            if DecimalComma::of(column, column.says(NUMBERS) || delimiter == Some(b';')).is_some() {
                continue;
            }
            if let Some(lists) = TextLists::of(column) {
                let sql = lists.sql(&quote(&column.name));
                self.plan.taken.push(Expression { name: column.name.clone(), sql });
                *column = lists.apply(column);
                if let Some(mark) = lists.pairs {
                    // The item and its label are separated after each pair has its own row.
                    self.plan.rows.columns = vec![column.name.clone(), mark.to_string()];
                }
            } else if column.is_list {
                let name = quote(&column.name);
                let sql = if column.has_null_items { format!("array_compact({name})") } else { name };
                self.plan.taken.push(Expression { name: column.name.clone(), sql });
            }
        }
    }

    /// Chooses the column that identifies a row.
    fn key(&mut self) {
        let is_key = |column: &&Column| {
            let is_named = column.says(KEYS) || tokens(&column.name) == ["id"];
            !column.is_list
                && (column.kind.is_integer() || column.kind == Type::Text)
                && column.is_unique()
                && (is_named && (column.is_id() || tokens(&column.name).len() == 1))
        };
        let Some(key) = self.free.iter().find(is_key).cloned() else { return };
        let evidence = format!("{}: one of its own in each of {} rows", key.examples(), self.log.rows);
        self.plan.take(&key.name);
        self.remove(&key.name);
        self.plan.key = Choice { columns: vec![key.name], evidence, check: None };
    }

    /// Makes the other columns features if their types allow it.
    fn features(&mut self) {
        for column in std::mem::take(&mut self.free) {
            match self.feature(&column) {
                Ok(feature) => self.plan.features.push(feature),
                Err(reason) => {
                    self.plan.taken.retain(|taken| taken.name != column.name);
                    self.plan.unused.push((column.name, reason));
                }
            }
        }
        let has_features = self.plan.features.iter().any(|feature| feature.kind != "label");
        if !has_features {
            let name = self.unused_name("constant");
            self.plan.take_as(&name, "1".to_owned());
            let check = "no column is a feature, and a dataset needs one: write a column or an expression in its place";
            let feature = Feature::new(name, "dense", "");
            self.plan.features.push(Feature { check: Some(check.to_owned()), ..feature });
        }
    }

    /// Returns the feature of a column, or the reason why it is not one.
    fn feature(&mut self, column: &Column) -> Result<Feature, String> {
        let name = column.name.clone();
        if is_of_dataset(&name) {
            return Err("a name that the dataset has for another column".to_owned());
        }
        let evidence = column.examples();
        // If a row makes several samples, all features that are not items repeat together.
        let group = (!self.plan.unnested.is_empty()).then(|| "row".to_owned());
        let sparse =
            |hash| Feature { group: group.clone(), hash, ..Feature::new(&name, "sparse", &evidence) };
        let dense = || Feature::new(&name, "dense", &evidence);
        if column.is_list {
            if column.kind.is_float() || column.kind == Type::Time {
                return Err(format!("lists of numbers with fractions, or of times, are no ids: {evidence}"));
            }
            let hash = matches!(column.kind, Type::Text | Type::Unsigned);
            return Ok(match column.says(SEQUENCES) {
                true => Feature { kind: "sequence", group: Some(format!("{name}_list")), ..sparse(hash) },
                false => sparse(hash),
            });
        }
        let quoted = quote(&name);
        match column.kind {
            Type::Boolean => {
                self.plan.take(&name);
                Ok(sparse(false))
            }
            Type::Integer | Type::Unsigned if column.says(NUMBERS) && !column.is_id() => {
                self.plan.take_as(&name, format!("coalesce({quoted}, 0)"));
                Ok(dense())
            }
            Type::Integer | Type::Unsigned => {
                self.plan.take(&name);
                Ok(sparse(column.kind == Type::Unsigned))
            }
            Type::Number | Type::Float32 => {
                let numbers = column.numbers().unwrap_or_default();
                if column.is_id() && column.is_whole() {
                    self.plan.take_as(&name, format!("whole_id({quoted})"));
                    return Ok(sparse(false));
                }
                let is_finite = numbers.iter().all(|number| number.is_finite());
                let value = match is_finite {
                    true => quoted,
                    // Some writers use NaN for missing values.
                    false => format!("nanvl(CAST({quoted} AS DOUBLE), 0)"),
                };
                self.plan.take_as(&name, format!("coalesce({value}, 0)"));
                Ok(dense())
            }
            Type::Text => {
                let is_likely = column.says(NUMBERS) || self.log.source.delimiter == Some(b';');
                if let Some(numbers) = DecimalComma::of(column, is_likely) {
                    self.plan.take_as(&name, format!("coalesce({}, 0)", numbers.sql(&quoted)));
                    let check =
                        format!("the texts of `{}` are read as numbers, {numbers}", in_comment(&name));
                    return Ok(Feature { check: Some(check), ..dense() });
                }
                let is_long = |text: &str| text.chars().count() > 64 || text.split_whitespace().count() > 6;
                let long = column.present().filter(|text| is_long(text)).count();
                if 10 * long > column.values.len() {
                    return Err(format!("texts, not names: {evidence}"));
                }
                self.plan.take(&name);
                Ok(sparse(true))
            }
            Type::Time | Type::Other => Err(format!("neither a number nor an id: {evidence}")),
        }
    }
}
