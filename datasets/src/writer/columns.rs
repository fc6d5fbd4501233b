//! The columns of a data file: their order, and the samples' column from which each is computed.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema as ArrowSchema, SchemaRef};
use parquet::file::metadata::SortingColumn;
use parquet::schema::types::ColumnPath;

use super::WriterOptions;
use crate::folded::Fold;
use crate::schema::with_sample_keys;
use crate::{
    Error, Layout, Order, Result, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Schema, TIME_COLUMN, suggest, with_name,
};

/// The columns of data files.
#[derive(Debug)]
pub(super) struct FileColumns {
    /// The columns of the samples, in file order.
    pub(super) sources: Vec<Source>,
    /// The fields of the file. Each has one Parquet leaf column.
    pub(super) file: SchemaRef,
    /// The names of the fields.
    pub(super) names: Arc<[String]>,
    /// The columns by which the rows of a row group are sorted in ascending order.
    pub(super) sorting: Vec<SortingColumn>,
}

/// A column of the samples, and the columns of the file that store it.
#[derive(Debug)]
pub(super) struct Source {
    /// Its index in [`Schema::to_arrow`].
    pub(super) index: usize,
    pub(super) name: String,
    pub(super) fold: Fold,
    /// The fields in the file: one, or two for a window.
    pub(super) fields: Vec<FieldRef>,
}

impl FileColumns {
    /// Returns the columns of files of `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the options' column order contains a column twice, or an unknown column.
    pub(super) fn new(schema: &Schema, options: &WriterOptions) -> Result<Self> {
        check_sample_keys(schema, options)?;
        let rows = with_sample_keys(schema.to_arrow(), options.sample_keys);
        let mut folds: Vec<Fold> = match options.layout {
            Layout::Rows => Vec::new(),
            Layout::Folded => Fold::of_schema(schema),
        };
        folds.resize(rows.fields().len(), Fold::Unchanged);
        let stored = with_sample_keys(options.layout.to_arrow(schema), options.sample_keys);
        let source = |index: usize| {
            let (name, fold) = (rows.field(index).name(), folds[index]);
            let first = folds[..index].iter().map(|fold| fold.fields()).sum::<usize>();
            let fields = stored.fields()[first..first + fold.fields()].to_vec();
            Source { index, name: name.clone(), fold, fields }
        };
        let sources: Vec<_> = in_order(&rows, &options.column_order)?.into_iter().map(source).collect();
        let mut all = Self::of_sources(sources);
        all.sorting = sorting_columns(all.file.fields(), options.order);
        Ok(all)
    }

    /// The columns that are made from these, in no order of their rows.
    fn of_sources(sources: Vec<Source>) -> Self {
        let fields: Vec<FieldRef> = sources.iter().flat_map(|source| source.fields.clone()).collect();
        let names = fields.iter().map(|field| field.name().clone()).collect();
        Self { sources, file: Arc::new(ArrowSchema::new(fields)), names, sorting: Vec::new() }
    }

    /// The columns of whole files that lack the features `lacks`, with the rows in `order`.
    pub(super) fn without(&self, lacks: &[String], order: Order) -> Self {
        let names = self.sources.iter().map(|source| &source.name);
        let columns: Vec<String> = names.filter(|name| !lacks.contains(name)).cloned().collect();
        let mut some = self.some(&columns, <[String]>::to_vec);
        some.sorting = sorting_columns(some.file.fields(), order);
        some
    }

    /// The columns of files that have only what is made from some columns of the samples. `named` gives the columns of
    /// such a file their names.
    pub(super) fn some(&self, columns: &[String], named: impl FnOnce(&[String]) -> Vec<String>) -> Self {
        let chosen = || self.sources.iter().filter(|source| columns.contains(&source.name));
        let stored: Vec<String> =
            chosen().flat_map(|source| &source.fields).map(|field| field.name().clone()).collect();
        let mut names = named(&stored).into_iter();
        let source = |source: &Source| {
            let fields = source.fields.iter().zip(names.by_ref());
            let fields = fields.map(|(field, name)| with_name(field, &name)).collect();
            Source { index: source.index, name: source.name.clone(), fold: source.fold, fields }
        };
        Self::of_sources(chosen().map(source).collect())
    }
}

/// Checks that no column has the name that is reserved for sample keys.
fn check_sample_keys(schema: &Schema, options: &WriterOptions) -> Result<()> {
    let is_taken = schema.to_arrow().field_with_name(SAMPLE_KEY_COLUMN).is_ok();
    if !options.sample_keys || !is_taken {
        return Ok(());
    }
    let message =
        format!("the column name `{SAMPLE_KEY_COLUMN}` is reserved for the hashes of the samples' keys");
    let hint = "give the column another name with `AS` in the query";
    Err(Error::schema(message, hint))
}

/// Returns the path of a field's Parquet leaf column.
pub(super) fn leaf_path(field: &Field) -> ColumnPath {
    let mut parts = vec![field.name().clone()];
    if let DataType::List(item) = field.data_type() {
        parts.extend(["list".to_owned(), item.name().clone()]);
    }
    ColumnPath::from(parts)
}

/// Returns the indices of `rows`' columns: first the columns in `first`, then the others.
fn in_order(rows: &SchemaRef, first: &[String]) -> Result<Vec<usize>> {
    let mut places = Vec::with_capacity(rows.fields().len());
    let mut seen = HashSet::new();
    for name in first {
        let Ok(place) = rows.index_of(name) else {
            let known = rows.fields().iter().map(|field| field.name().as_str());
            let message = format!("the column order names `{name}`, which is no column of the dataset");
            return Err(Error::schema(message, suggest(name, known)));
        };
        if !seen.insert(place) {
            let message = format!("the column order names `{name}` twice");
            return Err(Error::schema(message, "name every column once"));
        }
        places.push(place);
    }
    places.extend((0..rows.fields().len()).filter(|place| !seen.contains(place)));
    Ok(places)
}

fn sorting_columns(fields: &[FieldRef], order: Order) -> Vec<SortingColumn> {
    let names: &[&str] = match order {
        // Sessions are ordered by their start time, which is not a column.
        Order::Session => &[],
        Order::SessionHash => &[SESSION_COLUMN, TIME_COLUMN],
        Order::Arrival => &[TIME_COLUMN],
    };
    let places = names.iter().filter_map(|name| fields.iter().position(|field| field.name() == name));
    let ascending = |place| SortingColumn { column_idx: place as i32, descending: false, nulls_first: false };
    places.map(ascending).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folded::samples::schema;

    fn columns(column_order: &[&str]) -> Result<FileColumns> {
        let column_order = column_order.iter().map(|name| (*name).to_owned()).collect();
        let options =
            WriterOptions { layout: Layout::Folded, column_order, ..WriterOptions::new(Order::SessionHash) };
        FileColumns::new(&schema(), &options)
    }

    #[test]
    fn popular_columns_come_first_and_lengths_after_their_windows() {
        let columns = columns(&["history", "clicked"]).unwrap();
        let names: Vec<_> = columns.file.fields().iter().map(|field| field.name().as_str()).collect();
        let expected =
            ["history", "history.length", "clicked", "session_id", "timestamp", "city", "tags", "item"];
        assert_eq!(names, expected);
        let sources = columns.sources.iter().map(|source| source.index);
        assert_eq!(sources.collect::<Vec<_>>(), [5, 2, 0, 1, 3, 4, 6]);
        let sorting = columns.sorting.iter().map(|column| column.column_idx);
        assert_eq!(sorting.collect::<Vec<_>>(), [3, 4]);
    }

    #[test]
    fn selected_columns_keep_their_lengths_and_get_new_names() {
        let (all, mut asked) = (columns(&["history"]).unwrap(), Vec::new());
        let some = all.some(&["clicked".to_owned(), "history".to_owned()], |stored| {
            asked = stored.to_vec();
            stored.iter().map(|name| format!("{name}~2")).collect()
        });
        assert_eq!(asked, ["history", "history.length", "clicked"]);
        assert_eq!(some.names[..], ["history~2", "history.length~2", "clicked~2"]);
        let sources: Vec<_> = some.sources.iter().map(|source| (source.index, source.fields.len())).collect();
        assert_eq!((sources, some.sorting.len()), (vec![(5, 2), (2, 1)], 0));
    }

    #[test]
    fn a_column_order_names_columns_once() {
        let error = columns(&["histroy"]).unwrap_err().to_string();
        assert!(error.contains("names `histroy`") && error.contains("did you mean `history`"), "{error}");
        let error = columns(&["city", "city"]).unwrap_err().to_string();
        assert!(error.contains("names `city` twice"), "{error}");
    }
}
