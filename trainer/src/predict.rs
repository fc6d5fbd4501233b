//! Writes the predictions of a trained model, one row per sample, with columns for joining them to the logs.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Float32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::progress::Reporter;
use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use onefold_storage::{Storage, Upload};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::Serialize;

use crate::distributed::Collectives;
use crate::evaluate::{EvaluateOptions, open};
use crate::infer::infer;
use crate::metrics::Task;
use crate::stop::Stop;
use crate::{Error, Result};

/// The summary of a prediction.
#[derive(Debug, Clone, Serialize)]
pub struct PredictionSummary {
    /// The number of samples, which are the rows of the file.
    pub samples: u64,
    /// The names of the file's columns.
    pub columns: Vec<String>,
    /// The number of steps that the model was trained for.
    pub steps: u64,
    /// The size of the file in bytes.
    pub bytes_on_disk: u64,
    /// The time since the first batch, in seconds.
    pub wall_seconds: f64,
    /// The throughput: `samples / wall_seconds`.
    pub samples_per_second: f64,
}

/// Writes the predictions of the run at `run` for samples of `dataset` to the Parquet file `out`; all three are
/// paths or URLs. The file appears when it is complete. It has the columns `keep` of the dataset (all kept
/// columns if `keep` is empty), then `prediction` (a probability, a number or a count) and `logit`; with
/// several tasks, `prediction_LABEL` and `logit_LABEL` for each task. Rows are in the order of global batches.
/// Every rank must call it; the lowest rank writes.
///
/// # Errors
///
/// The errors of [`evaluate`](crate::evaluate()); [`Error::Read`] if a column is not kept in the dataset;
/// [`Error::Dataset`] if the file exists and may not be replaced, or cannot be written; [`Error::Fault`] if
/// there are no samples, or samples are missing.
pub fn predict(
    run: &Path,
    dataset: &Path,
    (out, overwrite): (&Path, bool),
    keep: &[String],
    options: &EvaluateOptions,
    reporter: &dyn Reporter,
) -> Result<PredictionSummary> {
    let collectives = &options.collectives;
    let opened =
        collectives.agree_on(|| open(run, dataset, options, |schema| columns(dataset, keep, schema)))?;
    opened.check_ranks(options)?;
    let (model, steps) = opened.load_model(run, options)?;
    let (tasks, reader) = (&opened.tasks, &opened.reader);
    let first = collectives.rank() == 0;
    let mut file = collectives.agree_on(|| first.then(|| File::create(out, overwrite)).transpose())?;
    let started = Instant::now();
    reporter.begin("predicting", Some(reader.samples()), "samples");
    let mut samples = 0;
    infer(&model, reader, tasks, &Stop::new(), reporter, |batch, logits| {
        let own = record_batch(batch, logits, tasks)?;
        let all = gathered(own, &**collectives)?;
        samples += all.iter().map(|batch| batch.num_rows() as u64).sum::<u64>();
        collectives.agree_on(|| {
            file.iter_mut().try_for_each(|file| all.iter().try_for_each(|batch| file.write(batch)))
        })
    })?;
    collectives.agree(check_complete(samples, opened.samples))?;
    let finished = collectives.agree_on(|| file.map(File::finish).transpose())?;
    let (columns, bytes_on_disk) = finished.unwrap_or_default();
    let wall_seconds = started.elapsed().as_secs_f64();
    let samples_per_second = samples as f64 / wall_seconds;
    Ok(PredictionSummary { samples, columns, steps, bytes_on_disk, wall_seconds, samples_per_second })
}

/// Checks that all samples of the selected partitions were predicted, and that there is at least one.
fn check_complete(samples: u64, chosen: u64) -> Result<()> {
    if samples != chosen {
        let message = format!("the dataset gave {samples} samples to predict, and {chosen} were chosen");
        let hint = "check the dataset with `onefold-ingest verify`";
        return Err(Fault::new(Kind::Data, message).hint(hint).into());
    }
    if samples == 0 {
        let message = "the partitions that were chosen have no samples to predict";
        return Err(Fault::new(Kind::Data, message)
            .hint(text!["choose others with ", option("partitions")])
            .into());
    }
    Ok(())
}

/// Returns the columns for joining the predictions: `keep`, or all kept columns of the dataset.
fn columns(dataset: &Path, keep: &[String], schema: &Schema) -> Result<Vec<String>> {
    if !keep.is_empty() {
        return Ok(keep.to_vec());
    }
    let kept: Vec<String> = schema.kept_names().map(str::to_owned).collect();
    if kept.is_empty() {
        return Err(Error::run(
            dataset,
            "the dataset keeps no column that predictions could be joined by",
            text![
                "name some with `keep = [\"request_id\"]` in `dataset.toml` and build it again, or join by sessions with ",
                option("keep").set_to("session_id")
            ],
        ));
    }
    Ok(kept)
}

/// Returns a record batch with the kept columns and the predictions of a batch.
fn record_batch(batch: &Batch, logits: &[f32], tasks: &[Task]) -> Result<RecordBatch> {
    let kept = batch.kept().iter().map(|column| (column.name.to_string(), Arc::clone(&column.values)));
    let of_task = |(number, task): (usize, &Task)| {
        let logits = || logits.iter().skip(number).step_by(tasks.len()).copied();
        let predictions = logits().map(|logit| task.loss.prediction(logit) as f32);
        let name = |what: &str| match tasks.len() {
            1 => what.to_owned(),
            _ => format!("{what}_{}", task.name),
        };
        let column = |values: Float32Array| -> ArrayRef { Arc::new(values) };
        [(name("prediction"), column(predictions.collect())), (name("logit"), column(logits().collect()))]
    };
    let predicted = tasks.iter().enumerate().flat_map(of_task);
    let (names, columns): (Vec<String>, Vec<ArrayRef>) = kept.chain(predicted).unzip();
    let field = |(name, values): (&String, &ArrayRef)| {
        Field::new(name, values.data_type().clone(), *values.data_type() != DataType::Float32)
    };
    let fields: Vec<Field> = names.iter().zip(&columns).map(field).collect();
    let schema = Arc::new(ArrowSchema::new(fields));
    Ok(RecordBatch::try_new(schema, columns).map_err(std::io::Error::other)?)
}

/// Returns the record batches of all ranks, in the order of ranks. Every rank must call it.
fn gathered(own: RecordBatch, collectives: &dyn Collectives) -> Result<Vec<RecordBatch>> {
    if collectives.size() == 1 {
        return Ok(vec![own]);
    }
    let encode = || {
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::try_new(&mut bytes, &own.schema())?;
        writer.write(&own)?;
        writer.finish()?;
        drop(writer);
        Ok::<_, arrow::error::ArrowError>(bytes)
    };
    let bytes = collectives.gather_bytes(&encode().map_err(std::io::Error::other)?)?;
    let decode = |bytes: &Vec<u8>| {
        let batches = StreamReader::try_new(bytes.as_slice(), None)?;
        batches.collect::<Result<Vec<_>, _>>()
    };
    let batches: Result<Vec<Vec<RecordBatch>>, _> = bytes.iter().map(decode).collect();
    Ok(batches.map_err(std::io::Error::other)?.concat())
}

/// The output file.
struct File {
    storage: Storage,
    name: String,
    /// The upload, until there is a writer.
    upload: Option<Upload>,
    /// Created with the first batch, which defines the columns.
    writer: Option<ArrowWriter<Upload>>,
    schema: Option<SchemaRef>,
}

impl File {
    fn create(out: &Path, overwrite: bool) -> Result<Self> {
        let (storage, name) = Storage::of_file(out)?;
        if name.is_empty() || !overwrite && storage.head(&name)?.is_some() {
            return Err(onefold_storage::Error::exists(
                out,
                text!["give another file, or replace it with ", option("overwrite")],
            )
            .into());
        }
        let upload = Some(storage.upload(&name)?);
        Ok(Self { storage, name, upload, writer: None, schema: None })
    }

    fn failed(&self, error: parquet::errors::ParquetError) -> Error {
        onefold_storage::Error::write(self.storage.shown(&self.name), std::io::Error::other(error)).into()
    }

    fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        if let Some(upload) = self.upload.take() {
            let compression = Compression::ZSTD(ZstdLevel::default());
            let properties = WriterProperties::builder().set_compression(compression).build();
            let writer = ArrowWriter::try_new(upload, batch.schema(), Some(properties));
            self.writer = Some(writer.map_err(|error| self.failed(error))?);
            self.schema = Some(batch.schema());
        }
        let written = self.writer.as_mut().map_or(Ok(()), |writer| writer.write(batch));
        written.map_err(|error| self.failed(error))
    }

    /// Completes the file, which makes it appear. Returns its columns and its size in bytes.
    fn finish(mut self) -> Result<(Vec<String>, u64)> {
        let Some(writer) = self.writer.take() else { return Ok((Vec::new(), 0)) };
        let upload = writer.into_inner().map_err(|error| self.failed(error))?;
        upload.finish()?;
        let bytes = self.storage.head(&self.name)?.map_or(0, |object| object.bytes);
        let fields = self.schema.iter().flat_map(|schema| schema.fields());
        Ok((fields.map(|field| field.name().clone()).collect(), bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_lacks_samples_is_refused() {
        assert!(check_complete(3, 3).is_ok());
        let lacks = check_complete(50, 100).unwrap_err().to_string();
        assert!(
            lacks.starts_with("the dataset gave 50 samples to predict, and 100 were chosen\n  hint"),
            "{lacks}"
        );
        let none = check_complete(0, 0).unwrap_err().to_string();
        assert!(none.contains("have no samples to predict\n  hint: choose others with"), "{none}");
    }
}
