//! The rows of a finished job. Executors keep them until a client fetches them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ballista_core::client::BallistaClient;
use ballista_core::config::BallistaConfig;
use ballista_core::error::BallistaError;
use ballista_core::extension::{BallistaConfigGrpcEndpoint, EndpointOverrideFn};
use ballista_core::serde::protobuf::{ExecutorMetadata, PartitionId, PartitionLocation};
use ballista_core::utils::GrpcClientConfig;
use datafusion::arrow::array::RecordBatch;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use futures::{Stream, StreamExt, TryStreamExt};

use crate::MESSAGE_BYTES;
use crate::tls::Tls;

/// The number of executors that the client connects to at the same time.
const CONNECTING: usize = 32;
/// The time after which an executor that does not answer counts as lost.
const CONNECT_WAIT: Duration = Duration::from_secs(20);

/// The rows of a job.
pub(crate) struct Results {
    /// The partitions, each with a connection to its executor.
    partitions: Vec<(BallistaClient, Written)>,
}

impl Results {
    /// Connects to the executors that have the rows.
    ///
    /// If an executor was lost while the last stage ran, a partition has several locations, because Ballista 55 also
    /// lists the output of the tasks before the stage ran again. Each location holds the whole partition, so any of
    /// them can be read.
    ///
    /// # Errors
    ///
    /// [`Lost`] if no executor that holds a partition can be reached.
    pub(crate) async fn connect(
        locations: Vec<PartitionLocation>,
        tls: Option<&Tls>,
    ) -> std::result::Result<Self, Lost> {
        let written: Vec<Written> = locations.into_iter().filter_map(Written::new).collect();
        let executors: HashMap<_, _> =
            written.iter().map(|written| (written.executor.id.clone(), written.executor.clone())).collect();
        let clients = futures::stream::iter(executors)
            .map(async |(id, executor)| (id, connect(&executor, tls).await))
            .buffer_unordered(CONNECTING);
        let (mut connected, mut lost) = (HashMap::new(), None);
        for (id, client) in clients.collect::<Vec<_>>().await {
            match client {
                Ok(client) => drop(connected.insert(id, client)),
                Err(error) => lost = Some(error),
            }
        }
        let expected: HashSet<u32> = written.iter().map(|written| written.partition.partition_id).collect();
        let reached = written.into_iter().filter_map(|written| {
            let client = connected.get(&written.executor.id)?.clone();
            Some((written.partition.partition_id, (client, written)))
        });
        let partitions: BTreeMap<_, _> = reached.collect();
        match lost {
            Some(lost) if partitions.len() < expected.len() => Err(lost),
            _ => Ok(Self { partitions: partitions.into_values().collect() }),
        }
    }

    /// Returns the rows, one partition after another.
    pub(crate) fn rows(self) -> impl Stream<Item = Result<RecordBatch>> {
        let fetched = |(client, written): (BallistaClient, Written)| written.fetch(client);
        futures::stream::iter(self.partitions).then(fetched).try_flatten()
    }
}

/// A partition that a task has written.
struct Written {
    partition: PartitionId,
    executor: ExecutorMetadata,
    location: PartitionLocation,
}

impl Written {
    /// Returns `None` if the location lacks its partition or its executor. Ballista always sets both; without them the
    /// rows would be missing, and the digest of all rows would reveal that.
    fn new(location: PartitionLocation) -> Option<Self> {
        let (partition, executor) = (location.partition_id.clone()?, location.executor_meta.clone()?);
        Some(Self { partition, executor, location })
    }

    async fn fetch(self, mut client: BallistaClient) -> Result<SendableRecordBatchStream> {
        let Self { partition, executor, location } = self;
        let (partition, layout) = (partition.into(), location.layout());
        let rows = client.fetch_partition_proxied(
            &executor.id,
            &partition,
            location.file_id,
            layout,
            &executor.host,
            port(&executor),
            true,
        );
        Ok(rows.await.map_err(|error| Lost::new(&executor, &error))?)
    }
}

/// Connects to an executor.
async fn connect(
    executor: &ExecutorMetadata,
    tls: Option<&Tls>,
) -> std::result::Result<BallistaClient, Lost> {
    let secure = tls.map(Tls::endpoints);
    let endpoint: EndpointOverrideFn = Arc::new(move |endpoint| {
        let endpoint = secure.as_ref().map_or(Ok(endpoint.clone()), |secure| secure(endpoint))?;
        Ok(endpoint.connect_timeout(CONNECT_WAIT))
    });
    let config = GrpcClientConfig::from(&BallistaConfig::default());
    let client = BallistaClient::try_new(
        &executor.host,
        port(executor),
        MESSAGE_BYTES as usize,
        tls.is_some(),
        Some(Arc::new(BallistaConfigGrpcEndpoint::new(endpoint))),
        config.io_retries_times,
        config.io_retry_wait_time_ms,
        0,
        0,
    );
    client.await.map_err(|error| Lost::new(executor, &error))
}

/// Returns the port of an executor, which the scheduler reports as a wider integer.
fn port(executor: &ExecutorMetadata) -> u16 {
    u16::try_from(executor.port).unwrap_or_default()
}

/// An error: the rows of a partition cannot be fetched, because their executor cannot be reached.
#[derive(Debug)]
pub(crate) struct Lost {
    executor: String,
    cause: String,
}

impl Lost {
    fn new(executor: &ExecutorMetadata, cause: &BallistaError) -> Self {
        Self { executor: format!("{}:{}", executor.host, executor.port), cause: cause.to_string() }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { executor, cause } = self;
        write!(f, "the result of executor {executor} cannot be fetched: {cause}")
    }
}

impl From<Lost> for DataFusionError {
    fn from(lost: Lost) -> Self {
        failure(lost.to_string(), "run the command again; nothing was committed")
    }
}

pub(crate) fn failure(message: String, hint: &str) -> DataFusionError {
    DataFusionError::External(Box::new(onefold_ingest::Error::engine(message, hint)))
}
