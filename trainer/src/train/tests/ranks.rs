//! Tests of training on ranks that are threads: the losses equal those of one rank, and all ranks end alike.

use std::path::PathBuf;
use std::time::Duration;

use onefold_sharding::{AnalyticCost, ShardingType, Table as Planned, TablePlan, Topology};

use serde_json::Value;

use super::*;
use crate::config::TableOptimizer;
use crate::distributed::threads;
use crate::trace::{Kind, Timeline};

/// A configuration with low learning rates, so that rounding errors do not grow.
const GENTLE: &str = r#"
format_version = 1
[data]
eval = ""
allow_overlap = true
streams = 12
[[tasks]]
label = "clicked"
[[tasks]]
label = "even"
weight = 0.5
[train]
batch_size = 24
epochs = 3
seed = 3
log_every_steps = 4
[evaluation]
every_steps = 6
segments = ["item"]
max_segments = 5
[checkpoint]
every_steps = 3
full_every = 2
[model]
bottom_mlp = [4]
top_mlp = [4, 2]
interaction = "dot"
[embedding]
dim = 4
rows = 50
evict_after = 4
[tables.history]
pooling = "attention"
[tables.read]
pooling = "encoder"
[tables.wished]
pooling = "din"
target = "item"
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.01
eps = 0.1
[optimizer.dense]
kind = "adagrad"
learning_rate = 0.01
eps = 0.1
max_grad_norm = 0.5
"#;

/// The division of a job's tables.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Division {
    Even,
    Rows,
    Columns,
    Replicas,
    Mixed,
}

struct Jobs {
    folder: tempfile::TempDir,
    config: TrainConfig,
}

/// The properties that differ between jobs.
#[derive(Clone)]
struct Job {
    ranks: u32,
    division: Division,
    dedupe: Dedupe,
    existing: Existing,
    /// The report at which the lowest rank raises a stop.
    stop_at: Option<usize>,
    on_device: bool,
    traced: Option<RangeInclusive<u64>>,
    /// The run whose model is trained further.
    warm_start: Option<&'static str>,
}

fn job(ranks: u32, division: Division, dedupe: Dedupe) -> Job {
    Job {
        ranks,
        division,
        dedupe,
        existing: Existing::Refuse,
        stop_at: None,
        on_device: false,
        traced: None,
        warm_start: None,
    }
}

fn options(collectives: Arc<dyn Collectives>) -> TrainOptions {
    TrainOptions {
        device: None,
        dedupe: Dedupe::Exact,
        threads: 1,
        snapshot: None,
        max_steps: None,
        plan: None,
        collectives,
        trace_steps: None,
        streams: None,
        existing: Existing::Refuse,
        checkpoints: None,
        warm_start: None,
        progressive: false,
        follow: None,
        memory_limit: None,
        stop: Stop::new(),
    }
}

impl Jobs {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_dataset(&folder.path().join("dataset"), 12, |session| (session % 5) as f32);
        Self { folder, config: TrainConfig::parse(Path::new("train.toml"), GENTLE).unwrap() }
    }

    /// Writes a plan with this division.
    fn plan(&self, ranks: u32, division: Division) -> Option<PathBuf> {
        if division == Division::Even {
            return None;
        }
        let features = ["history", "read", "wished", "item"].into_iter();
        let table_of = |feature| self.config.tables.get(feature).and_then(|own| own.table.as_deref());
        let mut names: Vec<&str> = features.map(|feature| table_of(feature).unwrap_or(feature)).collect();
        let mut known = std::collections::BTreeSet::new();
        names.retain(|name| known.insert(*name));
        let dim = |name: &str| self.config.tables.get(name).and_then(|own| own.dim).unwrap_or(4);
        let tables: Vec<Planned> = names.into_iter().map(|name| Planned::new(name, 50, dim(name))).collect();
        let of_table = |(number, table): (usize, &Planned)| {
            let kind = match division {
                Division::Mixed => {
                    [Division::Rows, Division::Columns, Division::Replicas, Division::Even][number]
                }
                other => other,
            };
            let rank = |shard: u64| ((number as u64 + shard) % u64::from(ranks)) as u32;
            let shard = |rank, rows, columns| onefold_sharding::Shard { rank, rows, columns };
            let mut plan = TablePlan::table_wise(table, rank(0));
            (plan.sharding_type, plan.shards) = match kind {
                Division::Rows => (
                    ShardingType::RowWise,
                    vec![
                        shard(rank(0), 0..7, 0..table.dim),
                        shard(rank(1), 7..30, 0..table.dim),
                        shard(rank(2), 30..50, 0..table.dim),
                    ],
                ),
                Division::Columns => (
                    ShardingType::ColumnWise,
                    vec![shard(rank(0), 0..50, 0..1), shard(rank(1), 0..50, 1..table.dim)],
                ),
                Division::Replicas => (
                    ShardingType::DataParallel,
                    (0..ranks).map(|rank| shard(rank, 0..50, 0..table.dim)).collect(),
                ),
                Division::Even | Division::Mixed => return plan,
            };
            plan
        };
        let placed = tables.iter().enumerate().map(of_table).collect();
        let topology = Topology::h100(ranks, 1 << 30).unwrap();
        let plan =
            Plan::predict("test", &tables, placed, &topology, &AnalyticCost, topology.global_batch_size(8))
                .unwrap();
        let path = self.folder.path().join(format!("{division:?}-{ranks}.json"));
        plan.store(&path).unwrap();
        Some(path)
    }

    /// Trains on threads; returns the results of all ranks.
    fn train(&self, run: &str, job: &Job) -> Vec<Result<TrainSummary>> {
        self.train_as(run, job, |_| self.config.clone())
    }

    fn train_as(
        &self,
        run: &str,
        job: &Job,
        config: impl Fn(u32) -> TrainConfig + Sync,
    ) -> Vec<Result<TrainSummary>> {
        let plan = self.plan(job.ranks, job.division);
        let train = |collectives: Arc<dyn Collectives>| {
            let stop = Stop::new();
            let at = if collectives.rank() == 0 { job.stop_at.unwrap_or(0) } else { 0 };
            let reporter = StopAt { stop: stop.clone(), at, reports: AtomicUsize::new(0) };
            let options = TrainOptions {
                device: job.on_device.then(crate::device::tests::host::emulated),
                dedupe: job.dedupe,
                plan: plan.clone(),
                existing: job.existing,
                trace_steps: job.traced.clone(),
                warm_start: job.warm_start.map(|run| WarmStart {
                    run: self.folder.path().join(run),
                    checkpoint: None,
                    new_partitions: false,
                }),
                stop,
                ..options(Arc::clone(&collectives))
            };
            let config = config(collectives.rank());
            let dataset = self.folder.path().join("dataset");
            let prepared = collectives.agree_on(|| Prepared::new(&config, &dataset, &options))?;
            prepared.train(&self.folder.path().join(run), &reporter)
        };
        let ranks = threads(job.ranks, Duration::from_secs(300));
        std::thread::scope(|scope| {
            let train = &train;
            let threads: Vec<_> =
                ranks.into_iter().map(|rank| scope.spawn(move || train(Arc::new(rank)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Returns the lines of a run's `metrics.jsonl`.
    fn metrics(&self, run: &str) -> Vec<Value> {
        let text = fs_err::read_to_string(self.folder.path().join(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the summary of a job that succeeds on all ranks.
    fn summary(&self, run: &str, job: &Job) -> TrainSummary {
        let mut summaries: Vec<_> = self.train(run, job).into_iter().map(|rank| rank.unwrap()).collect();
        for other in &summaries {
            let same = |summary: &TrainSummary| {
                (
                    summary.ended,
                    summary.losses.clone(),
                    summary.figures.ne,
                    summary.figures.auc,
                    summary.figures.samples,
                )
            };
            assert_eq!(same(other), same(&summaries[0]), "all ranks end alike");
            let figures =
                |summary: &TrainSummary| summary.eval.as_ref().map(crate::EvaluationSummary::without_times);
            let figures =
                [other, &summaries[0]].map(|summary| serde_json::to_value(figures(summary)).unwrap());
            assert_eq!(figures[0], figures[1], "figures are global");
        }
        summaries.swap_remove(0)
    }
}

fn losses(summary: &TrainSummary) -> Vec<f64> {
    summary.losses.clone().unwrap()
}

fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_within(1e-5, what, found, expected);
}

fn assert_within(most: f64, what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= most * b.abs(), "{what}, step {step}: {a} {b}");
    }
}

/// The forms of deduplication.
const DEDUPES: [Dedupe; 3] = [Dedupe::Off, Dedupe::Exact, Dedupe::Window];

/// The losses of steps and the metrics of evaluations equal those of one rank, for any division of the tables.
/// With row-wise Adagrad, each column shard has its own accumulators; in this case the reference has the same
/// shards.
#[test]
fn ranks_train_as_one_does() {
    let mut jobs = Jobs::new();
    let kinds =
        [TableOptimizer::Adagrad, TableOptimizer::Sgd, TableOptimizer::Adam, TableOptimizer::RowWiseAdagrad];
    let divisions = [Division::Even, Division::Rows, Division::Columns, Division::Replicas, Division::Mixed];
    for (place, kind) in kinds.into_iter().enumerate() {
        jobs.config.optimizer.tables.kind = kind;
        let references = DEDUPES.map(|dedupe| {
            let one = jobs.summary(&format!("{kind:?}-{dedupe:?}"), &job(1, Division::Even, dedupe));
            assert!(losses(&one)[17] < 0.98 * losses(&one)[0], "the loss falls: {:?}", one.losses);
            one
        });
        // Every optimizer meets every division and every form of deduplication; so does every division.
        for (number, division) in divisions.into_iter().enumerate() {
            let form = (number + place) % DEDUPES.len();
            let (dedupe, one) = (DEDUPES[form], &references[form]);
            let ranks = 2 + (number + form) as u32 % 3;
            let name = format!("{kind:?}-{dedupe:?}-{division:?}-{ranks}");
            let columns = matches!(division, Division::Columns | Division::Mixed);
            let reference = if columns && kind == TableOptimizer::RowWiseAdagrad {
                // With two ranks, the columns are divided as with any number of ranks.
                let of_two = jobs.summary(&format!("{name}-of-two"), &job(2, division, dedupe));
                assert_ne!(losses(&of_two), losses(one), "an accumulator a shard");
                of_two
            } else {
                one.clone()
            };
            let found = jobs.summary(&name, &job(ranks, division, dedupe));
            assert_near(&name, &losses(&found), &losses(&reference));
            let figures = |summary: &TrainSummary| {
                let eval = summary.eval.as_ref().unwrap();
                [eval.figures.loss, eval.figures.ne, eval.figures.calibration].map(Option::unwrap)
            };
            assert_near(&name, &figures(&found), &figures(&reference));
            assert_eq!(found.dedupe_factor, reference.dedupe_factor, "{name}");
            assert_eq!(found.eval.unwrap().segments["item"].len(), 6, "five ids and the others");
        }
    }
}

/// The same on devices, one per rank: the losses equal those of ranks in main memory, and repeated jobs are
/// bit-identical.
#[test]
fn ranks_on_devices_train_as_those_in_memory() {
    let mut jobs = Jobs::new();
    let kinds =
        [TableOptimizer::Adagrad, TableOptimizer::Sgd, TableOptimizer::Adam, TableOptimizer::RowWiseAdagrad];
    let divisions = [Division::Mixed, Division::Rows, Division::Columns, Division::Replicas, Division::Even];
    let wires = [DataType::Fp32, DataType::Bf16, DataType::Fp16];
    for (number, division) in divisions.into_iter().enumerate() {
        // All forms of deduplication and numbers of ranks are tested with the first division, which has every kind of
        // shard, and one form with each other division.
        let forms =
            if number == 0 { 0..DEDUPES.len() } else { number % DEDUPES.len()..number % DEDUPES.len() + 1 };
        for form in forms {
            jobs.config.optimizer.tables.kind = kinds[(number + form) % kinds.len()];
            jobs.config.exchange.dtype = wires[if number == 0 { form } else { 0 }];
            let memory = job(2 + (number + form) as u32 % 3, division, DEDUPES[form]);
            let device = Job { on_device: true, ..memory.clone() };
            let name = format!("{division:?}-{form}");
            let expected = jobs.summary(&name, &memory);
            let found = jobs.summary(&format!("{name}-device"), &device);
            assert_near(&name, &losses(&found), &losses(&expected));
            assert_eq!(found.sent_bytes, expected.sent_bytes, "{name}");
            let again = jobs.summary(&format!("{name}-again"), &device);
            assert_eq!(losses(&again), losses(&found), "{name}");
        }
    }
    // Several features share a table.
    for (feature, table) in [("wished", "items"), ("item", "items"), ("history", "read"), ("read", "read")] {
        jobs.config.tables.entry(feature.to_owned()).or_default().table = Some(table.to_owned());
    }
    for (number, division) in divisions.into_iter().enumerate() {
        let memory = job(2 + number as u32 % 3, division, DEDUPES[number % DEDUPES.len()]);
        let device = Job { on_device: true, ..memory.clone() };
        let name = format!("{division:?}-shared");
        let expected = jobs.summary(&name, &memory);
        let found = jobs.summary(&format!("{name}-device"), &device);
        assert_near(&name, &losses(&found), &losses(&expected));
        assert_eq!(found.sent_bytes, expected.sent_bytes, "{name}");
    }
}

/// A job begins on devices and resumes in main memory, and vice versa, with different ranks and another plan.
#[test]
fn jobs_move_between_devices_and_memory() {
    let mut jobs = Jobs::new();
    jobs.config.optimizer.tables.kind = TableOptimizer::Adagrad;
    let whole = jobs.summary("whole", &job(2, Division::Mixed, Dedupe::Exact));
    let turns = [
        (2, Division::Mixed, true),
        (3, Division::Rows, false),
        (4, Division::Columns, true),
        (2, Division::Replicas, true),
        (1, Division::Even, false),
    ];
    for (turn, (ranks, division, on_device)) in turns.into_iter().enumerate() {
        let existing = if turn == 0 { Existing::Refuse } else { Existing::Resume };
        let last = turn + 1 == turns.len();
        let stop_at = (!last).then_some(5);
        let job = Job { existing, stop_at, on_device, ..job(ranks, division, Dedupe::Exact) };
        let summary = jobs.summary("moving", &job);
        assert_eq!(summary.ended, if last { Ending::Completed } else { Ending::Stopped }, "turn {turn}");
        let losses = losses(&summary);
        assert_near("moving", &losses, &self::losses(&whole)[..losses.len()]);
    }
}

/// Training with shared tables: a sequence and its target share one table, two sequences share another one.
/// Jobs are resumed with any number of ranks, evaluated and exported.
#[test]
fn ranks_share_tables() {
    let mut jobs = Jobs::new();
    for (feature, table) in [("wished", "items"), ("item", "items"), ("history", "read"), ("read", "read")] {
        jobs.config.tables.entry(feature.to_owned()).or_default().table = Some(table.to_owned());
    }
    jobs.config.optimizer.tables.max_row_grad_norm = Some(0.01);
    for (number, kind) in [TableOptimizer::Adagrad, TableOptimizer::RowWiseAdagrad].into_iter().enumerate() {
        jobs.config.optimizer.tables.kind = kind;
        // Columns are not tested, because the gradient of a column shard is shorter than that of its table.
        let divisions: &[Division] = &[Division::Even, Division::Rows, Division::Replicas];
        for (form, dedupe) in DEDUPES.into_iter().enumerate() {
            let one = jobs.summary(&format!("{kind:?}-{form}"), &job(1, Division::Even, dedupe));
            assert_eq!(one.parameters.embedding, 2 * 50 * 4);
            assert!(losses(&one)[17] < 0.98 * losses(&one)[0], "the loss falls: {:?}", one.losses);
            let division = divisions[(number + form) % divisions.len()];
            let ranks = 2 + (number + form) as u32 % 3;
            let name = format!("{kind:?}-{form}-{division:?}-{ranks}");
            let found = jobs.summary(&name, &job(ranks, division, dedupe));
            assert_near(&name, &losses(&found), &losses(&one));
        }
    }
    jobs.config.optimizer.tables.kind = TableOptimizer::Adagrad;
    jobs.config.optimizer.tables.max_row_grad_norm = None;
    let whole = jobs.summary("whole", &job(1, Division::Even, Dedupe::Exact));
    let turns = [(3, Division::Columns), (4, Division::Mixed), (1, Division::Even), (2, Division::Replicas)];
    for (turn, (ranks, division)) in turns.into_iter().enumerate() {
        let existing = if turn == 0 { Existing::Refuse } else { Existing::Resume };
        let stop_at = (turn < 3).then_some(6);
        let summary =
            jobs.summary("moving", &Job { existing, stop_at, ..job(ranks, division, Dedupe::Exact) });
        let losses = losses(&summary);
        assert_near("moving", &losses, &self::losses(&whole)[..losses.len()]);
        assert_eq!(summary.ended, if turn < 3 { Ending::Stopped } else { Ending::Completed });
    }
}

/// Returns jobs of a model with narrow tables, whose pooled vectors are projected.
fn with_narrow_tables() -> Jobs {
    let text = GENTLE.replace("pooling = \"encoder\"", "pooling = \"mean\"\ndim = 3").replace(
        "pooling = \"din\"\ntarget = \"item\"\n",
        "dim = 2\n[tables.item]\ndim = 3\npooling = \"mean\"\n",
    );
    let mut config = TrainConfig::parse(Path::new("train.toml"), &text).unwrap();
    config.optimizer.tables.kind = TableOptimizer::Adagrad;
    Jobs { config, ..Jobs::new() }
}

/// Training with narrow tables: with any division, the losses equal those of one rank, also of jobs that are resumed with
/// other ranks, and ranks send fewer bytes than for wide tables, and half as many in messages of 16-bit floats.
#[test]
fn ranks_train_narrow_tables() {
    let mut jobs = with_narrow_tables();
    let whole = jobs.summary("whole", &job(1, Division::Even, Dedupe::Exact));
    assert_eq!(whole.parameters.embedding, 50 * (4 + 3 + 2 + 3));
    let divisions = [Division::Rows, Division::Columns, Division::Replicas, Division::Mixed];
    let sent = divisions.map(|division| {
        let found = jobs.summary(&format!("{division:?}"), &job(3, division, Dedupe::Exact));
        assert_near(&format!("{division:?}"), &losses(&found), &losses(&whole));
        found.sent_bytes
    });
    let turns = [(3, Division::Columns), (4, Division::Mixed), (1, Division::Even), (2, Division::Replicas)];
    for (turn, (ranks, division)) in turns.into_iter().enumerate() {
        let existing = if turn == 0 { Existing::Refuse } else { Existing::Resume };
        let stop_at = (turn < 3).then_some(6);
        let summary =
            jobs.summary("moving", &Job { existing, stop_at, ..job(ranks, division, Dedupe::Exact) });
        let losses = losses(&summary);
        assert_near("moving", &losses, &self::losses(&whole)[..losses.len()]);
        assert_eq!(summary.ended, if turn < 3 { Ending::Stopped } else { Ending::Completed });
    }
    let [.., mixed] = sent;
    for (dtype, most) in [(DataType::Bf16, 1e-2), (DataType::Fp16, 1e-3)] {
        jobs.config.exchange.dtype = dtype;
        let found = jobs.summary(&format!("{dtype:?}"), &job(3, Division::Mixed, Dedupe::Exact));
        assert_within(most, &format!("{dtype:?}"), &losses(&found), &losses(&whole));
        let halves = found.sent_bytes;
        assert_eq!((2 * halves.answers, 2 * halves.gradients), (mixed.answers, mixed.gradients), "{dtype:?}");
    }
    jobs.config.exchange.dtype = DataType::Fp32;
    let on_device = Job { on_device: true, ..job(1, Division::Even, Dedupe::Exact) };
    let error = jobs.train("device", &on_device).remove(0).unwrap_err().to_string();
    assert!(error.contains("`[tables.read].dim` is 3, and on a GPU all tables need"), "{error}");
    jobs.config.tables.values_mut().for_each(|own| own.dim = None);
    for (division, narrow) in divisions.into_iter().zip(sent) {
        let wide = jobs.summary(&format!("{division:?}-wide"), &job(3, division, Dedupe::Exact)).sent_bytes;
        assert_eq!(narrow.requests, wide.requests, "{division:?}");
        assert!(narrow.gradients < wide.gradients, "{division:?}: {narrow:?} {wide:?}");
        assert!(narrow.answers < wide.answers || wide.answers == 0, "{division:?}: {narrow:?} {wide:?}");
    }
}

/// A model with narrow tables is trained further, also by other ranks with another plan, as if its training had not ended.
/// With other tables it is not, and the message names what differs.
#[test]
fn narrow_tables_are_trained_further() {
    let mut jobs = with_narrow_tables();
    jobs.config.embedding.evict_after = None;
    jobs.summary("first", &job(3, Division::Rows, Dedupe::Exact));
    let warm = |ranks, division| Job { warm_start: Some("first"), ..job(ranks, division, Dedupe::Exact) };
    let further = [(1, Division::Even), (3, Division::Columns)]
        .map(|(ranks, division)| losses(&jobs.summary(&format!("further-{ranks}"), &warm(ranks, division))));
    let refused = |change: &dyn Fn(&mut TrainConfig)| {
        let mut config = jobs.config.clone();
        change(&mut config);
        let mut ranks = jobs.train_as("refused", &warm(1, Division::Even), |_| config.clone());
        ranks.remove(0).unwrap_err().to_string()
    };
    let own = "its table for `item` has 50 rows of 3 values, checked ids";
    let error = refused(&|config| config.tables.get_mut("item").unwrap().dim = None);
    let expected = format!("{own}, and `train.toml` asks for 50 rows of 4 values, checked ids\n");
    assert!(error.contains(&expected), "{error}");
    let error = refused(&|config| config.tables.get_mut("item").unwrap().dtype = Some(DataType::Bf16));
    assert!(error.contains(&format!("{own}, weights of type fp32, and `train.toml`")), "{error}");
    assert!(error.contains(" checked ids, weights of type bf16\n"), "{error}");
    let error = refused(&|config| config.tables.get_mut("item").unwrap().pooling = None);
    assert!(error.contains(", pooling by mean, ") && error.contains(", pooling by sum\n"), "{error}");
    let error = refused(&|config| config.tables.get_mut("item").unwrap().table = Some("things".to_owned()));
    assert!(error.contains(", the name `item`, ") && error.contains(", the name `things`\n"), "{error}");

    jobs.config.train.epochs *= 2;
    let whole = losses(&jobs.summary("whole", &job(1, Division::Even, Dedupe::Exact)));
    for losses in further {
        assert_near("further", &losses, &whole[whole.len() - losses.len()..]);
    }
}

/// A job that is stopped repeatedly and resumed with different numbers of ranks and plans has the losses of an
/// uninterrupted job; with the same ranks and plan it is bit-identical.
#[test]
fn jobs_are_resumed_by_any_ranks_and_plan() {
    let jobs = Jobs::new();
    for division in [Division::Mixed, Division::Rows] {
        // With Adagrad, accumulators do not depend on the division of a table.
        let mut jobs = Jobs { config: jobs.config.clone(), ..Jobs::new() };
        jobs.config.optimizer.tables.kind = TableOptimizer::Adagrad;
        let whole = jobs.summary("whole", &job(2, division, Dedupe::Exact));
        let same = Job { stop_at: Some(8), ..job(2, division, Dedupe::Exact) };
        assert_eq!(jobs.summary("same", &same).ended, Ending::Stopped);
        let same = jobs.summary("same", &Job { existing: Existing::Resume, stop_at: None, ..same });
        assert_eq!(losses(&same), losses(&whole), "the same bits");
        let read = |run: &str, file: &str| fs_err::read(jobs.folder.path().join(run).join(file)).unwrap();
        assert!(read("same", "model.safetensors") == read("whole", "model.safetensors"));
        let without_times = |run: &str| -> Vec<Value> {
            let mut lines = jobs.metrics(run);
            lines.iter_mut().for_each(|line| drop(line.as_object_mut().unwrap().remove("ranks")));
            lines
        };
        assert_eq!(without_times("same"), without_times("whole"));
        let turns = [(3, Division::Even), (4, Division::Columns), (1, Division::Even), (2, division)];
        for (turn, (ranks, division)) in turns.into_iter().enumerate() {
            let existing = if turn == 0 { Existing::Refuse } else { Existing::Resume };
            let stop_at = (turn < 3).then_some(6);
            let job = Job { existing, stop_at, ..job(ranks, division, Dedupe::Exact) };
            let summary = jobs.summary("moving", &job);
            let expected = if turn < 3 { Ending::Stopped } else { Ending::Completed };
            assert_eq!(summary.ended, expected, "turn {turn}");
            let losses = losses(&summary);
            assert_near("moving", &losses, &self::losses(&whole)[..losses.len()]);
        }
    }
}

/// Tests ranks whose datasets, snapshots or options differ from those of rank 0, and evaluations of different
/// runs.
fn refuses_others_options(jobs: &Jobs) {
    let path = |name: &str| jobs.folder.path().join(name);
    write_dataset(&path("other"), 12, |session| (session % 3) as f32);
    jobs.summary("a", &job(1, Division::Even, Dedupe::Exact));
    let mut other = jobs.config.clone();
    other.train.seed += 1;
    let summaries = jobs.train_as("b", &job(1, Division::Even, Dedupe::Exact), |_| other.clone());
    assert!(summaries[0].is_ok());
    let train = |options: TrainOptions, dataset: &str, run: &str| {
        let prepared =
            options.collectives.agree_on(|| Prepared::new(&jobs.config, &path(dataset), &options))?;
        prepared.train(&path(run), &Silent).map(drop)
    };
    let eval = |collectives: Arc<dyn Collectives>, dedupe: Dedupe, dataset: &str, run: &str| {
        let options = crate::EvaluateOptions {
            dedupe,
            threads: 1,
            checkpoint: None,
            device: None,
            collectives,
            snapshot: None,
            partitions: None,
        };
        crate::evaluate(&path(run), &path(dataset), &options, &Silent).map(drop)
    };
    let form = |other: bool| if other { Dedupe::Window } else { Dedupe::Exact };
    /// The action of a rank, given whether it is the rank that differs.
    type Rank<'a> = &'a (dyn Fn(Arc<dyn Collectives>, bool) -> Result<()> + Sync);
    let cases: [(&str, Rank<'_>); 8] = [
        ("the dataset", &|ranks, other| {
            train(options(ranks), if other { "other" } else { "dataset" }, "new")
        }),
        ("the option `out`", &|ranks, other| {
            train(options(ranks), "dataset", if other { "else" } else { "new" })
        }),
        ("the option `existing = resume`", &|ranks, other| {
            let existing = if other { Existing::Resume } else { Existing::Refuse };
            train(TrainOptions { existing, ..options(ranks) }, "dataset", "new")
        }),
        ("the option `checkpoints`", &|ranks, other| {
            train(
                TrainOptions { checkpoints: other.then(|| path("there")), ..options(ranks) },
                "dataset",
                "new",
            )
        }),
        ("the option `dedupe`", &|ranks, other| {
            train(TrainOptions { dedupe: form(other), ..options(ranks) }, "dataset", "new")
        }),
        ("the option `dedupe`", &|ranks, other| eval(ranks, form(other), "dataset", "a")),
        ("the run", &|ranks, other| eval(ranks, form(false), "dataset", if other { "b" } else { "a" })),
        ("the dataset", &|ranks, other| {
            eval(ranks, form(false), if other { "other" } else { "dataset" }, "a")
        }),
    ];
    for (what, work) in cases {
        let ranks = threads(3, Duration::from_secs(300));
        let errors: Vec<Error> = std::thread::scope(|scope| {
            let threads: Vec<_> = (ranks.into_iter().zip([false, false, true]))
                .map(|(rank, other)| scope.spawn(move || work(Arc::new(rank), other).unwrap_err()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let expected = format!("rank 2 differs from rank 0 in {what}\n  hint: start all ranks with the same");
        assert!(errors[0].to_string().starts_with(&expected), "{errors:?}");
        assert!(
            errors[1..].iter().all(|error| matches!(error, Error::ReportedElsewhere { rank: 0, .. })),
            "{errors:?}"
        );
        assert!(["new", "else", "there"].iter().all(|name| !path(name).exists()), "{what}");
    }
}

#[test]
fn ranks_that_do_not_belong_together_are_refused() {
    let jobs = Jobs::new();
    let other = |rank: u32| {
        let mut config = jobs.config.clone();
        config.optimizer.dense.learning_rate *= f64::from(rank % 2 + 1);
        config
    };
    let results = jobs.train_as("run", &job(3, Division::Even, Dedupe::Exact), other);
    let errors: Vec<Error> = results.into_iter().map(Result::unwrap_err).collect();
    assert_eq!(
        errors[0].to_string(),
        "rank 1 differs from rank 0 in the configuration\n  hint: start all ranks with the same program, files and options"
    );
    assert!(errors[1..].iter().all(|error| matches!(error, Error::ReportedElsewhere { rank: 0, .. })));
    assert!(!jobs.folder.path().join("run").exists());
    refuses_others_options(&jobs);

    let four = jobs.plan(4, Division::Mixed).unwrap();
    fs_err::rename(four, jobs.folder.path().join("Mixed-2.json")).unwrap();
    let plan = jobs.folder.path().join("Mixed-2.json");
    let [collectives, other]: [_; 2] = threads(2, Duration::from_secs(300)).try_into().unwrap();
    drop(other);
    let options = TrainOptions { plan: Some(plan), ..options(Arc::new(collectives)) };
    let error = Prepared::new(&jobs.config, &jobs.folder.path().join("dataset"), &options).unwrap_err();
    let expected = "the plan is for 4 ranks, and the job has 2 ranks\n  hint: make a plan for 2 ranks, with the topology";
    assert!(error.to_string().contains(expected), "{error}");
}

/// Ranks have different clocks, but write checkpoints by time after the same steps.
#[test]
fn ranks_agree_on_checkpoints_by_time() {
    let mut jobs = Jobs::new();
    jobs.config.checkpoint = CheckpointConfig { every_minutes: f64::MIN_POSITIVE, ..Default::default() };
    let results = jobs.train("run", &job(2, Division::Even, Dedupe::Exact));
    let checkpoints: Vec<_> = results.into_iter().map(|rank| rank.unwrap().checkpoints).collect();
    assert!(checkpoints[0] > 12 && checkpoints[0] == checkpoints[1], "{checkpoints:?}");
}

/// Every file of a checkpoint is verified by one rank. If it is damaged, that rank reports it, and all ranks
/// end.
#[test]
fn ranks_divide_the_files_that_they_verify() {
    let mut jobs = Jobs::new();
    jobs.config.checkpoint.full_every = 100;
    let stopped = Job { stop_at: Some(8), ..job(3, Division::Mixed, Dedupe::Exact) };
    assert_eq!(jobs.summary("run", &stopped).ended, Ending::Stopped);
    let resumed = Job { existing: Existing::Resume, stop_at: None, ..stopped };
    let folder = jobs.folder.path().join("run/checkpoints");
    let mut names: Vec<_> = fs_err::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let described = |path: &Path| -> Value {
        serde_json::from_slice(&fs_err::read(path.join("checkpoint.json")).unwrap()).unwrap()
    };
    let files = |path: &Path| -> Vec<PathBuf> {
        let file = described(path);
        let folder = path.join(file["attempt"].as_str().unwrap());
        file["files"].as_object().unwrap().keys().map(|name| folder.join(name)).collect()
    };
    let newest = names.last().unwrap();
    let base = folder.join(described(newest)["base"].as_str().unwrap());
    let all = [files(newest), files(&base)].concat();
    assert_eq!(all.len(), 10, "two of rank 0, and one of each of three ranks, twice");
    for (number, file) in all.iter().enumerate() {
        let whole = fs_err::read(file).unwrap();
        let mut damaged = whole.clone();
        *damaged.last_mut().unwrap() ^= 1;
        fs_err::write(file, damaged).unwrap();
        let results = jobs.train("run", &resumed);
        fs_err::write(file, whole).unwrap();
        let errors: Vec<Error> = results.into_iter().map(Result::unwrap_err).collect();
        let speaker = number % 3;
        let message = errors[speaker].to_string();
        assert!(message.contains(&*file.to_string_lossy()) && message.contains("checksum"), "{errors:?}");
        let follow = |(rank, error): (usize, &Error)| {
            rank == speaker
                || matches!(error, Error::ReportedElsewhere { rank, .. } if *rank as usize == speaker)
        };
        assert!(errors.iter().enumerate().all(follow), "{errors:?}");
    }
    assert_eq!(jobs.summary("run", &resumed).ended, Ending::Completed);
}

/// An error on one rank ends all ranks, and that rank reports it.
#[test]
fn an_error_of_one_rank_ends_all() {
    let mut jobs = Jobs::new();
    // `item` has ids up to 12; the table has too few rows for some ranks' batches only.
    let text = GENTLE.replace("[tables.history]", "[tables.item]\nrows = 12\n[tables.history]");
    jobs.config = TrainConfig::parse(Path::new("train.toml"), &text).unwrap();
    jobs.config.data.preprocess = None;
    let results = jobs.train("run", &job(3, Division::Even, Dedupe::Exact));
    let errors: Vec<Error> = results.into_iter().map(Result::unwrap_err).collect();
    let own = errors.iter().filter(|error| !matches!(error, Error::ReportedElsewhere { .. }));
    assert_eq!(own.count(), 1, "{errors:?}");
}

/// A loss that is not finite on one rank ends all ranks before anything is updated.
#[test]
fn a_loss_that_is_no_number_ends_all() {
    [false, true].into_iter().for_each(a_loss_that_is_no_number_ends_all_on);
}

fn a_loss_that_is_no_number_ends_all_on(on_device: bool) {
    let jobs = Jobs::new();
    write_dataset(
        &jobs.folder.path().join("broken"),
        12,
        |session| if session == 7 { f32::NAN } else { 1.0 },
    );
    fs_err::rename(jobs.folder.path().join("dataset"), jobs.folder.path().join("sound")).unwrap();
    fs_err::rename(jobs.folder.path().join("broken"), jobs.folder.path().join("dataset")).unwrap();
    let results = jobs.train("run", &Job { on_device, ..job(4, Division::Even, Dedupe::Exact) });
    let errors: Vec<Error> = results.into_iter().map(Result::unwrap_err).collect();
    // Session 7 is in bucket 7, which rank 3 of 4 reads.
    assert!(errors[3].to_string().starts_with("the loss is NaN at step 1: "), "{errors:?}");
    assert!(
        errors[..3].iter().all(|error| matches!(error, Error::ReportedElsewhere { rank: 3, .. })),
        "{errors:?}"
    );
    assert!(jobs.folder.path().join("run/diverged/batch.arrow").is_file());
}

/// A new model predicts the means of its labels, bit-identical for any number of ranks.
#[test]
fn a_new_model_begins_at_the_means_of_its_labels() {
    let mut jobs = Jobs::new();
    let [one, three] = [1, 3].map(|ranks| {
        let name = format!("of-{ranks}");
        jobs.summary(&name, &job(ranks, Division::Even, Dedupe::Exact));
        Run::load(&jobs.folder.path().join(name)).unwrap()
    });
    let bias = one.output_bias.clone().unwrap();
    let item = |i: usize| i * 7 % 13;
    for (logit, divisor) in bias.iter().zip([3, 2]) {
        let mean = (0..130).filter(|&i| item(i) % divisor == 0).count() as f64 / 130.0;
        let found = 1.0 / (1.0 + f64::from(-logit).exp());
        assert!((found - mean).abs() < 1e-6, "{found}, not {mean}");
    }
    assert_eq!(bias.len(), 2);
    assert_eq!(three.output_bias, one.output_bias);
    let output_bias = |run: &Run| {
        let model = run.initial_model(&Placement::alone(&run.tables), 1, None).unwrap();
        crate::tensors::to_vec(&model.named_dense_parameters()["top.1.bias"])
    };
    assert_eq!(output_bias(&one), bias);
    // With `uniform`, the bias is that of PyTorch's linear layer.
    jobs.config.model.output_bias_init = BiasInit::Uniform;
    jobs.summary("uniform", &job(1, Division::Even, Dedupe::Exact));
    let run = Run::load(&jobs.folder.path().join("uniform")).unwrap();
    assert_eq!(run.output_bias, None);
    // The layer has four inputs, so the range is ±1/√4.
    let drawn = output_bias(&run);
    assert!(drawn != bias && drawn.iter().all(|bias| bias.abs() <= 0.5), "{drawn:?}");
}

/// Every rank writes a timeline of the traced steps, and the log compares the ranks.
#[test]
fn ranks_are_watched() {
    let jobs = Jobs::new();
    let traced = Job { traced: Some(3..=5), ..job(2, Division::Columns, Dedupe::Exact) };
    let summary = jobs.summary("run", &traced);
    let timeline = Timeline::load(&jobs.folder.path().join("run")).unwrap();
    let places: Vec<_> = timeline.steps.iter().map(|step| (step.step, step.rank)).collect();
    assert_eq!((timeline.ranks, places), (2, vec![(3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]));
    let dense = 4 * summary.parameters.dense;
    for step in &timeline.steps {
        // Spans leave out times of less than a microsecond.
        let sum: f64 = step.times_ms().iter().sum();
        assert!(sum <= step.length_micros as f64 / 1e3 + 1e-9, "{step:?}");
        assert!(step.spans.iter().any(|span| span.name.kind() == Kind::Compute), "{step:?}");
        let sent = step.sent_bytes;
        assert!(sent.requests > 0 && sent.answers > 0 && sent.gradients > 0, "{step:?}");
        // With two ranks, an all-reduce sends all bytes once.
        assert_eq!(sent.dense, dense);
    }
    assert!(timeline.html("run").contains("rank 1, step 5"));

    let windows: Vec<Value> =
        jobs.metrics("run").into_iter().filter(|line| line["train"].is_object()).collect();
    assert_eq!(windows.len() as u64, summary.steps / 4);
    for line in &windows {
        let ranks = &line["ranks"];
        for kind in ["waiting_ms", "exchange_ms", "compute_ms", "all_reduce_ms"] {
            let (mean, max) = (ranks[kind]["mean"].as_f64().unwrap(), ranks[kind]["max"].as_f64().unwrap());
            assert!(0.0 <= mean && mean <= max, "{line}");
            assert!(ranks[kind]["max_rank"].as_u64().unwrap() < 2, "{line}");
        }
        assert!(ranks["compute_ms"]["mean"].as_f64().unwrap() > 0.0, "{line}");
        assert_eq!(ranks["sent_bytes"]["dense"], 2 * dense);
        assert!(ranks["sent_bytes"]["answers"].as_u64().unwrap() > 0, "{line}");
    }
    assert_eq!(summary.sent_bytes.dense, 2 * dense * summary.steps);
    let totals = summary.rank_times.unwrap();
    let in_windows: f64 =
        windows.iter().map(|line| line["ranks"]["compute_ms"]["mean"].as_f64().unwrap()).sum();
    assert!(totals.compute_ms.mean >= 4.0 * in_windows * (1.0 - 1e-9), "windows are of four steps");

    // A single rank does not wait for others: its log has no times of ranks, and it writes a timeline only on
    // request.
    let alone = jobs.summary("alone", &job(1, Division::Even, Dedupe::Exact));
    assert!(alone.rank_times.is_none());
    assert!(jobs.metrics("alone").iter().all(|line| line.get("ranks").is_none()));
    assert!(!jobs.folder.path().join("alone/timeline").exists());
    let error = Timeline::load(&jobs.folder.path().join("alone")).unwrap_err().to_string();
    assert!(error.contains("the run has no timeline") && error.contains("--trace-steps"), "{error}");
    jobs.summary("traced", &Job { traced: Some(2..=2), ..job(1, Division::Even, Dedupe::Exact) });
    assert_eq!(Timeline::load(&jobs.folder.path().join("traced")).unwrap().steps.len(), 1);
}
