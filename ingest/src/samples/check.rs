//! Checks the declared steps against the columns of the sources before any row is read.

use std::collections::BTreeMap;

use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema};
use datafusion::common::DFSchema;
use datafusion::common::tree_node::TreeNode;
use datafusion::logical_expr::{Expr, ExprSchemable};
use datafusion::prelude::SessionContext;
use onefold_datasets::suggest;
use onefold_sql::Query as _;

use super::repeatable::why_varies;
use crate::config::{
    AttributesConfig, Config, JoinConfig, LabelConfig, RESERVED, SamplingConfig, TimeConfig, TimelineConfig,
    missing_column,
};
use crate::error::{Error, Result, engine_message};
use crate::ids::wrong_item_type;
use crate::problems::Problems;
use crate::sessionize::{EVENT_TIME, check_columns};
use crate::sql::{key_hint, key_kind, table};
use crate::times;

/// The columns that the steps of a configuration can use.
pub(super) struct StepColumns<'a> {
    config: &'a Config,
    context: &'a SessionContext,
    /// The columns of the rows that become samples.
    pub(super) rows: ArrowSchema,
    /// The columns of the sources that the steps read.
    sources: BTreeMap<String, ArrowSchema>,
}

impl<'a> StepColumns<'a> {
    /// Looks up the columns of every source that a step reads, and checks all names and types.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] that names the section and, for a wrong name, suggests the most similar correct one.
    pub(super) async fn check(
        context: &'a SessionContext,
        config: &'a Config,
        rows: ArrowSchema,
        problems: &Problems,
    ) -> Result<Self> {
        let mut columns = Self { config, context, rows, sources: BTreeMap::new() };
        let join = config.join.iter().map(|join| &join.source);
        let attributes = config.attributes.iter().map(|attributes| &attributes.source);
        for name in join.chain(attributes).chain(config.timelines.iter().map(|timeline| &timeline.source)) {
            let table = context.table(name.as_str()).await?;
            let schema = table.schema().as_arrow().clone();
            columns.check_reserved(&format!("`{name}`"), schema.fields().iter().map(|field| field.name()))?;
            columns.sources.insert(name.clone(), schema);
        }
        // Check all sections, because each may have its own problem.
        let mut checked = vec![columns.check_rows()];
        if let Some(join) = &config.join {
            checked.push(columns.check_join(join).await);
        }
        for (i, attributes) in config.attributes.iter().enumerate() {
            checked.push(columns.check_attributes(&format!("`[[attributes]]` {}", i + 1), attributes).await);
        }
        for (i, timeline) in config.timelines.iter().enumerate() {
            checked.push(columns.check_timeline(&format!("`[[timelines]]` {}", i + 1), timeline).await);
        }
        checked.push(columns.check_made());
        checked.extend(config.sampling.as_ref().map(|sampling| columns.check_sampling(sampling)));
        let mut has_problem = false;
        for error in checked.into_iter().filter_map(Result::err) {
            problems.report(error)?;
            has_problem = true;
        }
        // With wrong columns, rows cannot be read, so stop here.
        if has_problem {
            problems.check()?;
        }
        Ok(columns)
    }

    /// Returns the columns of a source that a step reads.
    pub(super) fn of(&self, source: &str) -> &ArrowSchema {
        &self.sources[source]
    }

    /// Returns the SQL expression of a checked time column in microseconds since 1970.
    pub(super) fn time(&self, schema: &ArrowSchema, time: &TimeConfig) -> Result<String> {
        times::micros_sql(self.config, time, schema)
    }

    /// Returns the columns of a source that the checked expression `sql` reads.
    pub(super) fn read_by(&self, schema: &ArrowSchema, sql: &str) -> Result<Vec<String>> {
        let expression =
            self.context.state().create_logical_expr(sql, &DFSchema::try_from(schema.clone())?)?;
        let read = expression.column_refs();
        let names = schema.fields().iter().map(|field| field.name());
        Ok(names.filter(|name| read.iter().any(|column| column.name == **name)).cloned().collect())
    }

    /// Returns the type of the label that `[sampling]` uses. Labels of `[join]` are numbers.
    pub(super) fn sampling_type(&self, sampling: &SamplingConfig) -> DataType {
        if let Ok(field) = self.rows.field_with_name(&sampling.label) {
            return field.data_type().clone();
        }
        for attributes in &self.config.attributes {
            if let Some((_, column)) = attributes.columns.iter().find(|(name, _)| *name == sampling.label)
                && let Ok(field) = self.of(&attributes.source).field_with_name(column)
            {
                return field.data_type().clone();
            }
        }
        DataType::Float64
    }

    fn check_rows(&self) -> Result<()> {
        self.key("`[samples].key`", None, &self.config.samples.key)?;
        for column in self.config.time.columns() {
            self.in_rows(&self.config.time.place, column)?;
        }
        for name in self.config.checks.iter().flat_map(|checks| &checks.parallel).flatten() {
            let data_type = self.in_rows("`[checks].parallel`", name)?;
            if !matches!(data_type, DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..))
            {
                let message = format!("`[checks].parallel` names `{name}`, whose type is {data_type}");
                return Err(self.wrong(message, "name columns of lists"));
            }
        }
        match &self.config.samples.condition {
            Some(condition) => self.condition("`[samples].where`", &self.rows, condition),
            None => Ok(()),
        }
    }

    async fn check_join(&self, join: &JoinConfig) -> Result<()> {
        let events = self.of(&join.source);
        self.pairs("`[join].on`", &join.source, &join.on)?;
        self.source_time(&join.source, &join.time).await?;
        self.key("`[join].key`", Some(&join.source), &join.key)?;
        for (name, label) in &join.labels {
            let place = format!("`[join.labels].{name}`");
            match label {
                LabelConfig::When(condition) => self.condition(&place, events, condition)?,
                LabelConfig::Value { aggregate, .. } => {
                    self.aggregate(&place, &join.source, aggregate).await?;
                }
                LabelConfig::Delay(_) => {}
            }
        }
        Ok(())
    }

    async fn check_attributes(&self, place: &str, attributes: &AttributesConfig) -> Result<()> {
        self.pairs(&format!("{place}: `on`"), &attributes.source, &attributes.on)?;
        if let Some(time) = &attributes.time {
            self.source_time(&attributes.source, time).await?;
        }
        for (_, column) in &attributes.columns {
            self.in_source(&format!("{place}: `columns`"), &attributes.source, column)?;
        }
        Ok(())
    }

    async fn check_timeline(&self, place: &str, timeline: &TimelineConfig) -> Result<()> {
        let source = &timeline.source;
        self.pairs(&format!("{place}: `on`"), source, &timeline.on)?;
        self.source_time(source, &timeline.time).await?;
        for name in &timeline.order {
            self.in_source(&format!("{place}: `order`"), source, name)?;
        }
        self.key(&format!("{place}: `key`"), Some(source), &timeline.key)?;
        for (feature, column) in &timeline.columns {
            let data_type = self.in_source(&format!("{place}: `columns`"), source, column)?;
            let made = self.config.schema.sparse_features().find(|made| made.name == *feature);
            if let Some((why, hint)) = made.and_then(|made| wrong_item_type(made, column, data_type)) {
                let message =
                    format!("{place}: `{feature}` takes the column `{column}` of `{source}`, {why}");
                return Err(self.wrong(message, &hint));
            }
        }
        match &timeline.condition {
            Some(condition) => self.condition(&format!("{place}: `where`"), self.of(source), condition),
            None => Ok(()),
        }
    }

    /// Checks that no step produces a column that exists already, and that all needed columns exist.
    fn check_made(&self) -> Result<()> {
        let mut made: Vec<&str> = self.rows.fields().iter().map(|field| field.name().as_str()).collect();
        let windows = self.config.timelines.iter().flat_map(|timeline| &timeline.columns);
        for name in self.config.joined_columns().chain(windows.map(|(name, _)| name)) {
            if made.contains(&name.as_str()) {
                let message = format!("two steps give the samples a column `{name}`");
                let hint = "give one another name: `columns = { new_name = \"column\" }`, or another label";
                return Err(self.wrong(message, hint));
            }
            made.push(name);
        }
        self.check_reserved("a step", made.iter().copied())?;
        made.extend(self.config.sampling.iter().map(|sampling| sampling.weight.as_str()));
        made.extend(self.config.keep.iter().map(String::as_str).filter(|name| *name == EVENT_TIME));
        check_columns(self.config, &made)
    }

    fn check_sampling(&self, sampling: &SamplingConfig) -> Result<()> {
        let rows = self.rows.fields().iter().map(|field| field.name());
        let known: Vec<&str> = rows.chain(self.config.joined_columns()).map(String::as_str).collect();
        if !known.contains(&sampling.label.as_str()) {
            return Err(missing_column(self.config, "`[sampling].label`", &sampling.label, &known));
        }
        let data_type = self.sampling_type(sampling);
        let is_number = data_type.is_numeric() || data_type == DataType::Boolean;
        if !is_number && key_kind(&data_type) != Some("text") {
            let message = format!("`[sampling].label` is `{}`, whose type is {data_type}", sampling.label);
            return Err(self.wrong(message, "sample by a number, a boolean or text"));
        }
        for (value, _) in &sampling.keep {
            if is_number && !value.parse::<f64>().is_ok_and(f64::is_finite) {
                let message = format!(
                    "`[sampling].keep`: `{value}` is not a value of `{}`, which is {data_type}",
                    sampling.label
                );
                return Err(self.wrong(message, "write the label's numbers, as `keep = { \"0\" = 0.1 }`"));
            }
        }
        Ok(())
    }

    /// Checks that every column of a key of the samples, or of a source, exists and has a type that can be compared.
    fn key(&self, place: &str, source: Option<&str>, key: &[String]) -> Result<()> {
        for name in key {
            let (data_type, of_source) = match source {
                None => (self.in_rows(place, name)?, String::new()),
                Some(source) => (self.in_source(place, source, name)?, format!(" of `{source}`")),
            };
            if key_kind(data_type).is_none() {
                let message =
                    format!("{place} names the column `{name}`{of_source}, whose type is {data_type}");
                return Err(self.wrong(message, &key_hint(name, data_type)));
            }
        }
        Ok(())
    }

    /// Checks that both columns of every pair exist, and that their types can be compared with each other.
    fn pairs(&self, place: &str, source: &str, pairs: &[(String, String)]) -> Result<()> {
        for (ours, theirs) in pairs {
            let (our_type, their_type) = (self.in_rows(place, ours)?, self.in_source(place, source, theirs)?);
            if key_kind(our_type).is_none() || key_kind(our_type) != key_kind(their_type) {
                let message = format!(
                    "{place}: `{ours}` of the samples is {our_type}, `{theirs}` of `{source}` is {their_type}"
                );
                return Err(self.wrong(message, &one_type(ours, our_type, theirs, their_type)));
            }
        }
        Ok(())
    }

    fn in_rows(&self, place: &str, name: &str) -> Result<&DataType> {
        let known: Vec<&str> = self.rows.fields().iter().map(|field| field.name().as_str()).collect();
        let field =
            self.rows.field_with_name(name).map_err(|_| missing_column(self.config, place, name, &known))?;
        Ok(field.data_type())
    }

    fn in_source(&self, place: &str, source: &str, name: &str) -> Result<&DataType> {
        let schema = self.of(source);
        let field = schema.field_with_name(name).map_err(|_| {
            let known = schema.fields().iter().map(|field| field.name().as_str());
            let message = format!("{place} names the column `{name}`, which `{source}` does not have");
            self.wrong(message, &suggest(name, known))
        })?;
        Ok(field.data_type())
    }

    /// Checks that the time column of a source exists, and that the meaning of its values is defined.
    async fn source_time(&self, source: &str, time: &TimeConfig) -> Result<()> {
        for column in time.columns() {
            self.in_source(&time.place, source, column)?;
        }
        times::check(self.config, time, self.context.table(source).await?).await
    }

    /// Checks that no column of `owner` has a reserved name.
    fn check_reserved<S: AsRef<str>>(&self, owner: &str, names: impl IntoIterator<Item = S>) -> Result<()> {
        match names.into_iter().find(|name| name.as_ref().starts_with(RESERVED)) {
            None => Ok(()),
            Some(name) => {
                let name = name.as_ref();
                let message =
                    format!("{owner} has a column `{name}`; names that begin with `{RESERVED}` are reserved");
                Err(self.wrong(message, "rename the column"))
            }
        }
    }

    /// Checks an SQL condition over the columns of `schema`.
    fn condition(&self, place: &str, schema: &ArrowSchema, sql: &str) -> Result<()> {
        let (expression, schema) = self.expression(place, schema, sql)?;
        match expression.get_type(&schema) {
            Ok(DataType::Boolean) => Ok(()),
            Ok(other) => {
                let message = format!("{place}: `{sql}` is not a condition, its type is {other}");
                Err(self.wrong(message, "compare something, as `kind = 'click'`"))
            }
            Err(error) => {
                Err(self.wrong(format!("{place}: {}", engine_message(&error)), "correct the condition"))
            }
        }
    }

    /// Checks an SQL aggregate over the columns of a source. It must return a number.
    async fn aggregate(&self, place: &str, source: &str, sql: &str) -> Result<()> {
        let hint = "write an aggregate of numbers, as `max(seconds)` or `count(*)`";
        let (expression, _) = self.expression(place, self.of(source), sql)?;
        if !expression.exists(|part| Ok(matches!(part, Expr::AggregateFunction(_))))? {
            return Err(self.wrong(
                format!("{place}: `{sql}` is not an aggregate, but a sample may have many events"),
                hint,
            ));
        }
        let planned = self.context.query(&format!("SELECT {sql}\n AS label FROM {}", table(source))).await;
        let planned =
            planned.map_err(|error| self.wrong(format!("{place}: {}", engine_message(&error)), hint))?;
        let data_type = planned.schema().field(0).data_type().clone();
        if !data_type.is_numeric() && data_type != DataType::Boolean {
            return Err(
                self.wrong(format!("{place}: `{sql}` gives {data_type}, which is not a number"), hint)
            );
        }
        Ok(())
    }

    /// Parses one whole SQL expression over the columns of `schema`.
    fn expression(&self, place: &str, schema: &ArrowSchema, sql: &str) -> Result<(Expr, DFSchema)> {
        let columns = DFSchema::try_from(schema.clone())?;
        let expression = self.context.state().create_logical_expr(sql, &columns).map_err(|error| {
            let names = schema.fields().iter().map(|field| format!("`{}`", field.name())).collect::<Vec<_>>();
            let hint = format!("write one SQL expression over the columns {}", names.join(", "));
            self.wrong(format!("{place}: {}", engine_message(&error)), &hint)
        })?;
        match why_varies(&expression)? {
            None => Ok((expression, columns)),
            Some((message, hint)) => Err(self.wrong(format!("{place}: {message}"), &hint)),
        }
    }

    fn wrong(&self, message: String, hint: &str) -> Error {
        Error::config(&self.config.path, message, hint)
    }
}

/// Returns the hint for a column `ours` of the samples and a column `theirs` of a source with types of different
/// kinds.
fn one_type(ours: &str, our_type: &DataType, theirs: &str, their_type: &DataType) -> String {
    match (key_kind(our_type), key_kind(their_type)) {
        (Some(_), Some(_)) => format!(
            "values of different types are never equal: convert `{ours}` in `[samples].query`, for example with `CAST({ours} AS VARCHAR)`, or, in CSV and JSON, give the source's column the other type: `schema = {{ {theirs} = \"VARCHAR\" }}`"
        ),
        (None, _) => key_hint(ours, our_type),
        (_, None) => key_hint(theirs, their_type),
    }
}
