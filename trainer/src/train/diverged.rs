//! Saves the batch with which the loss stopped being finite, and looks for the cause.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, ListArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema as ArrowSchema};
use arrow::ipc::writer::FileWriter;
use onefold_datasets::Schema;
use onefold_ikjt::Batch;

use crate::metrics::Task;
use crate::{Error, Result};

/// The path of the batch in a run.
const BATCH_FILE: &str = "diverged/batch.arrow";
/// The column of the logits; with several tasks, `logit_TASK`.
const LOGIT_COLUMN: &str = "logit";

/// Returns whether a batch is saved in the run.
pub(super) fn is_saved(run: &Path) -> bool {
    run.join(BATCH_FILE).is_file()
}

/// Writes the batch to the run, as an Arrow IPC file with a row per sample: labels, weight, dense and sparse
/// features, and the logits of all tasks.
pub(super) fn save(
    run: &Path,
    batch: &Batch,
    schema: &Schema,
    tasks: &[Task],
    logits: &[f32],
) -> Result<PathBuf> {
    let rows = rows(batch, schema, tasks, logits).map_err(std::io::Error::other)?;
    let path = run.join(BATCH_FILE);
    fs_err::create_dir_all(path.parent().unwrap_or(run))?;
    let file = fs_err::File::create(&path)?;
    let written = FileWriter::try_new(file, &rows.schema()).and_then(|mut writer| {
        writer.write(&rows)?;
        writer.finish()
    });
    written.map_err(|error| {
        Error::Io(std::io::Error::other(format!("`{}` cannot be written: {error}", path.display())))
    })?;
    Ok(path)
}

fn rows(
    batch: &Batch,
    schema: &Schema,
    tasks: &[Task],
    logits: &[f32],
) -> Result<RecordBatch, arrow::error::ArrowError> {
    let mut columns: Vec<(String, ArrayRef)> = Vec::new();
    let mut floats = |name: &str, values: Vec<f32>| {
        columns.push((name.to_owned(), Arc::new(Float32Array::from(values)) as ArrayRef));
    };
    let column = |values: &[f32], column: usize, width: usize| -> Vec<f32> {
        values.iter().skip(column).step_by(width.max(1)).copied().collect()
    };
    for (i, task) in tasks.iter().enumerate() {
        let name = match tasks {
            [_] => LOGIT_COLUMN.to_owned(),
            _ => format!("{LOGIT_COLUMN}_{}", task.name),
        };
        floats(&name, column(logits, i, tasks.len()));
    }
    for (i, name) in schema.labels.iter().enumerate() {
        floats(name, column(batch.labels(), i, batch.label_width()));
    }
    if let (Some(name), Some(weights)) = (&schema.weight, batch.weights()) {
        floats(name, weights.to_vec());
    }
    for (i, name) in schema.dense.iter().enumerate() {
        floats(name, column(batch.dense(), i, batch.dense_width()));
    }
    for group in batch.groups() {
        for feature in group.features() {
            let lists = (0..batch.size()).map(|sample| {
                Some(feature.row(group.row_of(sample)).iter().map(|id| Some(*id)).collect::<Vec<_>>())
            });
            let lists = ListArray::from_iter_primitive::<Int64Type, _, _>(lists);
            columns.push((feature.name().to_owned(), Arc::new(lists)));
        }
    }
    let fields = columns.iter().map(|(name, values)| Field::new(name, values.data_type().clone(), true));
    let schema = ArrowSchema::new(fields.collect::<Vec<_>>());
    debug_assert!(schema.fields().iter().all(|field| *field.data_type() != DataType::Null));
    RecordBatch::try_new(Arc::new(schema), columns.into_iter().map(|(_, values)| values).collect())
}

/// Describes the likely cause in the batch or in the model: the first input that is not finite, if there is
/// one.
pub(super) fn cause(batch: &Batch, schema: &Schema, logits: &[f32]) -> String {
    let first = |values: &[f32], width: usize, name: &dyn Fn(usize) -> String| {
        let at = values.iter().position(|value| !value.is_finite())?;
        let width = width.max(1);
        Some(format!("{} is {} in sample {} of the batch", name(at % width), values[at], at / width))
    };
    let named = |kind: &'static str, names: &[String]| {
        let names = names.to_vec();
        move |column: usize| format!("{kind} `{}`", names.get(column).map_or("", String::as_str))
    };
    let dense = named("dense feature", &schema.dense);
    let label = named("label", &schema.labels);
    first(batch.dense(), batch.dense_width(), &dense)
        .or_else(|| first(batch.labels(), batch.label_width(), &label))
        .or_else(|| first(batch.weights()?, 1, &|_| "the weight".to_owned()))
        .or_else(|| {
            let count = logits.iter().filter(|logit| !logit.is_finite()).count();
            let message = format!(
                "all inputs are finite, {count} of {} logits are not: the parameters have diverged",
                logits.len()
            );
            (count > 0).then_some(message)
        })
        .unwrap_or_else(|| "inputs and logits are finite, but the gradient is not".to_owned())
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::Float32Type;
    use arrow::ipc::reader::FileReader;
    use onefold_datasets::{FeatureGroup, SparseFeature, SparseKind};
    use onefold_ikjt::{BatchParts, Feature, Group};

    use super::*;

    fn schema() -> Schema {
        let feature = SparseFeature::new("history", SparseKind::Sequence);
        Schema {
            labels: vec!["clicked".into()],
            weight: None,
            dense: vec!["age".into(), "price".into()],
            kept: Vec::new(),
            groups: vec![FeatureGroup { name: "g".into(), deduplicated: true, features: vec![feature] }],
        }
    }

    fn tasks(names: &[&str]) -> Vec<Task> {
        let task = |(column, name): (usize, &&str)| Task {
            name: (*name).to_owned(),
            column,
            loss: crate::metrics::Loss::default(),
        };
        names.iter().enumerate().map(task).collect()
    }

    fn batch(dense: [f32; 4]) -> Batch {
        let feature = Feature::from_rows("history", &[vec![1_i64, 2], vec![]]).unwrap();
        Batch::try_new(BatchParts {
            size: 2,
            dense: dense.to_vec().into(),
            labels: vec![0.0, 1.0].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: vec![Group::try_new("g", Some(vec![1, 0].into()), vec![feature]).unwrap()],
        })
        .unwrap()
    }

    #[test]
    fn the_saved_batch_has_every_sample_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = save(
            folder.path(),
            &batch([1.0, 2.0, 3.0, f32::NAN]),
            &schema(),
            &tasks(&["clicked"]),
            &[0.5, f32::NAN],
        )
        .unwrap();
        let mut reader = FileReader::try_new(fs_err::File::open(path).unwrap(), None).unwrap();
        let rows = reader.next().unwrap().unwrap();
        let names: Vec<_> = rows.schema().fields().iter().map(|field| field.name().clone()).collect();
        assert_eq!(names, ["logit", "clicked", "age", "price", "history"]);
        assert_eq!(rows["age"].as_primitive::<Float32Type>().values()[..], [1.0, 3.0]);
        assert!(rows["price"].as_primitive::<Float32Type>().value(1).is_nan());
        let history = rows["history"].as_list::<i32>();
        assert!(history.value(0).is_empty());
        assert_eq!(history.value(1).as_primitive::<Int64Type>().values()[..], [1, 2]);
    }

    #[test]
    fn every_task_has_a_column_of_logits() {
        let tasks = tasks(&["clicked", "liked"]);
        let rows = rows(&batch([1.0; 4]), &schema(), &tasks, &[0.5, f32::NAN, 1.5, 2.5]).unwrap();
        let logits = |name: &str| rows[name].as_primitive::<Float32Type>().values().to_vec();
        assert_eq!(logits("logit_clicked"), [0.5, 1.5]);
        assert!(logits("logit_liked")[0].is_nan() && logits("logit_liked")[1] == 2.5);
        assert!(rows.column_by_name("logit").is_none());
    }

    #[test]
    fn the_cause_is_the_first_value_that_is_not_finite() {
        let cause = |dense, logits: [f32; 2]| super::cause(&batch(dense), &schema(), &logits);
        let infinite = cause([1.0, 2.0, 3.0, f32::INFINITY], [0.0, f32::NAN]);
        assert_eq!(infinite, "dense feature `price` is inf in sample 1 of the batch");
        assert!(cause([1.0; 4], [0.0, f32::NAN]).contains("1 of 2 logits are not"));
        assert!(cause([1.0; 4], [0.0; 2]).contains("the gradient is not"));
    }
}
