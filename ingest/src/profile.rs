//! Measures the processor time of a build, by stage and by the parallel streams of a stage.
//!
//! After a profile was [started](start), each operator of the engine's plans and each task that the engine starts is
//! wrapped. Whenever a wrapper runs, the processor time of its thread is added to its stage, less the time of stages
//! within it. The threads that encode row groups are sampled from outside, 20 times a second.
//!
//! A build without a profile has no overhead.

mod page;

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::runtime::{JoinSetTracer, set_join_set_tracer};
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::execution::{RecordBatchStream, SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_plan::{
    ChildrenPropertiesMode, DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
    ReplaceChildrenOptions, displayable,
};
use futures::future::BoxFuture;
use futures::{FutureExt, Stream};
use onefold_base::process::{ThreadSeconds, cpu_seconds, threads_named};
use onefold_base::sync::locked;

/// The length of the intervals in which work is shown.
const INTERVAL: Duration = Duration::from_millis(10);
/// The interval at which the threads that encode row groups are sampled, and the beginning of their names.
const LOOK: Duration = Duration::from_millis(50);
const ENCODING_THREADS: &str = "onefold-write";
/// The largest number of characters in the description of an operator.
const MOST_DETAIL: usize = 300;

static RUNNING: RwLock<Option<Arc<Profile>>> = RwLock::new(None);

thread_local! {
    /// The processor time of nested stages within the current one, on this thread.
    static WITHIN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The current stage of this thread. Tasks that it starts belong to it.
    static AT_WORK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// A running profile, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Running(Arc<Profile>);

/// A profile of this process.
#[derive(Debug)]
struct Profile {
    began: Instant,
    began_seconds: f64,
    stages: Mutex<Vec<Stage>>,
}

/// The measurements of a stage.
#[derive(Debug, Clone, Default)]
struct Stage {
    name: String,
    detail: String,
    /// The processor time of each stream.
    streams: Vec<Duration>,
    /// The processor time per interval.
    intervals: Vec<Duration>,
}

/// Starts a profile of this process, which replaces a running one.
pub(crate) fn start() -> Running {
    let profile = Arc::new(Profile {
        began: Instant::now(),
        began_seconds: cpu_seconds().unwrap_or(0.0),
        stages: Mutex::default(),
    });
    // This fails if an earlier profile has set the tracer, which serves all profiles.
    let _ = set_join_set_tracer(&Tasks);
    *RUNNING.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&profile));
    let looked_at = Arc::downgrade(&profile);
    std::thread::spawn(move || look_at_threads(&looked_at));
    Running(profile)
}

impl Running {
    /// Returns the HTML page of the profile so far. `threads` is the number of threads of the build.
    pub(crate) fn page(&self, threads: usize) -> String {
        self.0.page(threads)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut running = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
        running.take_if(|profile| Arc::ptr_eq(profile, &self.0));
    }
}

/// Returns the running profile.
fn running() -> Option<Arc<Profile>> {
    RUNNING.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Wraps the operators of `plan` for measurement if a profile is running.
pub(crate) fn measured(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let Some(profile) = running() else { return Ok(plan) };
    plan.transform_up(|plan| {
        if plan.is::<MeasuredExec>() {
            return Ok(Transformed::no(plan));
        }
        let detail = displayable(plan.as_ref()).one_line().to_string();
        let stage = profile.stage(plan.name(), &detail);
        let measured = MeasuredExec { plan, profile: Arc::clone(&profile), stage };
        Ok(Transformed::yes(Arc::new(measured) as Arc<dyn ExecutionPlan>))
    })
    .data()
}

/// Runs `work` as the stage `name`, which includes the tasks that it starts.
pub(crate) fn stage<T>(name: &str, work: impl FnOnce() -> T) -> T {
    match running() {
        Some(profile) => {
            let stage = profile.stage_of_name(name);
            profile.measure(stage, 0, work)
        }
        None => work(),
    }
}

/// Runs the future `work`, and measures it as the stage `name` if a profile is running.
pub(crate) async fn staged<T>(name: &str, work: impl Future<Output = T>) -> T {
    let Some(profile) = running() else { return work.await };
    let (stage, mut work) = (profile.stage_of_name(name), std::pin::pin!(work));
    std::future::poll_fn(|context| profile.measure(stage, 0, || work.as_mut().poll(context))).await
}

impl Profile {
    fn stages(&self) -> MutexGuard<'_, Vec<Stage>> {
        locked(&self.stages)
    }

    /// Adds a stage, and returns its number.
    fn stage(&self, name: &str, detail: &str) -> usize {
        let mut stages = self.stages();
        let detail = detail.chars().take(MOST_DETAIL).collect();
        stages.push(Stage { name: name.to_owned(), detail, ..Stage::default() });
        stages.len() - 1
    }

    /// Returns the number of the stage with this name that has no operator; adds it if necessary.
    fn stage_of_name(&self, name: &str) -> usize {
        let known = self.stages().iter().position(|stage| stage.name == name && stage.detail.is_empty());
        known.unwrap_or_else(|| self.stage(name, ""))
    }

    /// Adds a stream to a stage, and returns its number; `None` if the stage belongs to an earlier profile.
    fn stream(&self, stage: usize) -> Option<usize> {
        let mut stages = self.stages();
        let streams = &mut stages.get_mut(stage)?.streams;
        streams.push(Duration::ZERO);
        Some(streams.len() - 1)
    }

    /// Runs and measures some work of a stream of a stage.
    fn measure<T>(&self, stage: usize, stream: usize, work: impl FnOnce() -> T) -> T {
        let (began, time) = (Instant::now(), ThreadTime::now());
        let (before, outer) = (WITHIN.replace(Duration::ZERO), AT_WORK.replace(Some(stage)));
        let done = work();
        let all = time.elapsed();
        AT_WORK.set(outer);
        let own = all.saturating_sub(WITHIN.replace(before + all));
        self.add((stage, stream), own, (began, Instant::now()));
        done
    }

    /// Adds processor time that was spent evenly between two moments.
    fn add(&self, (stage, stream): (usize, usize), time: Duration, (from, to): (Instant, Instant)) {
        let interval = |moment: Instant| {
            (moment.saturating_duration_since(self.began).as_nanos() / INTERVAL.as_nanos()) as usize
        };
        let (first, last) = (interval(from), interval(to));
        let Stage { streams, intervals, .. } = &mut self.stages()[stage];
        if streams.len() <= stream {
            streams.resize(stream + 1, Duration::ZERO);
        }
        streams[stream] += time;
        if intervals.len() <= last {
            intervals.resize(last + 1, Duration::ZERO);
        }
        let part = time / (last - first + 1) as u32;
        intervals[first..=last].iter_mut().for_each(|interval| *interval += part);
    }
}

/// Adds the work of the threads that encode row groups to a profile, until the profile is dropped.
fn look_at_threads(profile: &Weak<Profile>) {
    let Some(stage) = profile.upgrade().map(|profile| profile.stage("decode and encode row groups", ""))
    else {
        return;
    };
    let (mut known, mut looked) = (threads_named(ENCODING_THREADS), Instant::now());
    loop {
        std::thread::sleep(LOOK);
        let Some(profile) = profile.upgrade() else { return };
        let now = Instant::now();
        for ThreadSeconds { thread, seconds } in threads_named(ENCODING_THREADS) {
            let stream = match known.iter().position(|known| known.thread == thread) {
                Some(stream) => stream,
                None => {
                    known.push(ThreadSeconds { thread, seconds: 0.0 });
                    known.len() - 1
                }
            };
            let worked = (seconds - known[stream].seconds).max(0.0);
            known[stream].seconds = seconds;
            profile.add((stage, stream), Duration::from_secs_f64(worked), (looked, now));
        }
        looked = now;
    }
}

/// An operator whose partitions are measured.
#[derive(Debug)]
struct MeasuredExec {
    plan: Arc<dyn ExecutionPlan>,
    profile: Arc<Profile>,
    stage: usize,
}

impl DisplayAs for MeasuredExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.plan.fmt_as(format, f)
    }
}

impl ExecutionPlan for MeasuredExec {
    fn name(&self) -> &str {
        self.plan.name()
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.plan.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.plan.children()
    }

    fn apply_expressions(
        &self,
        visit: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.plan.apply_expressions(visit)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let all = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        let plan = Arc::clone(&self.plan).replace_children(children, all)?;
        Ok(Arc::new(Self { plan, profile: Arc::clone(&self.profile), stage: self.stage }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let rows = self.profile.measure(self.stage, partition, || self.plan.execute(partition, context))?;
        let profile = Arc::clone(&self.profile);
        Ok(Box::pin(MeasuredRows { rows, profile, place: (self.stage, partition) }))
    }
}

/// The rows of a partition.
struct MeasuredRows {
    rows: SendableRecordBatchStream,
    profile: Arc<Profile>,
    place: (usize, usize),
}

impl Stream for MeasuredRows {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { rows, profile, place: (stage, stream) } = &mut *self;
        profile.measure(*stage, *stream, || rows.as_mut().poll_next(context))
    }
}

impl RecordBatchStream for MeasuredRows {
    fn schema(&self) -> SchemaRef {
        self.rows.schema()
    }
}

/// Measures the tasks that the engine starts. Each task is a stream of the stage that started it.
struct Tasks;

impl Tasks {
    /// Returns the stage that is starting a task, and the number of the task's stream.
    fn place() -> Option<(Arc<Profile>, usize, usize)> {
        let (profile, stage) = (running()?, AT_WORK.get()?);
        let stream = profile.stream(stage)?;
        Some((profile, stage, stream))
    }
}

impl JoinSetTracer for Tasks {
    fn trace_future(
        &self,
        mut task: BoxFuture<'static, Box<dyn Any + Send>>,
    ) -> BoxFuture<'static, Box<dyn Any + Send>> {
        let Some((profile, stage, stream)) = Self::place() else { return task };
        std::future::poll_fn(move |context| profile.measure(stage, stream, || task.poll_unpin(context)))
            .boxed()
    }

    fn trace_block(
        &self,
        work: Box<dyn FnOnce() -> Box<dyn Any + Send> + Send>,
    ) -> Box<dyn FnOnce() -> Box<dyn Any + Send> + Send> {
        let Some((profile, stage, stream)) = Self::place() else { return work };
        Box::new(move || profile.measure(stage, stream, work))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_belongs_to_the_innermost_stage() {
        let (stages, began) = (Mutex::default(), Instant::now());
        let profile = Profile { began, began_seconds: 0.0, stages };
        let work = |milliseconds| {
            let time = ThreadTime::now();
            while time.elapsed() < Duration::from_millis(milliseconds) {}
        };
        let [outer, inner] = ["outer", "inner"].map(|name| profile.stage_of_name(name));
        profile.measure(outer, 0, || {
            work(20);
            profile.measure(inner, 3, || work(60));
            work(20);
        });
        assert_eq!(profile.stage_of_name("inner"), inner);
        let stages = profile.stages();
        let seconds =
            |stage: usize| stages[stage].streams.iter().map(Duration::as_secs_f64).collect::<Vec<_>>();
        assert!((seconds(outer)[0] - 0.04).abs() < 0.02, "{stages:?}");
        assert!(seconds(inner)[..3].iter().all(|none| *none == 0.0), "{stages:?}");
        assert!((seconds(inner)[3] - 0.06).abs() < 0.02, "{stages:?}");
        let shown: Duration = stages.iter().flat_map(|stage| &stage.intervals).sum();
        assert!((shown.as_secs_f64() - 0.1).abs() < 0.03, "{shown:?}");
    }
}
