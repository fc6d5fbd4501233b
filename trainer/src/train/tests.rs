//! Tests that a run that is stopped at any moment and resumed equals a run that was not stopped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use onefold_base::progress::{Reporter, Silent};
use onefold_datasets::{
    Buckets, DatasetWriter, FeatureGroup, Order, PartitionKey, Schema, SparseFeature, SparseKind,
    WriterOptions, bucket_of_session,
};
use onefold_ikjt::Dedupe;
use onefold_sharding::DataType;
use safetensors::Dtype;

use super::*;
use crate::config::CheckpointConfig;

mod ranks;

const CONFIG: &str = r#"
format_version = 1
[data]
eval = ""
allow_overlap = true
[[tasks]]
label = "clicked"
[[tasks]]
label = "even"
weight = 0.5
[train]
batch_size = 20
epochs = 2
seed = 3
log_every_steps = 4
[evaluation]
every_steps = 6
[early_stopping]
patience = 3
task = "clicked"
[checkpoint]
every_steps = 5
full_every = 2
[model]
bottom_mlp = [4]
top_mlp = [4, 2]
interaction = "dot"
[dense]
normalize = "log1p"
[embedding]
dim = 4
rows = 50
evict_after = 3
[tables.history]
pooling = "attention"
[tables.read]
pooling = "encoder"
[tables.wished]
pooling = "din"
target = "item"
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.1
[optimizer.dense]
kind = "adam"
learning_rate = 0.01
"#;

/// The number of samples per session of the dataset.
const SESSION: i64 = 6;

/// Writes 130 samples of sessions with a sliding window, in `buckets` buckets. The label depends on the item,
/// the dense feature on the session.
fn write_dataset(directory: &Path, buckets: u32, age: impl Fn(i64) -> f32) {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let group =
        |name: &str, deduplicated, features| FeatureGroup { name: name.into(), deduplicated, features };
    let schema = Schema {
        labels: vec!["clicked".into(), "even".into()],
        weight: None,
        dense: vec!["age".into()],
        kept: Vec::new(),
        groups: vec![
            group(
                "user",
                true,
                ["history", "read", "wished"].map(|name| feature(name, SparseKind::Sequence)).to_vec(),
            ),
            group("item", false, vec![feature("item", SparseKind::Sparse)]),
        ],
    };
    // The bucket of a session is determined by the 16 highest of 63 bits.
    let bucket = |i: i64| i / SESSION % i64::from(buckets);
    let session = |i: i64| ((bucket(i) * 65_536 + 65_535) / i64::from(buckets)) << 47 | (i / SESSION);
    let mut samples: Vec<i64> = (0..130).collect();
    samples.sort_by_key(|&i| bucket_of_session(session(i), buckets));
    let count = samples.iter().copied();
    let ids = |list: &dyn Fn(i64) -> Vec<i64>| -> ArrayRef {
        let lists = count.clone().map(|i| Some(list(i).into_iter().map(Some).collect::<Vec<_>>()));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let floats = |value: &dyn Fn(i64) -> f32| -> ArrayRef {
        Arc::new(Float32Array::from_iter_values(count.clone().map(value)))
    };
    let item = |i: i64| i * 7 % 13;
    let window = |i: i64| (i / SESSION..i / SESSION + i % SESSION).collect();
    let columns: [(&str, ArrayRef); 9] = [
        ("session_id", Arc::new(Int64Array::from_iter_values(count.clone().map(session)))),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(count.clone()))),
        ("clicked", floats(&|i| f32::from(u8::from(item(i) % 3 == 0)))),
        ("even", floats(&|i| f32::from(u8::from(item(i) % 2 == 0)))),
        ("age", floats(&|i| age(i / SESSION))),
        ("history", ids(&window)),
        ("read", ids(&window)),
        ("wished", ids(&|i| window(i + 1))),
        ("item", ids(&|i| vec![item(i)])),
    ];
    let options =
        WriterOptions { buckets: Buckets::with_own_files(buckets), ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(directory, schema, options).unwrap();
    writer.write(&PartitionKey::new(Vec::new()), &RecordBatch::try_from_iter(columns).unwrap()).unwrap();
    writer.finish().unwrap();
}

/// Raises a stop at the `at`-th call of any method.
struct StopAt {
    stop: Stop,
    at: usize,
    reports: AtomicUsize,
}

impl StopAt {
    fn report(&self) {
        if self.reports.fetch_add(1, Ordering::Relaxed) + 1 == self.at {
            self.stop.raise();
        }
    }
}

impl Reporter for StopAt {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {
        self.report();
    }

    fn advance(&self, _: u64) {
        self.report();
    }

    fn note(&self, _: &str) {}

    fn end(&self) {
        self.report();
    }
}

/// Panics at the `at`-th call of any method.
struct PanicAt {
    at: usize,
    reports: AtomicUsize,
}

impl PanicAt {
    fn report(&self) {
        assert_ne!(self.reports.fetch_add(1, Ordering::Relaxed) + 1, self.at, "a panic that is asked for");
    }
}

impl Reporter for PanicAt {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {
        self.report();
    }

    fn advance(&self, _: u64) {
        self.report();
    }

    fn note(&self, _: &str) {}

    fn end(&self) {
        self.report();
    }
}

/// A folder for runs on one dataset.
struct Runs {
    folder: tempfile::TempDir,
    config: TrainConfig,
    device: Option<Accelerator>,
    /// The folder of the checkpoints, if it differs from the run's directory.
    checkpoints: Option<PathBuf>,
}

impl Runs {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_dataset(&folder.path().join("dataset"), 1, |session| (session % 5) as f32);
        let config = TrainConfig::parse(Path::new("train.toml"), CONFIG).unwrap();
        Self { folder, config, device: None, checkpoints: None }
    }

    fn train(
        &self,
        run: &str,
        existing: Existing,
        stop: Stop,
        reporter: &dyn Reporter,
    ) -> Result<TrainSummary> {
        let options = TrainOptions {
            device: self.device.clone(),
            dedupe: Dedupe::Exact,
            threads: 1,
            snapshot: None,
            max_steps: None,
            plan: None,
            collectives: Arc::new(crate::distributed::Alone),
            trace_steps: None,
            streams: None,
            existing,
            checkpoints: self.checkpoints.clone(),
            warm_start: None,
            progressive: false,
            follow: None,
            memory_limit: None,
            stop,
        };
        let prepared = Prepared::new(&self.config, &self.folder.path().join("dataset"), &options)?;
        prepared.train(&self.folder.path().join(run), reporter)
    }

    fn read(&self, run: &str, file: &str) -> Vec<u8> {
        fs_err::read(self.folder.path().join(run).join(file)).unwrap()
    }
}

#[test]
fn a_run_may_be_stopped_at_any_moment() {
    let runs = Runs::new();
    let counted = StopAt { stop: Stop::new(), at: 0, reports: AtomicUsize::new(0) };
    let whole = runs.train("whole", Existing::Refuse, Stop::new(), &counted).unwrap();
    assert_eq!((whole.steps, whole.ended), (14, Ending::Completed));
    let reports = counted.reports.into_inner();
    // The reports include steps, three evaluations of seven batches, and their beginnings and ends.
    assert!(reports > 14 + 3 * 7, "{reports}");
    let (mut stopped, mut tried) = (0, 0);
    // Every third report, and all of the last ones.
    for at in (1..=reports).filter(|at| at % 3 == 0 || at + 6 > reports) {
        tried += 1;
        let run = format!("run-{at}");
        let stop = Stop::new();
        let reporter = StopAt { stop: stop.clone(), at, reports: AtomicUsize::new(0) };
        let first = runs.train(&run, Existing::Refuse, stop, &reporter).unwrap();
        if first.ended == Ending::Stopped {
            stopped += 1;
            assert!(Run::load(&runs.folder.path().join(&run)).is_ok_and(|run| !run.completed));
        }
        let rest = runs.train(&run, Existing::Resume, Stop::new(), &Silent).unwrap();
        assert_eq!((rest.steps, rest.ended, rest.losses), (14, Ending::Completed, whole.losses.clone()));
        for file in ["metrics.jsonl", "model.safetensors", "run.json"] {
            assert!(
                runs.read(&run, file) == runs.read("whole", file),
                "{file}, stopped at {at} of {reports}"
            );
        }
    }
    // The last reports are an exception, because nothing is left to be stopped after them.
    assert!(stopped + 4 >= tried, "{stopped} of {tried}");
}

/// One rank writes its model directly, and removes shards that an earlier job of several ranks has left.
#[test]
fn one_rank_writes_its_model_once() {
    let runs = Runs::new();
    let stop = Stop::new();
    stop.raise();
    let begun = runs.train("run", Existing::Refuse, stop, &Silent).unwrap();
    assert_eq!((begun.steps, begun.ended, begun.figures.loss), (0, Ending::Stopped, None));
    // A folder is in the place of the file with the shards of rank 0.
    let shards = runs.folder.path().join("run").join(crate::run::SHARDS);
    fs_err::create_dir_all(shards.join("0.safetensors")).unwrap();
    let rest = runs.train("run", Existing::Resume, Stop::new(), &Silent).unwrap();
    assert_eq!((rest.steps, rest.ended), (14, Ending::Completed));
    assert!(!shards.exists());
}

/// A panic removes nothing from the run's directory and from the folder of its checkpoints.
#[test]
fn a_panic_removes_nothing() {
    let mut runs = Runs::new();
    runs.train("whole", Existing::Refuse, Stop::new(), &Silent).unwrap();
    for (run, place) in [("run", None), ("other", Some("elsewhere"))] {
        runs.checkpoints = place.map(|place| runs.folder.path().join(place));
        // The reports are the beginnings of training and of its progress, and six steps; the fifth step has a
        // checkpoint.
        let reporter = PanicAt { at: 8, reports: AtomicUsize::new(0) };
        let train = || runs.train(run, Existing::Refuse, Stop::new(), &reporter);
        assert!(catch_unwind(AssertUnwindSafe(train)).is_err());
        let rest = runs.train(run, Existing::Resume, Stop::new(), &Silent).unwrap();
        assert_eq!((rest.resumed_from_step, rest.steps), (Some(5), 14));
        assert_eq!(runs.read(run, "metrics.jsonl"), runs.read("whole", "metrics.jsonl"));
        let model = runs.read(place.unwrap_or(run), "model.safetensors");
        assert!(model == runs.read("whole", "model.safetensors"));
        // The same holds before the first step.
        let run = format!("{run}-begun");
        runs.checkpoints = place.map(|place| runs.folder.path().join(format!("{place}-begun")));
        let reporter = PanicAt { at: 1, reports: AtomicUsize::new(0) };
        let train = || runs.train(&run, Existing::Refuse, Stop::new(), &reporter);
        assert!(catch_unwind(AssertUnwindSafe(train)).is_err());
        let rest = runs.train(&run, Existing::Resume, Stop::new(), &Silent).unwrap();
        assert_eq!((rest.resumed_from_step, rest.steps), (None, 14));
    }
}

#[test]
fn checkpoints_are_written_by_time_and_at_the_end() {
    let mut runs = Runs::new();
    runs.config.early_stopping = None;
    let by_time = |every_minutes| CheckpointConfig { every_minutes, ..CheckpointConfig::default() };
    runs.config.checkpoint = by_time(f64::MIN_POSITIVE);
    let often = runs.train("often", Existing::Refuse, Stop::new(), &Silent).unwrap();
    // The last step of an epoch announces no next batch, and so cannot request a checkpoint.
    assert_eq!((often.steps, often.checkpoints), (14, 13));
    for every_minutes in [0.0, 1e9] {
        let run = format!("once in {every_minutes}");
        runs.config.checkpoint = by_time(every_minutes);
        assert_eq!(runs.train(&run, Existing::Refuse, Stop::new(), &Silent).unwrap().checkpoints, 1);
        // There is nothing left to do.
        let again = runs.train(&run, Existing::Resume, Stop::new(), &Silent).unwrap();
        assert_eq!((again.resumed_from_step, again.checkpoints), (Some(14), 0));
    }
}

/// The first evaluation counts as the best one, and its checkpoint is kept although newer ones exist.
#[test]
fn early_stopping_keeps_the_best_model() {
    let mut runs = Runs::new();
    runs.config.evaluation.every_steps = Some(2);
    let stopping = runs.config.early_stopping.as_mut().unwrap();
    (stopping.patience, stopping.min_delta) = (4, 10.0);
    runs.config.checkpoint.keep = 1;
    let summary = runs.train("run", Existing::Refuse, Stop::new(), &Silent).unwrap();
    let ended = |summary: &TrainSummary| (summary.ended, summary.steps, summary.model_step);
    assert_eq!(ended(&summary), (Ending::EarlyStopping, 10, Some(2)));
    let run = runs.folder.path().join("run");
    assert_eq!(Run::load(&run).unwrap().steps, 2);
    // The metrics are those of the written model, which are those of the first evaluation.
    let ne = |eval: &crate::EvaluationSummary| eval.tasks["clicked"].ne.unwrap();
    let best = ne(summary.eval.as_ref().unwrap());
    let lines = String::from_utf8(runs.read("run", "metrics.jsonl")).unwrap();
    let logged = lines.lines().filter_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["eval"]["tasks"]["clicked"]["ne"].as_f64()
    });
    let logged: Vec<f64> = logged.collect();
    assert_eq!(logged.len(), 5);
    assert!((logged[0] - best).abs() < 1e-12 && (logged[4] - best).abs() > 1e-6, "{logged:?} {best}");
    let options = crate::EvaluateOptions {
        dedupe: Dedupe::Exact,
        threads: 1,
        checkpoint: None,
        device: None,
        collectives: Arc::new(crate::distributed::Alone),
        snapshot: None,
        partitions: None,
    };
    let eval = crate::evaluate(&run, &runs.folder.path().join("dataset"), &options, &Silent).unwrap();
    assert_eq!((ne(&eval), eval.steps), (best, Some(2)));
    // A resumed run does not know the metrics any more, and computes them again.
    let model = runs.read("run", "model.safetensors");
    let again = runs.train("run", Existing::Resume, Stop::new(), &Silent).unwrap();
    assert_eq!((ended(&again), ne(again.eval.as_ref().unwrap())), (ended(&summary), best));
    assert!(runs.read("run", "model.safetensors") == model);
    assert_eq!(runs.read("run", "metrics.jsonl"), lines.as_bytes());
}

#[test]
fn a_run_that_ended_early_does_not_go_on() {
    let mut runs = Runs::new();
    runs.config.optimizer.dense.learning_rate = 0.0;
    runs.config.optimizer.tables.learning_rate = 0.0;
    runs.config.early_stopping.as_mut().unwrap().patience = 1;
    let ended = |summary: &TrainSummary| (summary.steps, summary.ended);
    let first = runs.train("run", Existing::Refuse, Stop::new(), &Silent).unwrap();
    assert_eq!(ended(&first), (12, Ending::EarlyStopping));
    let metrics = runs.read("run", "metrics.jsonl");
    let again = runs.train("run", Existing::Resume, Stop::new(), &Silent).unwrap();
    assert_eq!(ended(&again), (12, Ending::EarlyStopping));
    assert_eq!(runs.read("run", "metrics.jsonl"), metrics);
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Returns all table rows of a run, in order: whether each has its initial values, and its usage, if known.
fn rows_of(runs: &Runs, name: &str) -> Vec<(bool, Option<u8>)> {
    let run = Run::load(&runs.folder.path().join(name)).unwrap();
    let initial = run.initial_model(&Placement::alone(&run.tables), 1, None).unwrap();
    let file = runs.read(name, "model.safetensors");
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut rows = Vec::new();
    for (number, table) in initial.embeddings.tables().iter().enumerate() {
        let tensor = |what: &str| file.tensor(&format!("tables.{}.{what}", table.name)).ok();
        let floats = |what| floats_of(tensor(what).unwrap().data());
        let (weights, state) = (floats("weight"), floats("accumulator"));
        let (usage, before) = (tensor("usage"), initial.embeddings.weights(number).unwrap().unwrap());
        rows.extend((0..state.len()).map(|row| {
            let is_initial = weights[4 * row..][..4] == before[4 * row..][..4] && state[row] == 0.0;
            (is_initial, usage.as_ref().map(|usage| usage.data()[row]))
        }));
    }
    rows
}

#[test]
fn rows_that_are_no_longer_looked_up_are_evicted() {
    let mut runs = Runs::new();
    runs.config.train.epochs = 1;
    let summary = runs.train("run", Existing::Refuse, Stop::new(), &Silent).unwrap();
    assert_eq!(summary.steps, 7);
    let rows = rows_of(&runs, "run");
    assert!(rows.iter().all(|(is_initial, usage)| *is_initial == (*usage == Some(0))), "{rows:?}");
    let changed = |rows: &[(bool, Option<u8>)]| rows.iter().filter(|(initial, _)| !initial).count() as u64;
    let counts = summary.rows.unwrap();
    assert_eq!(counts.in_use, changed(&rows));
    // The first eviction evicts nothing, because no rows were in use before its period.
    let lines = String::from_utf8(runs.read("run", "metrics.jsonl")).unwrap();
    let evicted = lines.lines().filter_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        Some((line["step"].as_u64()?, line["evicted_rows"].as_u64()?))
    });
    assert_eq!(evicted.collect::<Vec<_>>(), [(3, 0), (6, counts.evicted)]);
    // Windows slide, so the first elements are not looked up any more.
    runs.config.embedding.evict_after = None;
    let all = runs.train("all", Existing::Refuse, Stop::new(), &Silent).unwrap();
    assert_eq!((all.rows, counts.evicted > 0), (None, true));
    assert_eq!(changed(&rows_of(&runs, "all")), counts.in_use + counts.evicted);
}

#[test]
fn a_model_that_predicts_no_numbers_is_not_evaluated() {
    let mut runs = Runs::new();
    runs.train("run", Existing::Refuse, Stop::new(), &Silent).unwrap();
    let dataset = runs.folder.path().join("broken");
    write_dataset(&dataset, 1, |session| if session == 7 { f32::NAN } else { 1.0 });
    let options = crate::EvaluateOptions {
        dedupe: Dedupe::Exact,
        threads: 1,
        checkpoint: None,
        device: None,
        collectives: Arc::new(crate::distributed::Alone),
        snapshot: None,
        partitions: None,
    };
    let error = crate::evaluate(&runs.folder.path().join("run"), &dataset, &options, &Silent).unwrap_err();
    let message =
        "the logit of `clicked` is NaN in sample 42 of the evaluation, counted from 0\n  hint: clean";
    assert!(error.to_string().starts_with(message), "{error}");

    // Early stopping does not use metrics of a model whose first step led to infinity.
    runs.config.evaluation.every_steps = Some(1);
    runs.config.optimizer.tables.learning_rate = f32::MAX;
    let error = runs.train("diverged", Existing::Refuse, Stop::new(), &Silent).unwrap_err();
    assert!(error.to_string().starts_with("the logit of `"), "{error}");
}

/// On a device, the host learns of the error after the step was enqueued.
#[test]
fn a_step_without_a_number_is_refused_alike_on_a_device() {
    let mut runs = Runs::new();
    fs_err::remove_dir_all(runs.folder.path().join("dataset")).unwrap();
    write_dataset(
        &runs.folder.path().join("dataset"),
        1,
        |session| if session == 7 { f32::NAN } else { 1.0 },
    );
    let errors = [None, Some(crate::device::tests::host::emulated())].map(|device| {
        runs.device = device;
        let error = runs.train("run", Existing::Refuse, Stop::new(), &Silent).unwrap_err();
        let batch = runs.read("run", "diverged/batch.arrow");
        fs_err::remove_dir_all(runs.folder.path().join("run")).unwrap();
        assert!(!batch.is_empty());
        error.to_string()
    });
    assert!(errors[0].contains("dense feature `age` is NaN in sample "), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn batches_that_preprocessing_empties_are_no_steps() {
    let mut runs = Runs::new();
    let steps = runs.folder.path().join("steps.toml");
    fs_err::write(&steps, "format_version = 1\n[[step]]\nop = \"sampling\"\nrate = 0.05\nseed = 2\n")
        .unwrap();
    runs.config.data.preprocess = Some(steps);
    let whole = runs.train("whole", Existing::Refuse, Stop::new(), &Silent).unwrap();
    assert!((1..14).contains(&whole.steps) && whole.figures.samples >= whole.steps, "{whole:?}");
    assert!(whole.figures.loss.unwrap().is_finite());
    // Sampling does not drop evaluation samples.
    assert_eq!(whole.eval.as_ref().unwrap().figures.samples, 130);
    // The fifth report is after a few steps.
    let stop = Stop::new();
    let reporter = StopAt { stop: stop.clone(), at: 5, reports: AtomicUsize::new(0) };
    assert_eq!(runs.train("run", Existing::Refuse, stop, &reporter).unwrap().ended, Ending::Stopped);
    runs.train("run", Existing::Resume, Stop::new(), &Silent).unwrap();
    assert_eq!(runs.read("run", "model.safetensors"), runs.read("whole", "model.safetensors"));
}

#[test]
fn a_run_moves_between_devices() {
    move_between_devices(&mut Runs::new());
}

/// The same with tables of every type, and with clipped gradients of table rows.
#[test]
fn a_run_with_narrow_tables_moves_between_devices() {
    let mut runs = Runs::new();
    runs.config.embedding.dtype = DataType::Bf16;
    for (feature, dtype) in [("history", DataType::Fp16), ("wished", DataType::Fp32)] {
        runs.config.tables.get_mut(feature).unwrap().dtype = Some(dtype);
    }
    runs.config.optimizer.tables.max_row_grad_norm = Some(0.01);
    move_between_devices(&mut runs);
    // The CPU exports the tables that the device wrote, each in its own type.
    let (run, out) = (runs.folder.path().join("device"), runs.folder.path().join("exported"));
    crate::export(&run, None, &out, false).unwrap();
    let file = fs_err::read(out.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let tensors = file.tensors();
    for (table, dtype) in
        [("read", Dtype::BF16), ("item", Dtype::BF16), ("history", Dtype::F16), ("wished", Dtype::F32)]
    {
        let name = format!("t_{table}.weight");
        let (_, weights) = tensors.iter().find(|(other, _)| other.ends_with(&name)).unwrap();
        assert_eq!(weights.dtype(), dtype, "{table}");
    }
}

fn move_between_devices(runs: &mut Runs) {
    let stopped = |runs: &Runs, run: &str| {
        let stop = Stop::new();
        let reporter = StopAt { stop: stop.clone(), at: 22, reports: AtomicUsize::new(0) };
        let first = runs.train(run, Existing::Refuse, stop, &reporter).unwrap();
        assert_eq!(first.ended, Ending::Stopped);
        assert!((6..13).contains(&first.steps), "{}", first.steps);
    };
    let resumed = |runs: &Runs, run: &str| runs.train(run, Existing::Resume, Stop::new(), &Silent).unwrap();
    let emulated = || Some(crate::device::tests::host::emulated());
    let whole = runs.train("cpu", Existing::Refuse, Stop::new(), &Silent).unwrap();
    stopped(runs, "from the cpu");
    runs.device = emulated();
    let device = runs.train("device", Existing::Refuse, Stop::new(), &Silent).unwrap();
    // Resumes the second half of a run that began on another device, whose tables are a base and the rows that
    // changed since.
    let from_cpu = resumed(runs, "from the cpu");
    stopped(runs, "from the device");
    runs.device = None;
    let from_device = resumed(runs, "from the device");
    let losses = |summary: &TrainSummary| summary.losses.clone().unwrap();
    assert_eq!(losses(&whole).len(), 14);
    for other in [&device, &from_cpu, &from_device] {
        assert_eq!(other.steps, 14);
        for (a, b) in losses(&whole).iter().zip(losses(other)) {
            assert!((a - b).abs() <= 1e-4 * a.abs(), "{a} {b}");
        }
    }
    // A run that is stopped and resumed on the device is bit-identical.
    runs.device = emulated();
    stopped(runs, "resumed");
    resumed(runs, "resumed");
    for file in ["metrics.jsonl", "model.safetensors"] {
        assert!(runs.read("resumed", file) == runs.read("device", file), "{file}");
    }
}
