//! Writes a plan as the text of a `dataset.toml`.

use std::path::Path;

use onefold_base::units::count_of;

use super::columns::{in_comment, is_row_label};
use super::logs::{Log, ROWS};
use super::roles::{Choice, Feature, Plan};
use super::times;
use crate::config::{Format, MissingColumns, Quote, SourceConfig};
use crate::sql::quote;

/// The pause that ends a session if only a user is known.
const GAP: &str = "30m";
/// The time after a sample in which its events count.
const WINDOW: &str = "7d";

/// Returns the text of the configuration at `out` for the samples of `logs[main]`.
pub(super) fn written(logs: &[Log], main: usize, plan: &Plan, out: &Path) -> String {
    let file = in_comment(&out.file_name().unwrap_or_default().to_string_lossy());
    let mut lines = vec![
        format!("# Written by `onefold-ingest init` from the first {ROWS} rows of each log. Each choice has its evidence beside it;"),
        "# `CHECK` marks those that names and values do not decide. Remove features that are known only after the label.".to_owned(),
        "#".to_owned(),
        format!("#   onefold-ingest check {file}"),
        format!("#   onefold-ingest build {file} --out dataset"),
        "format_version = 1".to_owned(),
        String::new(),
        "[sources]".to_owned(),
    ];
    for (place, log) in logs.iter().enumerate() {
        let (files, rows) = (count_of(log.files as u64, "file"), count_of(log.rows as u64, "row"));
        lines.push(format!("# {:?}, {files}; {rows} seen", log.format));
        if !log.source.header {
            lines.push(
                "# without a header: `schema = { user_id = \"VARCHAR\", … }` names all columns, in order"
                    .to_owned(),
            );
        }
        let mut config = log.source.clone();
        if plan.by_rows && place == main {
            let mut columns = plan.time.columns.iter().cloned();
            (config.row_number, config.file_number) = (columns.next(), columns.next());
        }
        lines.push(format!("{} = {}", key(&log.name), source(&config)));
    }
    samples(&mut lines, &logs[main], plan);
    checks(&mut lines, plan);
    session(&mut lines, plan);
    others(&mut lines, logs, (main, plan));
    features(&mut lines, plan);
    lines.join("\n") + "\n"
}

fn samples(lines: &mut Vec<String>, log: &Log, plan: &Plan) {
    lines.extend([String::new(), "[samples]".to_owned()]);
    comment(lines, &plan.rows);
    lines.push(format!("query = \"\"\"\n{}\n\"\"\"", multiline(&query(log, plan))));
    if plan.by_rows {
        comment(lines, &plan.time);
        lines.push("order = \"rows\"".to_owned());
    }
    if !plan.key.columns.is_empty() {
        comment(lines, &plan.key);
        lines.push(format!("key = {}", array(&plan.key.columns)));
    }
}

/// Returns the query of the samples.
fn query(log: &Log, plan: &Plan) -> String {
    let table = quote(&log.name);
    let expression = |(name, sql): (&str, &str)| match sql == quote(name) {
        true => sql.to_owned(),
        false => format!("{sql} AS {}", quote(name)),
    };
    // The fields of objects are columns of the samples only.
    let of_log = |sql: &str| {
        log.fields.iter().fold(sql.to_owned(), |sql, (name, field)| sql.replace(&quote(name), field))
    };
    let taken = plan.taken.iter().map(|taken| expression((taken.name.as_str(), of_log(&taken.sql).as_str())));
    let taken: Vec<String> = taken.collect();
    if plan.unnested.is_empty() {
        return format!("SELECT\n    {}\nFROM {table}", taken.join(",\n    "));
    }
    let items =
        plan.unnested.iter().map(|(list, item)| format!("unnest({}) AS {}", quote(list), quote(item)));
    let items: Vec<String> = items.collect();
    let mut names: Vec<&str> = Vec::new();
    let choices = [&plan.key, &plan.time, &plan.session, &plan.partition];
    let chosen = choices.into_iter().flat_map(|choice| &choice.columns).map(String::as_str);
    for name in chosen.chain(plan.features.iter().map(|feature| feature.name.as_str())) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let outer = names.into_iter().map(|name| {
        let made = plan.made.iter().find(|made| made.name == name);
        made.map_or_else(|| quote(name), |made| expression((name, made.sql.as_str())))
    });
    format!(
        "SELECT\n    {}\nFROM (\n    SELECT *, {}\n    FROM (\n        SELECT\n            {}\n        FROM {table}\n    )\n)",
        outer.collect::<Vec<_>>().join(",\n    "),
        items.join(", "),
        taken.join(",\n            ")
    )
}

fn checks(lines: &mut Vec<String>, plan: &Plan) {
    if plan.checks.is_empty() {
        return;
    }
    lines.extend([String::new(), "[checks]".to_owned()]);
    for (line, reason) in &plan.checks {
        lines.extend([format!("# {reason}"), line.clone()]);
    }
}

fn session(lines: &mut Vec<String>, plan: &Plan) {
    lines.push(String::new());
    comment(lines, &plan.session);
    if plan.by_rows {
        if !plan.session.columns.is_empty() {
            lines.extend(["[session]".to_owned(), format!("key = {}", array(&plan.session.columns))]);
        }
    } else {
        timed_session(lines, plan);
    }
    if plan.partition.columns.is_empty() && !plan.by_day {
        return;
    }
    lines.extend([String::new(), "[partition]".to_owned()]);
    comment(lines, &plan.partition);
    if !plan.partition.columns.is_empty() {
        lines.push(format!("columns = {}", array(&plan.partition.columns)));
    }
    if plan.by_day {
        lines.push("by = \"day\"".to_owned());
    }
}

fn timed_session(lines: &mut Vec<String>, plan: &Plan) {
    lines.push("[session]".to_owned());
    match plan.session.columns.as_slice() {
        [user] if plan.by_gap => {
            lines.push(format!("user = {}", text(user)));
            lines.push(format!(
                "gap = \"{GAP}\"    # no column names a session: a longer pause begins another one"
            ));
        }
        columns => lines.push(format!("key = {}", array(columns))),
    }
    comment(lines, &plan.time);
    let column = plan.time.columns.first().map(String::as_str).unwrap_or_default();
    lines.push(format!("time = {}", time_of(column, &plan.time_keys)));
    if !plan.key.columns.is_empty() {
        lines.push(format!("order = {}    # among samples of one time", array(&plan.key.columns)));
    }
}

/// Formats a time column with its other keys.
fn time_of(column: &str, keys: &[String]) -> String {
    match keys {
        [] => text(column),
        keys => format!("{{ column = {}, {} }}", text(column), keys.join(", ")),
    }
}

/// Adds comments with possible uses of the other logs.
fn others(lines: &mut Vec<String>, logs: &[Log], (main, plan): (usize, &Plan)) {
    for (_, log) in logs.iter().enumerate().filter(|(place, _)| *place != main) {
        let has = |name: &String| logs[main].columns.iter().any(|column| column.name == *name);
        let is_field = |name: &String| log.fields.iter().any(|(field, _)| field == name);
        let names = log.columns.iter().map(|column| column.name.clone());
        let names: Vec<String> = names.filter(|name| !is_field(name) && !is_row_label(name)).collect();
        let (on, columns): (Vec<String>, Vec<String>) = names.into_iter().partition(has);
        lines.push(String::new());
        let key = &plan.key.columns;
        if !key.is_empty()
            && !plan.by_rows
            && key.iter().all(|name| on.contains(name))
            && let Some((time, found)) = times::choose(&log.columns)
            && !is_field(&time.name)
        {
            lines.push(format!(
                "# No section reads `{}` yet. If its rows are events of the samples, they can be a label:",
                log.name
            ));
            lines.push("# [join]".to_owned());
            lines.push(format!("# source = {}", text(&log.name)));
            lines.push(format!("# on = {}", array(key)));
            lines.push(format!("# time = {}", time_of(&time.name, &found.keys)));
            lines.push(format!("# window = \"{WINDOW}\""));
            lines.push("# [join.labels]".to_owned());
            lines.push(format!(
                "# {} = {{ when = \"TRUE\" }}    # and under [features], as `kind = \"label\"`",
                self::key(&format!("has_{}", log.name))
            ));
            continue;
        }
        lines.push(format!(
            "# No section reads `{}` yet. If it has one row for each value of a column of the samples:",
            log.name
        ));
        lines.push("# [[attributes]]".to_owned());
        lines.push(format!("# source = {}", text(&log.name)));
        lines.push(format!("# on = {}", array(&on)));
        lines.push(format!("# columns = {}", array(&columns)));
    }
}

fn features(lines: &mut Vec<String>, plan: &Plan) {
    lines.push(String::new());
    for (name, reason) in &plan.unused {
        lines.push(format!("# Not used: `{}`: {}", in_comment(name), reason));
    }
    lines.push("[features]".to_owned());
    for feature in &plan.features {
        if let Some(check) = &feature.check {
            lines.push(format!("# CHECK: {check}"));
        }
        let evidence = match feature.evidence.as_str() {
            "" => String::new(),
            evidence => format!("    # {evidence}"),
        };
        lines.push(format!("{} = {}{evidence}", key(&feature.name), described(feature)));
    }
}

fn described(feature: &Feature) -> String {
    let group = feature.group.as_ref().map(|group| format!(", group = {}", text(group))).unwrap_or_default();
    let ids = if feature.hash { ", ids = \"hash\"" } else { "" };
    format!("{{ kind = \"{}\"{group}{ids} }}", feature.kind)
}

fn comment(lines: &mut Vec<String>, choice: &Choice) {
    if let Some(check) = &choice.check {
        lines.push(format!("# CHECK: {check}"));
    }
    if !choice.evidence.is_empty() {
        lines.push(format!("# {}", choice.evidence));
    }
}

/// Formats a source as an entry of `[sources]`.
fn source(source: &SourceConfig) -> String {
    let path = match source.paths.as_slice() {
        [path] => text(path),
        paths => array(paths),
    };
    let mut keys = Vec::new();
    match source.format {
        Some(Format::Csv) => keys.push("format = \"csv\"".to_owned()),
        Some(Format::Json) => keys.push("format = \"json\"".to_owned()),
        Some(Format::Parquet) => keys.push("format = \"parquet\"".to_owned()),
        None => {}
    }
    if let Some(delimiter) = source.delimiter {
        keys.push(format!("delimiter = {}", text(&char::from(delimiter).to_string())));
    }
    if !source.header {
        keys.push("header = false".to_owned());
    }
    if source.quote == Quote::None {
        keys.push("quote = \"none\"".to_owned());
    }
    // A column that some files of a table lack is always null there.
    if source.missing_columns == MissingColumns::Null && source.delta.is_none() {
        keys.push("missing_columns = \"null\"".to_owned());
    }
    for (name, column) in [("row_number", &source.row_number), ("file_number", &source.file_number)] {
        keys.extend(column.as_ref().map(|column| format!("{name} = {}", text(column))));
    }
    if keys.is_empty() && source.paths.len() == 1 && source.delta.is_none() {
        return path;
    }
    let key = if source.delta.is_some() { "delta" } else { "path" };
    keys.insert(0, format!("{key} = {path}"));
    format!("{{ {} }}", keys.join(", "))
}

/// Formats a key in TOML.
fn key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { text(name) }
}

/// Formats a list of texts in TOML.
fn array(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|item| text(item)).collect::<Vec<_>>().join(", "))
}

/// Formats a text in TOML on one line.
fn text(text: &str) -> String {
    let escape = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

/// Formats a text for triple quotes, which keep its quotes and line ends.
fn multiline(text: &str) -> String {
    let (mut written, mut quotes) = (String::new(), 0);
    for c in text.chars() {
        quotes = if c == '"' { quotes + 1 } else { 0 };
        match c {
            // Three quotes in a row would end the text.
            '"' if quotes % 3 == 0 => written.push_str("\\\""),
            '\\' => written.push_str("\\\\"),
            '\n' => written.push(c),
            c if c.is_control() => written.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => written.push(c),
        }
    }
    written
}
