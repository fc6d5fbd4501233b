//! The client of a cluster: sends a plan to the scheduler, waits for its job, and fetches the rows from the executors.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use ballista_core::BALLISTA_VERSION;
use ballista_core::config::BallistaConfig;
use ballista_core::extension::SessionConfigExt;
use ballista_core::serde::protobuf::execute_query_params::Query;
use ballista_core::serde::protobuf::execute_query_result::Result as Submitted;
use ballista_core::serde::protobuf::job_status::Status as JobStatus;
use ballista_core::serde::protobuf::scheduler_grpc_client::SchedulerGrpcClient;
use ballista_core::serde::protobuf::{
    CancelJobParams, ExecuteQueryParams, GetJobStatusParams, KeyValuePair, PartitionLocation,
};
use ballista_core::utils::{GrpcClientConfig, create_grpc_client_endpoint};
use ballista_core::version::{check_compatibility, insert_version_header, version_from_metadata};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::prelude::SessionConfig;
use datafusion_proto::physical_plan::AsExecutionPlan;
use datafusion_proto::protobuf::PhysicalPlanNode;
use onefold_base::address::Address;
use onefold_ingest::remote::Cluster;
use tonic::body::Body;
use tonic::codegen::{Body as _, Service, http};
use tonic::transport::Channel;

use crate::MESSAGE_BYTES;
use crate::codec::PlanCodec;
use crate::results::{Results, failure};
use crate::tls::Tls;

/// The first interval between two queries for the status of a job. It grows by half each time, up to [`LAST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(10);
/// The longest interval between two queries for the status of a job.
const LAST_WAIT: Duration = Duration::from_millis(250);
/// The time after which the client of an unfinished job first checks whether the scheduler has executors.
const FIRST_LOOK: Duration = Duration::from_secs(10);
/// The interval between further checks for executors.
const NEXT_LOOK: Duration = Duration::from_secs(30);
/// The number of times that a query runs at most, if executors are lost before the client has fetched its rows.
const MOST_RUNS: usize = 3;
/// The time limit for telling the scheduler to cancel a job.
const CANCEL_WAIT: Duration = Duration::from_secs(5);

type Scheduler = SchedulerGrpcClient<Channel>;

/// A client of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    scheduler: Address,
    partitions: usize,
    work_folder: PathBuf,
    tls: Option<Tls>,
    codec: Arc<PlanCodec>,
}

impl Client {
    pub(crate) fn new(scheduler: Address, partitions: usize, work_folder: PathBuf, tls: Option<Tls>) -> Self {
        Self { scheduler, partitions, work_folder, tls, codec: PlanCodec::new("client", None) }
    }

    async fn channel(&self) -> Result<Channel> {
        let failed = |error: &dyn std::fmt::Display| {
            failure(
                format!("the scheduler {} cannot be reached: {error}", self.scheduler),
                "check the address, and the certificates if it uses TLS; start one with `onefold-cluster scheduler`",
            )
        };
        let config = GrpcClientConfig::from(&BallistaConfig::default());
        let mut endpoint = create_grpc_client_endpoint(format!("http://{}", self.scheduler), Some(&config))
            .map_err(|error| failed(&error))?;
        if let Some(tls) = &self.tls {
            endpoint = tls.endpoints()(endpoint).map_err(|error| failed(&error))?;
        }
        endpoint.connect().await.map_err(|error| failed(&with_causes(&error)))
    }

    /// Sends the plan to the scheduler, and returns the id of its job.
    async fn submit(
        &self,
        scheduler: &mut Scheduler,
        plan: Arc<dyn ExecutionPlan>,
        config: &SessionConfig,
    ) -> Result<String> {
        let mut bytes = Vec::new();
        PhysicalPlanNode::try_from_physical_plan(plan, self.codec.as_ref())?.try_encode(&mut bytes)?;
        let config = settings(config.clone());
        let entries = config.options().entries().into_iter();
        let settings = entries.map(|entry| KeyValuePair { key: entry.key, value: entry.value }).collect();
        let query = ExecuteQueryParams {
            query: Some(Query::PhysicalPlan(bytes)),
            settings,
            session_id: onefold_storage::random_name(),
            operation_id: onefold_storage::random_name(),
        };
        let mut request = tonic::Request::new(query);
        insert_version_header(request.metadata_mut());
        let response = scheduler.execute_query(request).await.map_err(|status| self.refused(&status))?;
        check_compatibility(Some(BALLISTA_VERSION), version_from_metadata(response.metadata()))
            .map_err(|message| failure(message, "run the same version everywhere"))?;
        match response.into_inner().result {
            Some(Submitted::Success(job)) => Ok(job.job_id),
            Some(Submitted::Failure(error)) => Err(job_failure(&format!("{error:?}"))),
            None => Err(failure("the scheduler gave no answer".to_owned(), "run it again")),
        }
    }

    /// Waits until a job ends, and returns the locations of its rows. Logs a warning while the scheduler has no
    /// executors.
    async fn wait(
        &self,
        scheduler: &mut Scheduler,
        channel: &Channel,
        job: &str,
    ) -> Result<Vec<PartitionLocation>> {
        let mut wait = FIRST_WAIT;
        let mut look = Instant::now() + FIRST_LOOK;
        loop {
            let request = GetJobStatusParams { job_id: job.to_owned() };
            let status = scheduler.get_job_status(request).await.map_err(|status| self.refused(&status))?;
            match status.into_inner().status.and_then(|status| status.status) {
                Some(JobStatus::Successful(job)) => return Ok(job.partition_location),
                Some(JobStatus::Failed(job)) => return Err(job_failure(&job.error)),
                _ => tokio::time::sleep(wait).await,
            }
            wait = (wait * 3 / 2).min(LAST_WAIT);
            if Instant::now() >= look {
                look += NEXT_LOOK;
                if has_executors(channel).await == Some(false) {
                    tracing::warn!(
                        "no executor is connected to the scheduler {}; the build waits for one",
                        self.scheduler
                    );
                }
            }
        }
    }

    fn refused(&self, status: &tonic::Status) -> DataFusionError {
        let message = format!("the scheduler {} failed: {}", self.scheduler, status.message());
        failure(message, "see its log; nothing was committed, so run the command again when it is back")
    }
}

/// Returns a client of the scheduler behind a channel.
fn scheduler_at(channel: Channel) -> Scheduler {
    SchedulerGrpcClient::new(channel)
        .max_encoding_message_size(MESSAGE_BYTES as usize)
        .max_decoding_message_size(MESSAGE_BYTES as usize)
}

/// Returns whether a scheduler has executors, or `None` if it does not answer the question.
async fn has_executors(channel: &Channel) -> Option<bool> {
    let mut channel = channel.clone();
    std::future::poll_fn(|context| channel.poll_ready(context)).await.ok()?;
    let request = http::Request::get("/api/executors").body(Body::empty()).ok()?;
    let mut response = channel.call(request).await.ok()?;
    let mut list = Vec::new();
    while let Some(frame) =
        std::future::poll_fn(|context| Pin::new(response.body_mut()).poll_frame(context)).await
    {
        list.extend_from_slice(&frame.ok()?.into_data().unwrap_or_default());
    }
    match (response.status(), list.trim_ascii()) {
        (http::StatusCode::OK, b"[]") => Some(false),
        (http::StatusCode::OK, _) => Some(true),
        _ => None,
    }
}

/// Returns the session settings to send with a plan.
fn settings(config: SessionConfig) -> SessionConfig {
    config
        .upgrade_for_ballista()
        // The plans are made for Ballista's static planner. The adaptive planner does not know the operators of
        // `onefold-ingest`.
        .with_ballista_adaptive_query_planner(false)
        .with_ballista_grpc_client_max_message_size(MESSAGE_BYTES as usize)
}

#[async_trait]
impl Cluster for Client {
    fn partitions(&self) -> usize {
        self.partitions
    }

    fn work_folder(&self) -> &Path {
        &self.work_folder
    }

    async fn execute(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &SessionConfig,
    ) -> Result<SendableRecordBatchStream> {
        let schema = plan.schema();
        let channel = self.channel().await?;
        let mut scheduler = scheduler_at(channel.clone());
        let mut runs = 0;
        loop {
            let job = self.submit(&mut scheduler, Arc::clone(&plan), config).await?;
            let mut running = RunningJob { client: self.clone(), job: Some(job.clone()) };
            let locations = self.wait(&mut scheduler, &channel, &job).await?;
            running.job = None;
            runs += 1;
            match Results::connect(locations, self.tls.as_ref()).await {
                Ok(results) => return Ok(Box::pin(RecordBatchStreamAdapter::new(schema, results.rows()))),
                Err(lost) if runs == MOST_RUNS => return Err(lost.into()),
                Err(lost) => tracing::warn!("{lost}; the query runs again"),
            }
        }
    }
}

/// A guard that cancels a job when it is dropped.
struct RunningJob {
    client: Client,
    job: Option<String>,
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        let Some(job) = self.job.take() else { return };
        let client = self.client.clone();
        // The current runtime may be shutting down, so the request runs on a runtime of another thread.
        let cancel = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            let cancelled = runtime.block_on(tokio::time::timeout(CANCEL_WAIT, async {
                let request = CancelJobParams { job_id: job.clone() };
                let mut scheduler = scheduler_at(client.channel().await?);
                scheduler.cancel_job(request).await.map_err(|status| client.refused(&status))
            }));
            if !matches!(cancelled, Ok(Ok(_))) {
                tracing::warn!("job {job} could not be cancelled");
            }
        };
        let _ = std::thread::spawn(cancel).join();
    }
}

/// Returns an error and its causes in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Converts the error text of a job. Removes the wrapping of Ballista and DataFusion around the executor's own message
/// and hint, as far as it can be recognized.
fn job_failure(error: &str) -> DataFusionError {
    const HINT: &str = "\n  hint: ";
    let text = error.replace("\\n", "\n").replace("\\\"", "\"");
    let inner =
        text.rfind("External error: ").map_or(text.as_str(), |at| &text[at + "External error: ".len()..]);
    let (message, hint) = match inner.split_once(HINT) {
        Some((message, hint)) => (message, hint.lines().next().unwrap_or(hint)),
        None => (inner, "see the logs of the executors; nothing was committed"),
    };
    failure(format!("the cluster failed: {}", message.trim()), hint.trim_end_matches(['"', ')', ']', '}']))
}
